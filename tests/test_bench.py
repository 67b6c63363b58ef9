"""`sdk bench`: training, losses and all-reduce: what they compute from what was measured, and one small run."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ds_plugin_sdk.bench import accelerator, all_reduce, losses, step, training
from ds_plugin_sdk.bench.timing import in_turns


def test_measurements_take_turns() -> None:
    order: list[str] = []
    measures = {name: lambda name=name: order.append(name) or len(order) for name in ("a", "b")}
    assert in_turns(measures, 3) == {"a": [1, 3, 5], "b": [2, 4, 6]}
    assert order == ["a", "b"] * 3


def test_memory_is_measured_without_transformers() -> None:
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "from ds_plugin_sdk.bench.memory import ReadRate\n"
        "assert 1e8 < ReadRate(64 << 20)() < 1e13"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def _run(seconds: float, cpu_seconds: float, *values: float) -> dict[str, Any]:
    return {
        "threads": 1,
        "median_step_seconds": seconds,
        "median_step_cpu_seconds": cpu_seconds,
        "losses": list(values),
    }


def test_training_is_compared_by_neighbours_and_by_the_worst_step() -> None:
    in_tree, ours = [_run(3, 2, 8, 4), _run(6, 2, 8, 4)], [_run(1, 1, 8, 4), _run(3, 1, 8, 4.002)]
    runs = {kind: in_tree if kind.accelerator == training.IN_TREE else ours for kind in training.KINDS}
    wall, cpu = training.step_times(runs)[:2]
    assert (wall.in_tree, wall.ours, wall.times_faster, wall.lowest, wall.highest) == (4.5, 2, 2.5, 2, 3)
    assert cpu.times_faster == 2
    found = {row.compared: row for row in training.differences(runs, _run(1, 1, 8, 5))}
    between = found["ds-plugin-cpu and in-tree, as installed"]
    assert between.nats == pytest.approx(0.002) and between.relative == pytest.approx(0.0005) and between.agrees
    assert found["in-tree with other threads"].nats == 0
    assert not found["in-tree and torch.optim.AdamW"].agrees


def test_losses_agree_within_their_tolerance() -> None:
    assert losses.Row("float32", 1, "resumed", 0.0, 0.0).agrees
    assert not losses.Row("float32", 1, losses.TORCHRUN, 2e-5, 1e-5).agrees


@pytest.mark.deepspeed
@pytest.mark.slow
def test_all_reduce_measures_every_call() -> None:
    rows = all_reduce.run()
    calls = {row.call for row in rows}
    assert calls >= {all_reduce.OURS, "deepspeed.comm.all_reduce", "torch.distributed.all_reduce"}
    assert len(rows) == len(calls) * len(all_reduce.SIZES) * len(all_reduce.DTYPES)
    assert all(row.microseconds > 0 for row in rows)


# As the demo's script, but that it tells another accelerator than the one it ran on.
ELSEWHERE = """
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
out.mkdir(parents=True, exist_ok=True)
(out / "metrics.json").write_text(json.dumps({"accelerator": "somewhere.else"}))
"""


# What the program of a rank asks of mpi4py, for one rank; `mpirun -n 1 COMMAND`.
_MPI = """
class COMM_WORLD:
    Barrier = staticmethod(lambda: None)
    Allreduce = staticmethod(lambda send, data: data[0])
    Get_rank = staticmethod(lambda: 0)
IN_PLACE = 1
Get_library_version = lambda: "An MPI:\\t5.0, built here\\nfor nobody\\0"
"""


def test_all_reduce_is_measured_for_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [all_reduce.OVER_AND_OVER, all_reduce.OURS, "torch.distributed.all_reduce", "Allreduce of An MPI"]
    rows = [all_reduce.Row(call, 1024, dtype, 1.0) for call in calls for dtype in all_reduce.DTYPES]
    monkeypatch.setattr(all_reduce, "run", lambda ranks, mpis: rows)
    found = [(row.ranks, row.call) for row in all_reduce.by_ranks((2, 4))]
    assert found == [(ranks, call) for ranks in (2, 4) for call in calls if call != all_reduce.OURS]


def test_all_reduce_is_compared_with_the_mpis_that_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "mpirun"
    package = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path)})) / "mpi4py"
    for folder in (program.parent, package):
        folder.mkdir(parents=True)
    program.write_text('#!/bin/sh\nshift 2\nexec "$@"\n')
    program.chmod(0o755)
    (package / "__init__.py").touch()
    (package / "MPI.py").write_text(_MPI)
    ours = [all_reduce.Row(all_reduce.OVER_AND_OVER, size, "float32", 1e-6) for size in all_reduce.SIZES]
    monkeypatch.setattr(all_reduce, "_of_torch", lambda *given: ours)
    rows = all_reduce.run(1, mpis=[tmp_path])
    assert rows[: len(ours)] == ours
    assert [(row.call, row.elements) for row in rows[len(ours) :]] == [
        ("Allreduce of An MPI: 5.0", size) for size in all_reduce.SIZES
    ]
    assert all(row.times == pytest.approx(row.microseconds / 1e-6) for row in rows[len(ours) :])


@pytest.mark.deepspeed
@pytest.mark.slow
def test_training_on_another_accelerator_is_an_error(tmp_path: Path) -> None:
    """A comparison of a thing with itself would look like perfect agreement."""
    (tmp_path / "train.py").write_text(ELSEWHERE, encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"wanted in-tree, but the run was on somewhere\.else"):
        training.run(tmp_path, tmp_path / "out", steps=3, repeats=1)


@pytest.mark.parametrize(
    "arguments", [("decode", "--shape", "opt"), ("step", "--shape", "1b"), ("step", "--dtype", "half")]
)
def test_a_value_that_is_not_known_is_measured_as_no_other(sdk: Callable[..., str], arguments: tuple[str, ...]) -> None:
    assert f"'{arguments[-1]}' is not known; expected" in " ".join(sdk("bench", *arguments, status=2).split())


class Scripted:
    """Stands for the ranks of a side: seconds of each call, None for one that fails."""

    def __init__(self, seconds: float | None) -> None:
        self.found = seconds

    def seconds(self, call: str, number: int, timeout: float = 0.0) -> float | None:
        return self.found


def _measured(before: Any, after: Any) -> list[accelerator.Row]:
    return list(accelerator._measured("call", before, after, turns=3))


@pytest.mark.parametrize(
    ("before", "after", "slower"),
    [
        (1e-6, 1.04e-6, False),
        (1e-6, 1.2e-6, True),
        (1e-7, 1.4e-7, False),  # the place of code in memory decides over so little
        (1e-7, 1.6e-7, True),
        (1e-6, None, True),
    ],
)
def test_a_call_that_takes_longer_or_fails_with_the_plugin_is_slower(
    before: float, after: float | None, slower: bool
) -> None:
    (row,) = _measured(Scripted(before), Scripted(after))
    assert row.slower is slower
    assert (row.after_us is None) is (after is None)


def test_a_call_that_does_more_may_take_longer() -> None:
    (row,) = accelerator._measured("empty_cache()", Scripted(1e-7), Scripted(3e-6), turns=3)
    assert not row.slower
    assert row.does_more == "gives memory back to the system"


def test_new_processes_measure_what_was_slower() -> None:
    """Chance is not slower; what is slower each time, or fails, is."""
    asked: list[list[str]] = []
    calls = {"never": "---", "once": "+--", "twice": "++-", "always": "+++"}

    def measure(wanted: Callable[[str], bool]) -> Iterator[accelerator.Row]:
        asked.append([call for call in calls if wanted(call)])
        times = len(asked)
        for call in asked[-1]:
            yield accelerator.Row(call, 1.0, times, times, calls[call][times - 1] == "+")

    rows = accelerator.settled(measure)
    assert [row.call for row in rows] == list(calls)
    assert [row.call for row in rows if row.slower] == ["always"]
    assert [row.after_us for row in rows] == [1, 2, 3, 3]
    assert asked == [list(calls), ["once", "twice", "always"], ["twice", "always"]]


def test_a_call_that_fails_without_the_plugin_is_left_out() -> None:
    assert not _measured(Scripted(None), Scripted(1.0))


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.timeout(900)  # DeepSpeed compiles an op of its own
def test_both_sides_answer_for_members_and_collectives_on_their_ranks() -> None:
    with (
        accelerator.Side({"DS_PLUGIN_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu"}, 2) as theirs,
        accelerator.Side({"DS_ACCELERATOR": "cpu"}, 2) as ours,
    ):
        assert theirs.start()[0] == "deepspeed.accelerator.cpu_accelerator.CPU_Accelerator"
        assert ours.start()[0] == "ds_plugin_cpu.accelerator.CPU_Accelerator"
        for call in ("device_name()", "all_reduce, 1024 elements"):
            # As `run` has it: the first collective may compile DeepSpeed's own op.
            assert theirs.seconds(call, 2, accelerator._START)
            assert ours.seconds(call, 2, accelerator._START)


@pytest.mark.compiler
def test_a_training_step_is_measured_beside_the_models_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step.SHAPES, "15m", step._Sizes(16, 1, 2, 32))
    told: list[str] = []
    eager, ours, without = step.run(vocabularies=(3000,), tokens=512, turns=2, compile=False, tell=told.append)
    assert (eager.what, eager.times, eager.share) == (step.EAGER, 1, 1)
    assert ours.what == step.OURS["llama"] and ours.lowest <= ours.times <= ours.highest
    assert len(told) == 2 * (step._SETTLING + 2)
    assert without.what == step.WITHOUT and without.seconds > 0 and without.peak_mib is None
    logits = 512 * 3000 * 4 / 2**20
    assert eager.peak_share == 1 and eager.peak_mib > 2 * logits > ours.peak_mib > 0
    assert eager.loss_mib > 2 * logits > ours.loss_mib


@pytest.mark.compiler
@pytest.mark.deepspeed
@pytest.mark.parametrize("family", step.VOCABULARIES)
def test_losses_by_ours_are_those_of_each_models_own_code(family: step.Family) -> None:
    compared = step.agreement(3, family=family, vocabulary=100, tokens=32)
    assert compared.first > compared.last
    assert compared.largest < 1e-5
