"""One self-contained HTML page: a vendor's report for customers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from html import escape

from ds_plugin_sdk.conformance.outcome import FAILURES, Outcome, Report, explain
from ds_plugin_sdk.conformance.reports import summary
from ds_plugin_sdk.conformance.reports.summary import Table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #1c2024; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .6rem; vertical-align: top; }
th { border-bottom: 2px solid #c8ccd2; } td { border-bottom: 1px solid #e4e7eb; overflow-wrap: anywhere; }
pre { background: #f5f6f8; padding: .8rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px; }
summary { cursor: pointer; padding: .15rem 0; }
.total { font-weight: 600; padding: .6rem .8rem; border-left: 6px solid; }
.good { color: #116329; } .bad { color: #b42318; } .neutral { color: #57606a; }
@media (prefers-color-scheme: dark) {
  body { background: #16181c; color: #e6e8eb; } th, td { border-color: #363b42; } pre { background: #22262c; }
  .good { color: #4ac26b; } .bad { color: #ff8078; } .neutral { color: #9aa4af; }
}
"""

_CLASSES = {"passed": "good", "expected failure": "neutral", "skipped": "neutral", "DeepSpeed's limit": "neutral"}


def render(report: Report) -> str:
    """The page: the judgement, the matrix, failures in full, declared limits, environment, every case with its time."""
    title = f"Conformance of {escape(report.target)}"
    return "\n".join(
        [
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>',
            f"<h1>{title}</h1>",
            f'<p class="total {"bad" if report.status else "good"}">{escape(summary.total(report))}</p>',
            *_parts(report),
            "</body></html>\n",
        ]
    )


def _parts(report: Report) -> Iterator[str]:
    if report.problems:
        yield "<h2>Problems of the expectations</h2><ul>"
        yield from (f"<li>{escape(problem)}</li>" for problem in report.problems)
        yield "</ul>"
    yield _table(dataclasses.replace(summary.matrix(report), title="By level and subject"))
    if report.failures:
        yield "<h2>Failures</h2>"
        yield from (_failure(outcome, report.target) for outcome in report.failures)
    yield from (
        _table(table)
        for table in (
            summary.expected(report),
            summary.limits(report),
            summary.skips(report),
            summary.declared(report),
            summary.ops(report),
            summary.environment(report),
        )
        if table.rows
    )
    yield _cases(report)


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    rows = "".join(f"<tr>{''.join(map(_cell, table.columns, row))}</tr>" for row in table.rows)
    return f"<h2>{escape(table.title)}</h2><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(column: str, text: str) -> str:
    """A cell; counts have the colour of the end that they count."""
    colour = "good" if column == "passed" else "bad" if column in FAILURES else ""
    return f'<td class="{colour}">{escape(text)}</td>' if colour and text else f"<td>{escape(text)}</td>"


def _failure(outcome: Outcome, target: str) -> str:
    head = f'<span class="bad">{outcome.verdict}</span> {escape(outcome.item.id)} ({escape(outcome.item.clause)})'
    return f"<details open><summary>{head}</summary><pre>{escape(explain(outcome, target))}</pre></details>"


def _cases(report: Report) -> str:
    rows = "".join(
        f"<tr><td>{escape(each.item.id)}</td><td>{escape(each.item.clause)}</td>"
        f'<td class="{_CLASSES.get(each.verdict, "bad")}">{each.verdict}</td><td>{each.seconds:.2f}</td></tr>'
        for each in report.outcomes
    )
    head = "<tr><th>case</th><th>clause</th><th>end</th><th>seconds</th></tr>"
    return (
        f"<h2>All cases</h2><details><summary>{len(report.outcomes)} cases</summary>"
        f"<table><thead>{head}</thead><tbody>{rows}</tbody></table></details>"
    )
