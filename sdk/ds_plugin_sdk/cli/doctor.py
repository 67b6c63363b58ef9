"""``sdk doctor``: whether a run will work here, or on the hosts of a hostfile."""

from __future__ import annotations

import json
import shlex
import socket
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ds_plugin_sdk.cli.console import output, print_json, results_alone, table
from ds_plugin_sdk.settings import settings

if TYPE_CHECKING:
    from ds_plugin_sdk.doctor import Finding


def doctor(
    hosts: Path | None = typer.Option(
        None, help="Hostfile as DeepSpeed reads it; each of its hosts is asked by ssh. Not given: this machine alone."
    ),
    port: int | None = typer.Option(
        None, min=1, max=65535, help="Port at which the ranks meet; MASTER_PORT, else 29500."
    ),
    ssh: str = typer.Option("ssh", help="Command that reaches a host, with its options: 'ssh -p 2222'."),
    timeout: float = typer.Option(60, min=0, help="Seconds for each host to answer."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    facts: bool = typer.Option(False, "--facts", hidden=True, help="Print this machine's facts alone, as JSON."),
) -> None:
    """Check, on this machine or on every host of a run, what a run needs; the exit status is 1 if it will fail."""
    from ds_plugin_sdk import doctor as checks  # imports torch

    port = settings.master_port if port is None else port
    if facts:
        typer.echo(json.dumps(asdict(checks.examine(port))))
        return
    with results_alone():
        if hosts is None:
            slots = {socket.gethostname(): 1}  # by its name: a job's log has several such tables
            findings = checks.compare(dict.fromkeys(slots, checks.Heard(checks.examine(port))), slots)
        else:
            slots = checks.read_hostfile(hosts)
            findings = checks.compare(checks.ask_all(slots, port, _words(ssh), timeout), slots)
    failing = [finding for finding in findings if finding.verdict == "fails"]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        where = "this machine" if hosts is None else f"{len(slots)} hosts of {hosts}"
        table(
            f"What a run finds on {where}",
            ("verdict", "check", "where", "found", "what to do"),
            [(f.verdict, f.check, _where(f, len(slots)), f.found, f.next) for f in findings],
        )
        output.print("It will fail: see the red lines." if failing else "Nothing will fail.")
    if failing:
        raise typer.Exit(1)


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise typer.BadParameter(f"--ssh {command!r}: {error}") from error


def _where(finding: Finding, count: int) -> str:
    return "all" if count > 1 and len(finding.hosts) == count else ", ".join(finding.hosts)
