"""``sdk conformance``: whether a plugin is what DeepSpeed and its users take it for.

Exit status: 0, all that was checked holds; 1, something does not, or an expectation is wrong; 2, wrong use, or the
plugin cannot be had; 3, nothing was checked.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ds_plugin_sdk.cli.console import errors, output, table
from ds_plugin_sdk.cli.needs_torch import import_torch
from ds_plugin_sdk.conformance.expectations import Expectations
from ds_plugin_sdk.conformance.outcome import BROKEN, HOLDS, LEVELS, UNUSABLE, Item, Outcome, Report, explain
from ds_plugin_sdk.conformance.reports import badge, difference, junit, page, summary
from ds_plugin_sdk.conformance.reports import support as matrix
from ds_plugin_sdk.conformance.run import Runner, UnusableTargetError
from ds_plugin_sdk.conformance.selection import Selection
from ds_plugin_sdk.errors import ConformanceError
from ds_plugin_sdk.paths import write_whole

_SHOWN_IN_FULL = 10

# Where to write, if anywhere, and what of the report.
_File = tuple[Path | None, Callable[[Report], str]]

# A run that is killed loses no more than this.
_KEEP_SECONDS = 30.0


def conformance(
    name: str = typer.Argument("", help="An installed plugin, such as cpu, or a class: package.module:Class."),
    level: list[str] = typer.Option(
        [], help="Only this level: runtime, ops, training, distributed, features, deepspeed. Repeatable."
    ),
    op: list[str] = typer.Option([], help="Only this op. Repeatable."),
    dtype: list[str] = typer.Option([], help="Only this dtype. Repeatable."),
    pattern: list[str] = typer.Option([], "-k", help="Only cases with this id, * for any text, or part. Repeatable."),
    list_: bool = typer.Option(False, "--list", help="List the cases, run none."),
    json_: Path | None = typer.Option(None, "--json", help="Write the report as JSON."),
    junit_: Path | None = typer.Option(None, "--junit", help="Write it as JUnit's XML."),
    html: Path | None = typer.Option(None, "--html", help="Write it as one HTML page."),
    badge_: Path | None = typer.Option(None, "--badge", help="Write a badge for a README, as SVG."),
    expectations: Path | None = typer.Option(
        None, help="The file of expected failures, instead of the plugin's conformance.toml."
    ),
    timeout: float | None = typer.Option(None, help="Seconds for each case, instead of each check's own."),
    deepspeed_tests: Path | None = typer.Option(
        None, exists=True, file_okay=False, help="The folder 'tests' of a clone of DeepSpeed, for level deepspeed."
    ),
    resume: bool = typer.Option(
        False, "--resume", help="Go on with the run that the file of --json has; what failed runs again."
    ),
    diff: tuple[Path, Path] | None = typer.Option(
        None, metavar="OLD NEW", help="Compare two JSON reports, run nothing."
    ),
    support: list[Path] = typer.Option(
        [], metavar="JSON", help="Print the support matrix of these JSON reports; --html writes it. Repeatable."
    ),
    contract: bool = typer.Option(False, "--contract", help="Print the contract page, run nothing."),
) -> None:
    """Check a plugin against the contract. Exit status 0: it holds; 1: it does not; 2: wrong use; 3: nothing ran."""
    unknown = [each for each in level if each not in LEVELS]
    if unknown:
        raise typer.BadParameter(f"there is no level '{unknown[0]}'; the levels are {', '.join(LEVELS)}")
    selection = Selection(level, op, dtype, pattern)
    try:
        if contract:
            status = _contract()
        elif diff is not None:
            status = _diff(*diff)
        elif support:
            status = _support([_read(path) for path in support], html)
        elif resume and json_ is None:
            raise typer.BadParameter("--resume goes on with the run that the file of --json has")
        elif not name:
            raise typer.BadParameter("name a plugin; sdk list has them")
        else:
            tests = {} if deepspeed_tests is None else {"DS_PLUGIN_DEEPSPEED_TESTS": str(deepspeed_tests.resolve())}
            done = _done(json_, name) if resume and json_ is not None and json_.exists() else []
            with Runner(name, timeout=timeout, environment=tests) as runner:
                status = (
                    _list(runner, selection)
                    if list_
                    else _check(
                        runner,
                        selection,
                        expectations,
                        done,
                        [(json_, _json), (junit_, junit.render), (html, page.render), (badge_, badge.render)],
                    )
                )
    except ConformanceError as error:
        if isinstance(error, UnusableTargetError):
            import_torch()  # as workers do: what it raises says more than that one ended
        errors.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(UNUSABLE) from None
    raise typer.Exit(status)


def _list(runner: Runner, selection: Selection) -> int:
    items = selection.of(runner.items())
    rows = [[item.id, item.clause, item.text, item.skip and f"skipped: {item.skip}"] for item in items]
    table(f"Cases of {runner.target}", ["case", "clause", "which says", ""], rows)
    return HOLDS


def _check(
    runner: Runner,
    selection: Selection,
    expectations_file: Path | None,
    done: list[Outcome],
    files: Sequence[_File],
) -> int:
    """Run, write each of `files`, the first from time to time, and print."""
    expectations = Expectations.of(runner.target, expectations_file)
    report = Report(runner.target, started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))
    start = time.perf_counter()
    items = runner.items()
    report.environment = runner.environment()
    report.problems = expectations.problems(items)
    selected = selection.of(items)
    again = {item.id for item in selected}
    report.outcomes = [outcome for outcome in done if not (outcome.failed and outcome.item.id in again)]
    position = {item.id: index for index, item in enumerate(items)}

    def write(wanted: Sequence[_File]) -> None:
        report.outcomes.sort(key=lambda outcome: position.get(outcome.item.id, len(items)))
        report.seconds = time.perf_counter() - start
        for path, render in wanted:
            _write(path, functools.partial(render, report))

    for path, _ in files:
        _check_writable(path)
    try:
        known = {outcome.item.id for outcome in report.outcomes}
        left = [item for item in selected if item.id not in known]
        _run(left, lambda item: expectations.judge(runner.run(item)), report, lambda: _keep(write, files[:1]))
    finally:  # also what an impatient user has stopped is reported
        write(files)  # first: who reads what is printed may be gone
        _print(report)
    return report.status


def _keep(write: Callable[[Sequence[_File]], None], files: Sequence[_File]) -> None:
    """What there is so far; a disk that is full now may have room at the end."""
    try:
        write(files)
    except ConformanceError as error:
        errors.print(f"{error}", markup=False, highlight=False, soft_wrap=True)


def _json(report: Report) -> str:
    return json.dumps(report.to_dict(), indent=1)


def _run(items: list[Item], run: Callable[[Item], Outcome], report: Report, keep: Callable[[], None]) -> None:
    """Run the cases, with a bar on a terminal and a line for each that fails; keep the report from time to time."""
    kept = time.monotonic()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=errors
    ) as progress:
        task = progress.add_task("", total=len(items))
        for item in items:
            progress.update(task, description=item.id)
            outcome = run(item)
            report.outcomes.append(outcome)
            if outcome.failed:
                errors.print(f"{outcome.verdict}: {item.id}", markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)
            if time.monotonic() - kept > _KEEP_SECONDS:
                keep()
                kept = time.monotonic()
        progress.update(task, description="done")


def _print(report: Report) -> None:
    say = functools.partial(output.print, markup=False, highlight=False, soft_wrap=True)
    _table(summary.matrix(report))
    for each in (summary.expected(report), summary.limits(report), summary.slowest(report)):
        if each.rows:
            say("")
            _table(each)
    for declaration, cases in summary.skips(report).rows:
        say("")
        say(textwrap.fill(f"Skipped, {declaration}: {cases}", 120, subsequent_indent="  ", break_on_hyphens=False))
    in_full = _one_of_each(report.failures)[:_SHOWN_IN_FULL]
    for outcome in in_full:
        say("")
        say(explain(outcome, report.target))
    rest = [outcome for outcome in report.failures if outcome not in in_full]
    if rest:
        say("")
        say("And, in full in what --json, --junit and --html write:")
    for outcome in rest:
        what = outcome.failure.what.splitlines()[0] if outcome.failure and outcome.failure.what else ""
        say(f"  {outcome.verdict}: {outcome.item.id}: {what}".rstrip(": "))
    for problem in report.problems:
        say(f"expectations: {problem}")
    say("")
    say(summary.total(report))


def _one_of_each(failures: list[Outcome]) -> list[Outcome]:
    """The first failure of each check: one mistake often fails a check in many cases."""
    first: dict[str, Outcome] = {}
    for outcome in failures:
        first.setdefault(outcome.item.check, outcome)
    return list(first.values())


def _table(each: summary.Table) -> None:
    table(each.title, each.columns, each.rows)


def _write(path: Path | None, render: Callable[[], str]) -> None:
    if path is not None:
        with _told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, render())  # a run may be ended at any time, and go on from it


def _check_writable(path: Path | None) -> None:
    """That a file can be written when the run is over; it stays as it is."""
    if path is not None and not path.is_symlink() and (path.is_file() or not path.exists()):
        with _told(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = not path.exists()
            path.open("a").close()
            if new:
                path.unlink()


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        raise ConformanceError(f"{path} cannot be written", why=why, hint="name a file in a folder of yours") from error


def _diff(old: Path, new: Path) -> int:
    """Exit status 1 where a case fails that did not."""
    before, after = _read(old), _read(new)
    _table(difference.table(before, after))
    changes = difference.changes(before, after)
    worse = sum(change.worse for change in changes)
    output.print(f"{len(changes)} cases ended otherwise, {worse} of them fail now and did not before.")
    return BROKEN if worse else HOLDS


def _support(reports: list[Report], html: Path | None) -> int:
    typer.echo(matrix.markdown(reports), nl=False)
    _write(html, lambda: matrix.html(reports))
    return HOLDS


def _done(path: Path, target: str) -> list[Outcome]:
    """What a report of the same target has."""
    report = _read(path)
    if report.target != target:
        raise ConformanceError(
            f"{path} is the report of {report.target}", hint="name another file, or leave out --resume"
        )
    return report.outcomes


def _read(path: Path) -> Report:
    try:
        return Report.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConformanceError(f"{path} is no report", why=str(error), hint="write one with --json") from error


def _contract() -> int:
    import_torch()
    from ds_plugin_sdk.conformance import contract_page

    typer.echo(contract_page.render(), nl=False)
    return HOLDS
