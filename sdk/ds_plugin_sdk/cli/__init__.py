"""The command line: ``sdk``, also installed as ``ds-sdk`` where another tool owns the shorter name."""

from __future__ import annotations

import io
import os
import sys

from ds_plugin_sdk.errors import SdkError


def main() -> None:
    """Run a command.

    SDK errors are printed without a traceback, and so is that torch cannot be imported, or that the output cannot be
    written; the exit status is 1 then.
    """
    _escape_letters()
    try:
        _import_torch()

        from ds_plugin_sdk.cli.app import app

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


def _import_torch() -> None:
    try:
        import torch  # noqa: F401  # only whether it can be
    except (ImportError, OSError, RuntimeError) as error:  # absent, without its libraries, or a backend's fault
        raise SdkError(
            "torch cannot be imported",
            why=f"{type(error).__name__}: {error}",
            hint=f"see `{sys.executable} -c 'import torch'`; the SDK needs torch 2.11 or later in this environment",
        ) from error


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
