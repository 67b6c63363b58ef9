"""The command line: ``sdk``, also installed as ``ds-sdk`` where another tool owns the shorter name."""

from __future__ import annotations

import io
import os
import sys

from ds_plugin_sdk.errors import SdkError


def main() -> None:
    """Run a command.

    SDK errors are printed without a traceback, and so is that the output cannot be written; the exit status is 1 then.
    """
    _escape_letters()
    try:
        from ds_plugin_sdk.cli.app import app

        app()
    except SdkError as error:
        _say(str(error))
        _write_out()
        sys.exit(1)
    except KeyboardInterrupt:  # while the commands are imported; later typer ends them so
        sys.exit(130)
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
    from ds_plugin_sdk.cli.console import errors

    errors.print(f"[bold red]error:[/] {_plain(error)}", soft_wrap=True)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
