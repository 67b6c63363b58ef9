"""How the commands print: one console for results, one for progress and errors."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

output = Console()
errors = Console(stderr=True)

_ANY_WIDTH = 1000

_COLOURS = {
    "ok": "green",
    "warning": "yellow",
    "fails": "red",
    "available": "green",
    "chosen": "green",
    "prebuilt": "green",
    "cache": "green",
    "accelerator": "green",
    "compiled": "cyan",
    "compiles": "cyan",
    "reference": "yellow",
    "absent": "dim",
    "broken": "red",
    "failed": "red",
    "missing": "red",
    "not offered": "dim",
}


@contextlib.contextmanager
def results_alone() -> Iterator[None]:
    """Keep standard output for `output` and `table`: what libraries print meanwhile goes to standard error."""
    output.file = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        output.file = None  # type: ignore[assignment]  # as it was made: whatever sys.stdout is


def print_json(value: object) -> None:
    """Print a value as JSON, for programs: in ASCII, without colours, whatever the environment asks."""
    output.file.write(json.dumps(value, indent=2) + "\n")
    output.file.flush()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table; cells are text, never markup, and a known verdict at a cell's start gives it a colour.

    Where the output is no terminal, lines are as long as they need to be: logs are read by programs too.
    """
    view = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None)
    for column in columns:
        view.add_column(column, overflow="fold")
    for row in rows:
        view.add_row(*(_cell(str(value)) for value in row))
    if output.file.isatty():  # rich also takes what FORCE_COLOR is set for
        output.print(view)
    else:
        Console(file=output.file, width=_ANY_WIDTH, soft_wrap=True).print(view, crop=False)


def _cell(value: str) -> Text:
    colour = next((colour for word, colour in _COLOURS.items() if value.startswith(word)), "")
    return Text(value, style=colour)
