"""The command line: ``sdk``, also installed as ``ds-sdk`` where another tool owns the shorter name."""

from __future__ import annotations

import io
import os
import sys

import typer

from ds_plugin_sdk import __version__
from ds_plugin_sdk.cli.bench import bench
from ds_plugin_sdk.cli.build import build
from ds_plugin_sdk.cli.cache import cache
from ds_plugin_sdk.cli.check import check
from ds_plugin_sdk.cli.conformance import conformance
from ds_plugin_sdk.cli.console import errors
from ds_plugin_sdk.cli.contract import contract
from ds_plugin_sdk.cli.doctor import doctor
from ds_plugin_sdk.cli.fuzz import fuzz
from ds_plugin_sdk.cli.new_plugin import new_plugin
from ds_plugin_sdk.cli.plugins import list_plugins
from ds_plugin_sdk.cli.report import report
from ds_plugin_sdk.errors import SdkError

app = typer.Typer(
    name="sdk",
    help="Bring DeepSpeed to new hardware: what is installed, where each op comes from, and how fast it is.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("list")(list_plugins)
app.command("report")(report)
app.command("doctor")(doctor)
app.command("check")(check)
app.command("build")(build)
app.command("new-plugin")(new_plugin)
app.add_typer(cache, name="cache")
app.command("contract")(contract)
app.command("conformance")(conformance)
app.command("fuzz")(fuzz)
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


def main() -> None:
    """Run a command.

    SDK errors are printed without a traceback, and so is that the output cannot be written; the exit status is 1 then.
    """
    _escape_letters()
    try:
        app()
    except SdkError as error:
        _say(str(error))
        _write_out()
        sys.exit(1)
    except SystemExit:
        _write_out()
        raise
    except OSError:
        _write_out("\n")  # what could not be written is lost: whether that was it, another line tells
        raise


def _escape_letters() -> None:
    """Write what the output's encoding has no letters for, or a path that is no text, as escapes, not as an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _write_out(more: str = "") -> None:
    """Write what is left of the output: where that fails at Python's end, it is with a traceback."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except BrokenPipeError:
        pass
    except OSError as error:
        _say(f"the output cannot be written: {error.strerror}")
        sys.stderr.flush()
        os._exit(1)  # Python would try once more


def _say(error: str) -> None:
    errors.print(f"[bold red]error:[/] {_plain(error)}", soft_wrap=True)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
