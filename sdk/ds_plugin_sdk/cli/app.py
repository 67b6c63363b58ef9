"""The commands of ``sdk``."""

from __future__ import annotations

import typer

from ds_plugin_sdk import __version__
from ds_plugin_sdk.cli.bench import bench
from ds_plugin_sdk.cli.build import build
from ds_plugin_sdk.cli.cache import cache
from ds_plugin_sdk.cli.check import check
from ds_plugin_sdk.cli.conformance import conformance
from ds_plugin_sdk.cli.contract import contract
from ds_plugin_sdk.cli.doctor import doctor
from ds_plugin_sdk.cli.fuzz import fuzz
from ds_plugin_sdk.cli.needs_torch import needs_torch
from ds_plugin_sdk.cli.new_plugin import new_plugin
from ds_plugin_sdk.cli.plugins import list_plugins
from ds_plugin_sdk.cli.report import report

app = typer.Typer(
    name="sdk",
    help="Bring DeepSpeed to new hardware: what is installed, where each op comes from, and how fast it is.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("list")(needs_torch(list_plugins))
app.command("report")(needs_torch(report))
app.command("doctor")(needs_torch(doctor))
app.command("check")(check)
app.command("build")(needs_torch(build))
app.command("new-plugin")(needs_torch(new_plugin))
app.add_typer(cache, name="cache")
app.command("contract")(needs_torch(contract))
app.command("conformance")(conformance)
app.command("fuzz")(needs_torch(fuzz))
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ds-plugin-sdk {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and stop."
    ),
) -> None:
    pass
