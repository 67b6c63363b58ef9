"""A report of all benchmarks: ``NAME.json``, the page ``NAME.md`` made of it, and its charts in ``img/NAME``.

A row of a benchmark begins with text and whole numbers that say what was measured; then come its figures. Those of them
that were repeated have their spread in ``spread``, by the figure's name.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ds_plugin_sdk.bench import chart
from ds_plugin_sdk.bench.suite import BENCHMARKS, Result, Settings, measure
from ds_plugin_sdk.conformance.environment import processor
from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.jit.target import here
from ds_plugin_sdk.jit.toolchains import CxxToolchain
from ds_plugin_sdk.paths import write_whole
from ds_plugin_sdk.report import versions_of

FORMAT = 1
QUIET = 0.1  # the part of all cores that others may take before a report says that its figures are provisional
# The level of instructions does not say how fast bfloat16 is.
_FAST, _SLOW = "products at least as fast as those of float32", "products slower than those of float32"
_PACKAGES = (
    "ds-plugin-sdk",
    "ds-plugin-cpu",
    "torch",
    "deepspeed",
    "transformers",
    "ctranslate2",
    "llama-cpp-python",
)

Row = dict[str, Any]


@dataclass
class Report:
    """What was measured.

    Attributes:
        machine: its CPU, cores, memory and system.
        versions: of the packages, Python and the compiler; "not installed".
        date: when it began, by the clock of the machine, ISO 8601.
        results: by benchmark.
    """

    machine: dict[str, str]
    versions: dict[str, str]
    date: str
    results: dict[str, Result] = field(default_factory=dict)


def run(
    file: Path,
    settings: Settings,
    *,
    names: Sequence[str] = (),
    resume: bool = False,
    minutes: float = float("inf"),
    tell: Callable[[str], object] = lambda line: None,
) -> Report:
    """Measure, and write the report after each benchmark.

    Args:
        file: the report, ``FOLDER/NAME.json``; the folder is made if it is missing.
        settings: for the benchmarks.
        names: of `BENCHMARKS`; all of them if there are none.
        resume: keep what the report has, but for what failed and what is named.
        minutes: for all; what comes later is not begun.
        tell: gets a line for each benchmark.

    Raises:
        SdkError: no such benchmark; matplotlib is missing; no report to go on with, or it is of something else.
    """
    chart.require_matplotlib()
    for name in names:
        if name not in BENCHMARKS:
            raise SdkError(f"There is no benchmark {name!r}", hint=f"one of: {', '.join(BENCHMARKS)}")
    report = Report(_machine(), _versions(), time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    if resume:
        before = load(file)
        was, now = ({**each.machine, **each.versions} for each in (before, report))
        if changed := [f"{name} was {was.get(name)}" for name in now if was.get(name) != now[name]]:
            hint = "start again without --resume"
            raise SdkError("This run cannot be resumed", why="; ".join(changed), hint=hint)
        report.date = before.date
        report.results = {
            name: result for name, result in before.results.items() if not result.failed and name not in names
        }
    end = time.monotonic() + 60 * minutes
    for name in names or BENCHMARKS:
        if name not in report.results:
            report.results[name] = result = measure(name, settings, end - time.monotonic())
            save(report, file)
            tell(f"{name}: {result.seconds:.0f} s{f', failed: {result.failed}' if result.failed else ''}")
    save(report, file)
    return report


def page_of(file: Path) -> Path:
    """The page of a report."""
    return file.with_suffix(".md")


def save(report: Report, file: Path) -> None:
    """Write the report, its page and its charts."""
    file.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, **asdict(report)}, indent=None, separators=(",", ":"))
    write_whole(file, text.replace('{"', '\n{"') + "\n")
    write_whole(page_of(file), page(report, file))


def load(file: Path) -> Report:
    """Read a report.

    Raises:
        SdkError: there is none, or it is of another format.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if found.pop("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        found["results"] = {name: Result(**result) for name, result in found["results"].items()}
        return Report(**found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "`sdk bench all --report FILE` writes one"
        raise SdkError(f"{file} cannot be read as a report", why=str(error), hint=hint) from error


def _machine() -> dict[str, str]:
    import torch

    from ds_plugin_sdk.ops._products import multiplies_fast

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": processor(),
        "instructions": here().level,
        "bfloat16": _FAST if multiplies_fast(torch.bfloat16) else _SLOW,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "system": platform.platform(),
    }


def _versions() -> dict[str, str]:
    compiler = CxxToolchain().compiler().text.partition("\n")[0]
    return {"Python": platform.python_version(), "compiler": compiler, **versions_of(_PACKAGES)}


# ---- the page -------------------------------------------------------------------------------------------------------
def page(report: Report, file: Path) -> str:
    """The report in Markdown; charts are drawn into ``img/NAME`` beside `file`."""
    sections = [_section(name, report.results[name], file) for name in BENCHMARKS if name in report.results]
    return "\n\n".join([_head(report, file), *sections]) + "\n"


def _head(report: Report, file: Path) -> str:
    machine = [[key, value] for key, value in {**report.machine, **report.versions}.items()]
    others = max((result.others for result in report.results.values()), default=0.0)
    missing = [name for name in BENCHMARKS if name not in report.results]
    processor = f" ({report.machine['processor']})" if "processor" in report.machine else ""
    without = " without bfloat16" if report.machine.get("bfloat16") == _SLOW else ""
    lines = [
        f"# Performance on {report.machine.get('instructions', 'another machine')}{without}{processor}",
        "Every figure that we state of such a machine, written by one command, which measures the peers too:",
        f"    make performance REPORT=docs/{file.name}",
        f"`sdk bench compare docs/{file.name} other/{file.name}` says what is faster or slower in another"
        " report: the JSON has the spread of each figure's repetitions."
        ' Times are medians of wall time; those who are compared take turns. Speeds "times" somebody\'s are ours in'
        " multiples of theirs: above 1, ours is faster. Formulas and limits are on the pages that the sections name.",
        f"Begun {report.date.replace('T', ' ')}; {sum(r.seconds for r in report.results.values()) / 60:.0f} minutes of"
        f" measuring. Other programs took up to {100 * others:.0f} % of the cores meanwhile.",
    ]
    if others > QUIET:
        lines.append("**These figures are provisional: the machine was not idle.**")
    if missing:
        lines.append(f"Not part of this run: {', '.join(missing)}.")
    done = [
        [
            f"[{BENCHMARKS[name].title}](#{_anchor(BENCHMARKS[name].title)})",
            "measured" if not result.failed else f"not whole: {_cell(result.failed)}",
            result.begun.replace("T", " "),
            f"{result.seconds:.0f}",
            f"{100 * result.others:.0f} %",
        ]
        for name, result in sorted(report.results.items(), key=lambda item: list(BENCHMARKS).index(item[0]))
    ]
    return "\n\n".join(
        [
            *lines,
            "## Machine and versions",
            _table(["", ""], machine),
            "## Sections",
            _table(["section", "result", "begun", "seconds", "others' part of the cores"], done),
        ]
    )


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower() if c.isalnum() or c in " -").replace(" ", "-")


def _section(name: str, result: Result, file: Path) -> str:
    benchmark = BENCHMARKS[name]
    about = benchmark.about + (f" [More]({benchmark.page})." if benchmark.page else "")
    parts = [f"## {benchmark.title}", about, f"    {benchmark.command}"]
    families = bool(result.rows) and "times" in result.rows[0] and isinstance(result.rows[0]["times"], dict)
    if result.rows:
        parts.append(_family(result.rows) if families else _plain(result.rows))
        picture = chart.draw_section(name, result.rows, file.parent / "img" / file.stem)
        if picture is not None:
            parts.append(f"![{benchmark.title}](img/{file.stem}/{picture.name})")
    if result.failed:
        parts.append(f"Not whole: {_cell(result.failed)}")
    parts += [f"- {_cell(note)}" for note in result.notes]
    return "\n\n".join(parts)


def _plain(rows: Sequence[Row]) -> str:
    """Columns are those that have a value anywhere."""
    names = [name for name in rows[0] if name != "spread" and any(row[name] not in (None, "") for row in rows)]
    return _table([_words(name) for name in names], [[_number(row[name]) for name in names] for row in rows])


def _family(rows: Sequence[Row]) -> str:
    """A line for each case; in it a cell for each dtype and number of threads: the time, and multiples of others'."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row["times"]))
    columns = list(dict.fromkeys((row["dtype"], row["threads"]) for row in rows))
    cases = list(dict.fromkeys((row["what"], row["setting"]) for row in rows))
    cells = {(row["what"], row["setting"], row["dtype"], row["threads"]): _measured(row, peers) for row in rows}
    shares = any(row["times_copy"] is not None for row in rows)
    says = "; times " + ", ".join(peers) + ("; in brackets, times the rate of copying memory" if shares else "")
    head = ["", *(f"{dtype}, {threads} thread{'s' * (threads > 1)}" for dtype, threads in columns)]
    body = [
        [f"{what} ({setting})", *(cells.get((what, setting, *column), "") for column in columns)]
        for what, setting in cases
    ]
    return f"In a cell: time{says}.\n\n{_table(head, body)}"


def _measured(row: Row, peers: Sequence[str]) -> str:
    times = ", ".join(_number(row["times"].get(peer)) or "-" for peer in peers)
    microseconds, share = row["microseconds"], row["times_copy"]
    time = "" if microseconds is None else f"{_time(microseconds)}; "
    return f"{time}{times}" + ("" if share is None else f" ({_number(share)})")


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:.1f} ms" if microseconds >= 1e3 else f"{_number(microseconds)} us"


def _words(name: str) -> str:
    return name.replace("gb_s", "GB/s").replace("mib", "MiB").replace("_", " ")


def _number(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "" if value is None else str(value)
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return _cell(str(value))


def _cell(text: str) -> str:
    """Text as it stands, in a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":  # the page of a report again, when its words have changed: python -m ... FILE
    save(load(Path(sys.argv[1])), Path(sys.argv[1]))
