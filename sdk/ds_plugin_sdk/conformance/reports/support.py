"""The support matrix: features and op families on one or several targets, from the JSON reports of their runs.

A feature that works says by what its ops came: a native kernel, the SDK's reference implementation, or DeepSpeed's own
op, lent. What does not work is DeepSpeed's limit, lacking (the target declares so), or failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from ds_plugin_sdk.conformance.outcome import Outcome, Report
from ds_plugin_sdk.conformance.reports.summary import Table

# How ops come to a process, as `ds_plugin_sdk.report` and the provenance say it, in the words of the matrix.
_SOURCES = {
    "prebuilt": "native",
    "cache": "native",
    "compiles": "native",
    "compiled": "native",
    "reference": "reference",
    "lent": "lent",
    "deepspeed": "lent",
    "not offered": "not offered",
    "broken": "failed",
    "failed": "failed",
}


def tables(reports: Sequence[Report]) -> list[Table]:
    """Op families, features, and the places where DeepSpeed sets the limit."""
    names = [report.target.rpartition(":")[2] for report in reports]
    return [
        Table("Op families", ["op", *names], _rows([_families(report) for report in reports])),
        Table("Features", ["feature", *names], _rows([_features(report) for report in reports])),
        Table("Where DeepSpeed sets the limit", ["feature", "place"], _limits(reports)),
    ]


def markdown(reports: Sequence[Report]) -> str:
    """The tables in Markdown."""
    return "\n".join(
        f"## {table.title}\n\n{_line(table.columns)}{_line(['---'] * len(table.columns))}"
        + "".join(map(_line, table.rows))
        for table in tables(reports)
        if table.rows
    )


def html(reports: Sequence[Report]) -> str:
    """The tables as one page."""
    parts = [
        f"<h2>{escape(table.title)}</h2><table><tr>{_cells('th', table.columns)}</tr>"
        + "".join(f"<tr>{_cells('td', row)}</tr>" for row in table.rows)
        + "</table>"
        for table in tables(reports)
        if table.rows
    ]
    style = "body{font:15px system-ui;margin:2rem}td,th{padding:.2rem .8rem;text-align:left;border-bottom:1px solid}"
    head = f'<meta charset="utf-8"><title>Support matrix</title><style>{style}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>\n'


def _families(report: Report) -> dict[str, str]:
    ops: Iterable[Mapping[str, str]] = report.environment.get("ops", [])
    # One that is combined of families is what they are.
    return {op["name"]: _SOURCES.get(op["origin"], op["origin"]) for op in ops if op["origin"] != "combined"}


def _features(report: Report) -> dict[str, str]:
    return {
        outcome.item.id.removeprefix("features."): _support(outcome)
        for outcome in report.outcomes
        if outcome.item.level == "features"
    }


def _support(outcome: Outcome) -> str:
    if outcome.verdict == "passed":
        ops: Mapping[str, str] = outcome.facts.get("ops", {})
        sources = {_SOURCES.get(origin, "") for origin in ops.values()} - {""}
        return " and ".join(sorted(sources)) or "works"
    return {"skipped": f"lacking: {outcome.reason}"}.get(outcome.verdict, str(outcome.verdict))


def _limits(reports: Sequence[Report]) -> list[list[str]]:
    found = {
        outcome.item.id.removeprefix("features."): outcome.reason
        for report in reports
        for outcome in report.outcomes
        if outcome.verdict == "DeepSpeed's limit"
    }
    return [[name, reason] for name, reason in found.items()]


def _rows(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    names = dict.fromkeys(name for column in columns for name in column)
    return [[name, *(column.get(name, "") for column in columns)] for name in names]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _cells(tag: str, cells: Sequence[str]) -> str:
    return "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)
