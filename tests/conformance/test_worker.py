"""Each case in a process that may die: what is reported of it, and that the others continue."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_plugin_sdk.conformance.outcome import Failure, Item, Outcome, explain
from ds_plugin_sdk.conformance.process import START_TIMEOUT, Worker
from ds_plugin_sdk.conformance.run import Runner
from ds_plugin_sdk.errors import ConformanceError

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Every case of the misfit's own checks, run in one go."""
    with Runner("misfit:Misfit") as runner:
        items = [item for item in runner.items() if item.check.startswith("runtime.misfit.")]
        return {item.id.removeprefix("runtime.misfit."): runner.run(item) for item in items}


def failure(outcome: Outcome) -> Failure:
    assert outcome.failure is not None
    return outcome.failure


@pytest.mark.parametrize(
    ("case", "verdict"),
    [
        ("passes", "passed"),
        ("differs", "failed"),
        ("raises", "failed"),
        ("rejects", "failed"),
        ("exits", "failed"),
        ("crashes/one", "crashed"),
        ("crashes/two/float32", "crashed"),
        ("leaves", "crashed"),
        ("hangs", "timed out"),
        ("hangs_in_native_code", "timed out"),
        ("skipped", "skipped"),
        ("cannot_say", "failed"),
        ("cannot_say_and_dies", "failed"),
        ("shares_a_process/1", "passed"),
        ("shares_a_process/2", "passed"),
        ("alone/1", "passed"),
        ("alone/2", "passed"),
        ("counts", "passed"),
    ],
)
def test_every_end_is_told_apart_and_costs_one_case(outcomes: dict[str, Outcome], case: str, verdict: str) -> None:
    assert outcomes[case].verdict == verdict, outcomes[case]


def test_no_other_case_ran(outcomes: dict[str, Outcome]) -> None:
    assert len(outcomes) == 18


def test_a_difference_is_told_with_values_and_place(outcomes: dict[str, Outcome]) -> None:
    told = failure(outcomes["differs"])
    assert (told.what, told.why, told.hint) == ("devices: 1", "expected 2", "count them again")
    assert told.where.startswith(f"{HERE / 'misfit.py'}:") and told.where.endswith(" in differs")
    assert told.traceback == ""
    assert told.output == "what the check printed"


def test_an_exception_is_told_with_its_traceback_from_the_check_on(outcomes: dict[str, Outcome]) -> None:
    told = failure(outcomes["raises"])
    assert told.what == "AttributeError: 'Misfit' object has no attribute 'no_such_member'"
    assert "target.accelerator.no_such_member()" in told.traceback
    assert "worker.py" not in told.traceback


def test_an_error_of_the_sdk_keeps_its_parts(outcomes: dict[str, Outcome]) -> None:
    told = failure(outcomes["rejects"])
    assert (told.what, told.why, told.hint) == ("InvalidTensorError: a tensor is wrong", "it is empty", "fill it")


def test_a_crash_is_told_with_signal_output_and_stack(outcomes: dict[str, Outcome]) -> None:
    told = failure(outcomes["crashes/one"])
    assert told.what == "the process ended by signal SIGSEGV"
    assert told.output.startswith("last words\nFatal Python error: Segmentation fault")
    assert "in crashes" in told.output
    assert "worker.py" not in told.output


def test_an_exit_is_told_with_its_status_though_a_child_lives_on(outcomes: dict[str, Outcome]) -> None:
    assert failure(outcomes["leaves"]).what == "the process ended with status 0"
    assert outcomes["leaves"].seconds < 50  # its child sleeps for 60


@pytest.mark.parametrize("case", ["hangs", "hangs_in_native_code"])
def test_a_hang_is_told_with_the_stack(outcomes: dict[str, Outcome], case: str) -> None:
    told = failure(outcomes[case])
    assert told.what == "no answer within 1.5 s"
    assert f"in {case}" in told.output


def test_a_skip_names_the_declaration(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["skipped"].reason == "the accelerator declares that it is a misfit"


def test_a_failure_in_full_says_all_that_is_needed(outcomes: dict[str, Outcome]) -> None:
    lines = explain(outcomes["differs"], "misfit:Misfit").splitlines()
    assert lines[0] == "failed: runtime.misfit.differs"
    assert [line.split(maxsplit=1)[0] for line in lines[1:]] == [
        "R99.2",
        "because",
        "found",
        "why",
        "to",
        "check",
        "output",
        "again",
    ]
    assert lines[-1].endswith("sdk conformance misfit:Misfit -k runtime.misfit.differs")


def test_a_timeout_may_be_given() -> None:
    item = Item("runtime.misfit.hangs", "runtime.misfit.hangs", "runtime", {}, "R99.8", "", "", timeout=1000)
    start = time.monotonic()
    with Runner("misfit:Misfit", timeout=0.5) as runner:
        outcome = runner.run(item)
    assert outcome.verdict == "timed out"
    assert time.monotonic() - start < 200  # a slow machine takes a minute to start a worker; the item has 1000 s


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nope", "there is no such plugin"),
        ("nope:Nope", "No module named 'nope'"),
        ("misfit:Nope", "has no attribute 'Nope'"),
        ("misfit:Broken", "the driver is too old"),
        ("misfit:Dying", "the process ended with status 7"),
        ("mutants:adam.nope", "there is no mutant 'adam.nope'"),
    ],
)
def test_a_target_that_cannot_be_had_is_an_error_and_no_failure(target: str, says: str) -> None:
    with Runner(target) as runner, pytest.raises(ConformanceError, match="the target cannot be used") as caught:
        runner.items()
    assert says in str(caught.value)


def test_a_worker_in_another_folder_finds_what_a_relative_path_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((".", "conformance")))
    worker = Worker("misfit:Misfit", folder=tmp_path)
    try:
        assert worker.ask({"do": "start"}, START_TIMEOUT) == {}
    finally:
        worker.close()


KILLED_AT_A_CASE = """
import sys
from ds_plugin_sdk.conformance.process import START_TIMEOUT, Worker
worker = Worker("misfit:Misfit")
worker.ask({"do": "start"}, START_TIMEOUT)
worker.send({"do": "run", "check": "runtime.misfit.hangs", "parameters": {}, "timeout": 1.5})
print(worker._process.pid, flush=True)
worker.receive(1000)
"""


def test_a_worker_ends_soon_after_its_parent_whatever_it_is_at() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED_AT_A_CASE], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
    end = time.monotonic() + 60
    while runs(worker):
        assert time.monotonic() < end, f"process {worker} is left"
        time.sleep(0.2)


def runs(process: int) -> bool:
    """Nobody may wait for what has lost its parent: as a zombie it has ended, too."""
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    return False
