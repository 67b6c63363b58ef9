"""``sdk report``: what is installed, and where each op comes from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from ds_plugin_sdk import provenance
from ds_plugin_sdk.cli.console import errors, print_json, results_alone, table


def report(
    run: Path | None = typer.Option(
        None,
        exists=True,
        dir_okay=False,
        help="Report on a finished run instead: the file that DS_PLUGIN_PROVENANCE named.",
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Report versions, plugins, compilers, settings, and each op with its source and the reason."""
    if run is not None:
        _report_run(run, as_json)
        return
    from ds_plugin_sdk.report import collect  # imports torch

    with results_alone():
        facts = collect()
    if as_json:
        print_json(asdict(facts))
        return
    table("Versions", ("package", "version"), list(facts.versions.items()))
    table("Accelerator", ("", ""), facts.accelerator)
    table("Compilers", ("kind", "compiler"), list(facts.compilers.items()))
    table(
        "Settings in force",
        ("variable", "value", "meaning"),
        facts.settings or [("none", "", "all defaults")],
    )
    table(
        "Ops",
        ("op", "from", "provided by", "why"),
        [(op.name, op.origin, op.provider, op.reason) for op in facts.ops],
    )


def _report_run(run: Path, as_json: bool) -> None:
    from ds_plugin_sdk.report import summarise

    records, others = provenance.read(run)
    rows = summarise(records)
    for number in others:
        errors.print(f"{run}, line {number}, is cut off or no record", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    table(
        f"Where the ops of this run came from ({run.name})",
        ("what", "plugin", "from", "ranks", "detail"),
        [(row.name, f"{row.plugin} {row.version}", row.origin, row.ranks, row.detail) for row in rows],
    )
