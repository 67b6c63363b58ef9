"""`sdk bench all` and `sdk bench compare`: one report that ends in time, one page, and what differs between two."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import typer.main

from ds_plugin_sdk.bench import compare, decode, report, scale, suite
from ds_plugin_sdk.bench.suite import BENCHMARKS, Benchmark, Result, Settings
from ds_plugin_sdk.bench.timing import spread
from ds_plugin_sdk.cli.bench import bench
from ds_plugin_sdk.errors import SdkError

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = Settings(example=None, wheels=None, disk=".", mpis=(), threads=2)
MACHINE = {"processor": "a", "cores": "2"}
FILE, PAGE = "performance.json", "performance.md"


def test_the_spread_is_that_of_the_middle_eight_of_ten() -> None:
    assert spread([3.0, 1.0, 2.0]) == (1, 3)
    assert spread([float(n) for n in range(20)]) == (2, 17)


# ---- one benchmark ----
def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_benchmark_that_fails_says_why() -> None:
    assert suite._run(program("pass"), 20, dict(os.environ)) is None
    assert suite._run(program("raise ValueError('no disk')"), 20, dict(os.environ)) == "ValueError: no disk"
    killed = program("import os; os.kill(os.getpid(), 9)")
    assert suite._run(killed, 20, dict(os.environ)) == "ended by a signal: Killed"


def test_a_benchmark_that_takes_too_long_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    # By a shell, which a busy machine has started long before the time is over.
    command = ["sh", "-c", 'sleep 600 & echo $! > "$0"; wait', str(file)]
    start = time.monotonic()
    assert suite._run(command, 3, dict(os.environ)) == "stopped after 3 s"
    assert time.monotonic() - start < 120
    assert not Path("/proc", file.read_text(encoding="ascii").strip(), "exe").exists()  # gone, or not reaped yet


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
from ds_plugin_sdk.bench import program
from ds_plugin_sdk.settings import child_environment
program.run(["sh", "-c", sys.argv[1], sys.argv[2]], child_environment(), apart=sys.argv[3] == "apart")
"""


@pytest.mark.parametrize("where", ["apart", "beside"])
def test_who_interrupts_a_benchmark_leaves_nothing_behind(where: str, tmp_path: Path) -> None:
    """A launcher, whose ranks are in sessions of their own, has time to stop them."""
    ready, stopped = tmp_path / "ready", tmp_path / "stopped"
    launcher = f'trap "sleep 1; touch {stopped}; exit" TERM; touch "$0"; while :; do sleep 0.1; done'
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED, launcher, str(ready), where]) as process:
        try:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.05)
            time.sleep(2)  # by then it waits for the launcher, which is as far as a signal can be answered
            process.send_signal(signal.SIGINT)
            assert process.wait(60) != 0
        finally:
            process.kill()
    assert stopped.exists()


@dataclass(frozen=True)
class Row:
    what: str
    threads: int
    seconds: float
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)


def test_rows_are_kept_when_a_later_one_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def rows(settings: Settings) -> Iterator[Row]:
        warnings.warn("libx is not compared: it is not installed", RuntimeWarning, stacklevel=1)
        warnings.warn("of no interest", RuntimeWarning, stacklevel=1)
        yield Row("first", settings.threads, 1.0)
        raise RuntimeError("later")

    monkeypatch.setitem(suite.BENCHMARKS, "two", Benchmark("Two", "sdk bench two", "", rows, 9))
    with pytest.raises(RuntimeError, match="later"):
        suite.main("two", SETTINGS, tmp_path / "rows")
    lines = [json.loads(line) for line in (tmp_path / "rows").read_text(encoding="utf-8").splitlines()]
    assert lines[0] == "libx is not compared: it is not installed"
    assert lines[1:] == [{"what": "first", "threads": 2, "seconds": 1.0, "spread": {}}]


def test_a_peer_that_takes_too_long_has_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow() -> decode.Speed:
        for _ in range(1000):
            time.sleep(0.01)
        raise AssertionError("it was not stopped")

    monkeypatch.setattr(decode, "PATIENCE", 0.05)
    measures = {"quick": lambda: decode.Speed([1.0], [2.0, 3.0]), "slow": slow}
    rates = iter([4.0, 6.0, 10.0, 10.0])
    speeds, absent = decode._in_rounds(measures, 2, lambda: next(rates))
    assert speeds == {"quick": decode.Speed([1.0] * 2, [2.0, 3.0] * 2, [5.0] * 2 + [10.0] * 2)}
    assert absent == {"slow": "LateError: the first call takes more than 0.05 s"}


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_a_command_of_its_own_and_names_a_page(name: str) -> None:
    benchmark = BENCHMARKS[name]
    words = [word for word in shlex.split(benchmark.command) if "=" not in word]
    assert words[:2] == ["sdk", "bench"]
    command = typer.main.get_command(bench).commands[words[2]]  # type: ignore[attr-defined]  # a group of commands, which has this
    command.make_parser(typer.Context(command)).parse_args(words[3:])
    assert not benchmark.page or (ROOT / "docs" / benchmark.page).is_file()


# ---- the report ----
def measured(seconds: float = 2.0, **more: object) -> Result:
    row = {"what": "a | b", "threads": 1, "seconds": seconds, "spread": {"seconds": [seconds - 0.1, seconds + 0.1]}}
    return replace(Result([row]), **more)  # type: ignore[arg-type]  # keywords have the fields' types


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> dict[str, Result]:
    """What each benchmark gives; `jit` and `imports` are all there are."""
    found = {"jit": measured(), "imports": Result([], failed="stopped after 9 s")}
    monkeypatch.setattr(report, "BENCHMARKS", {name: BENCHMARKS[name] for name in found})
    monkeypatch.setattr(report, "measure", lambda name, settings, left: found[name])
    return found


def test_a_report_has_a_row_for_what_failed(results: dict[str, Result], tmp_path: Path) -> None:
    made = report.run(tmp_path / FILE, SETTINGS)
    text = (tmp_path / PAGE).read_text(encoding="utf-8")
    assert "| a \\| b | 1 | 2 |" in text
    assert "not whole: stopped after 9 s" in text
    assert "provisional" not in text
    assert report.load(tmp_path / FILE) == made


def test_a_report_of_a_busy_machine_says_so(results: dict[str, Result], tmp_path: Path) -> None:
    results["jit"] = measured(others=0.2)
    report.run(tmp_path / FILE, SETTINGS)
    assert "provisional" in (tmp_path / PAGE).read_text(encoding="utf-8")


def test_resuming_measures_what_failed(results: dict[str, Result], tmp_path: Path) -> None:
    report.run(tmp_path / FILE, SETTINGS)
    results |= {"jit": measured(99.0), "imports": measured(7.0)}
    made = report.run(tmp_path / FILE, SETTINGS, resume=True)
    assert [result.rows[0]["seconds"] for result in made.results.values()] == [2.0, 7.0]


def test_resuming_measures_what_is_named_again(results: dict[str, Result], tmp_path: Path) -> None:
    results |= {"jit": measured(begun="2026-01-01T00:00:00+0000"), "imports": measured(7.0)}
    report.run(tmp_path / FILE, SETTINGS)
    results |= {"jit": measured(3.0, begun="2026-01-02T00:00:00+0000"), "imports": measured(99.0)}
    made = report.run(tmp_path / FILE, SETTINGS, names=["jit"], resume=True)
    assert {name: result.rows[0]["seconds"] for name, result in made.results.items()} == {"jit": 3.0, "imports": 7.0}
    assert "| 2026-01-02 00:00:00+0000 |" in (tmp_path / PAGE).read_text(encoding="utf-8")


def test_what_cannot_be_gone_on_with_is_an_error(results: dict[str, Result], tmp_path: Path) -> None:
    with pytest.raises(SdkError, match="cannot be read as a report"):
        report.run(tmp_path / FILE, SETTINGS, resume=True)
    with pytest.raises(SdkError, match="no benchmark 'jot'"):
        report.run(tmp_path / FILE, SETTINGS, names=["jot"])
    made = report.run(tmp_path / FILE, SETTINGS)
    report.save(replace(made, machine=MACHINE), tmp_path / FILE)
    with pytest.raises(SdkError, match="cannot be resumed: processor was "):
        report.run(tmp_path / FILE, SETTINGS, resume=True)


def test_when_the_time_for_all_is_over_nothing_begins() -> None:
    assert suite.measure("jit", SETTINGS, 0.0).failed == "not begun: the time for all was over"


# ---- two reports ----
def of(*figures: tuple[float, float, float], name: str = "seconds", machine: dict[str, str] = MACHINE) -> report.Report:
    """A report with a figure for each median and its spread."""
    rows = [
        {"what": f"case {number}", name: median, "spread": {name: [low, high]}}
        for number, (median, low, high) in enumerate(figures)
    ]
    return report.Report(machine, {}, "", {"jit": Result(rows)})


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((2.0, 1.9, 2.1), (2.0, 1.9, 2.1), compare.SAME),
        ((2.0, 1.9, 2.1), (1.0, 0.9, 1.1), compare.FASTER),
        ((2.0, 1.9, 2.1), (3.0, 2.9, 3.1), compare.SLOWER),
        ((2.0, 1.0, 3.1), (3.0, 2.9, 3.1), compare.SAME),  # the spreads overlap
        ((2.0, 1.99, 2.01), (2.05, 2.04, 2.06), compare.SAME),  # not worth a word
    ],
)
def test_a_difference_is_one_beyond_both_spreads(
    before: tuple[float, float, float], after: tuple[float, float, float], verdict: str
) -> None:
    (row,) = compare.run(of(before), of(after))
    assert row.verdict == verdict
    assert row.case == "case 0"
    assert row.lowest <= row.times <= row.highest
    opposite = {compare.FASTER: compare.SLOWER, compare.SLOWER: compare.FASTER, compare.SAME: compare.SAME}
    for name in ("decode_tokens_per_second", "gb_s", "write_gb_s"):
        (row,) = compare.run(of(before, name=name), of(after, name=name))
        assert row.verdict == opposite[verdict]
        assert row.lowest <= row.times <= row.highest


def test_only_reports_of_one_machine_are_compared() -> None:
    one, other = of((2, 1, 3)), of((2, 1, 3), machine={**MACHINE, "cores": "4"})
    with pytest.raises(SdkError, match="two machines") as caught:
        compare.run(one, other)
    assert caught.value.why == "cores: 2, then 4"
    assert compare.run(one, other, any_machine=True)
    with pytest.raises(SdkError, match="no figure in common"):
        compare.run(one, report.Report(MACHINE, {}, ""))


def test_rows_that_cannot_be_told_apart_are_an_error() -> None:
    one = of((2.0, 1.0, 3.0), (4.0, 3.0, 5.0))
    for row in one.results["jit"].rows:
        row["what"] = "one case"
    with pytest.raises(SdkError, match="two rows of one case") as caught:
        compare.run(one, one)
    assert caught.value.why == "benchmark jit: one case"


def test_the_status_says_whether_something_is_slower(sdk: Callable[..., str], tmp_path: Path) -> None:
    for name, seconds in (("a", 2.0), ("b", 3.0)):
        report.save(report.Report(MACHINE, {}, "", {"jit": measured(seconds)}), tmp_path / name / FILE)
    files = [str(tmp_path / name / FILE) for name in ("a", "b")]
    text = sdk("bench", "compare", *files, status=1)
    assert "slower" in text and "1 figures: 0 within noise" in text
    assert "faster" in sdk("bench", "compare", *reversed(files), status=0)
    assert "1 within noise" in sdk("bench", "compare", files[0], files[0], status=0)
    assert json.loads(sdk("bench", "compare", *files, "--json", status=1))[0]["verdict"] == "slower"


def test_a_report_is_a_file(sdk: Callable[..., str], tmp_path: Path) -> None:
    text = "".join(sdk("bench", "all", "--report", str(tmp_path), status=2).replace("│", "").split())  # of a box
    assert "isno.json" in text and "performance.json" in text
    assert not list(tmp_path.iterdir())


# ---- whole ----
@pytest.mark.deepspeed
@pytest.mark.slow
def test_one_benchmark_by_the_command(sdk: Callable[..., str], tmp_path: Path) -> None:
    sdk("bench", "all", "--report", str(tmp_path / FILE), "--only", "accuracy", status=0)
    (row, *_) = report.load(tmp_path / FILE).results["accuracy"].rows
    assert row["params_ulp"] > 0


@pytest.mark.compiler
@pytest.mark.slow
def test_many_processes_compile_once(tmp_path: Path) -> None:
    (tmp_path / "a_plugin-1.0-py3-none-any.whl").write_bytes(bytes(2**20))
    rows = list(scale.run(tmp_path, plugins=(1, 3), processes=(3,), cold=1, warm=2))
    found = {(row.what, row.count, row.file_system): row for row in rows}
    assert {key[1] for key in found if key[0] == scale.CHOICE} == {1, 3}
    for system in (scale.LOCAL, scale.SLOW):
        cold, warm = (found[what, 3, system] for what in (scale.COLD, scale.WARM))
        assert (cold.compilations, warm.compilations) == (1, 0)
        assert cold.seconds is not None and warm.seconds is not None and cold.seconds > warm.seconds
    assert found["wheel of a_plugin", 1, ""].mib == 1


@pytest.mark.parametrize("name", ["performance", *(f"performance-{of}" for of in ("zen5", "amx", "intel", "avx2"))])
def test_a_page_in_the_documentation_is_that_of_its_report(name: str, tmp_path: Path) -> None:
    file = ROOT / "docs" / f"{name}.json"
    again = f"python -m ds_plugin_sdk.bench.report docs/{file.name}"
    made = report.page(report.load(file), tmp_path / file.name)
    assert report.page_of(file).read_text(encoding="utf-8") == made, again
    drawn, kept = (folder / "img" / name for folder in (tmp_path, ROOT / "docs"))
    assert compare.run(report.load(file), report.load(file)), "rows that can be told apart"
    assert {picture.name for picture in drawn.iterdir()} == {picture.name for picture in kept.iterdir()}
