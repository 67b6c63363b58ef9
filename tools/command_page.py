"""Writes docs/reference/cli.md from the commands themselves: ``make command-page``. A test compares the two."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from ds_plugin_sdk.cli.app import app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "cli.md"

HEAD = """\
# Commands

Every command, as `sdk COMMAND --help` describes it; `make command-page` writes this page. `ds-sdk` is the same program.
An error is printed as it reads, without a traceback, and the exit status is then 1, or 2 for wrong use.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_sections(typer.main.get_command(app), "sdk")])


def _sections(command: Any, name: str) -> Iterator[str]:
    for child in getattr(command, "commands", {}).values():
        title = f"{name} {child.name}"
        yield from _section(child, title)
        yield from _sections(child, title)


def _section(command: Any, title: str) -> Iterator[str]:
    parameters = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = " ".join(_argument(parameter) for parameter in parameters if _is_argument(parameter))
    group = " COMMAND ..." if getattr(command, "commands", None) else ""
    options = " [options]" if any(not _is_argument(parameter) for parameter in parameters) else ""
    yield f"{'#' * (title.count(' ') + 1)} {title}\n"
    yield f"    {title}{options}{' ' + arguments if arguments else ''}{group}\n"
    yield f"{_text(command.help or '')}\n"
    if parameters:
        yield "| | default | meaning |\n|---|---|---|"
        yield from (_row(parameter) for parameter in parameters)
        yield ""


def _is_argument(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "argument")


def _argument(parameter: Any) -> str:
    name = str(parameter.name).upper() + ("..." if parameter.nargs == -1 else "")
    return name if parameter.required else f"[{name}]"


def _row(parameter: Any) -> str:
    name = _argument(parameter) if _is_argument(parameter) else ", ".join((*parameter.opts, *parameter.secondary_opts))
    given = not parameter.required and isinstance(parameter.default, (str, int, float)) and parameter.default
    default = f"`{parameter.default}`" if given else ""
    return f"| `{name}` | {default} | {_text(parameter.help or '')} |"


def _text(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
