"""``sdk check``: which lines of Python sources are bound to CUDA, and what to write in their place."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from ds_plugin_sdk import source_check
from ds_plugin_sdk.cli.console import print_json


def check(
    sources: list[Path] = typer.Argument(help="Python files, and folders for the .py files in them."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Find what is bound to CUDA in Python sources, without running them; the exit status is 1 if there is any."""
    findings = source_check.check_files(sources)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for found in findings:
            typer.echo(f"{found.file}:{found.line}:{found.column}: {found.code}  # {found.meaning}")
            typer.echo(f"  -> {found.instead}")
        files, count = len({finding.file for finding in findings}), len(source_check.python_files(sources))
        typer.echo(f"Places bound to CUDA: {len(findings)}, in {files} of {count} files.")
    if findings:
        raise typer.Exit(1)
