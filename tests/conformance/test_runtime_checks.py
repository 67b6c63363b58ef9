"""The checks of the runtime leave no member of the contract out; a failing program is reported by whom it failed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_plugin_cpu.accelerator import CPU_Accelerator
from ds_plugin_sdk.conformance import programs
from ds_plugin_sdk.conformance.check import NonconformanceError
from ds_plugin_sdk.conformance.in_turn import InTurn
from ds_plugin_sdk.conformance.programs import small_model
from ds_plugin_sdk.conformance.runtime import memory, processes, support
from ds_plugin_sdk.conformance.target import Target

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ROOT / "sdk" / "ds_plugin_sdk" / "conformance" / "runtime"


@pytest.fixture
def target() -> Target:
    return Target("cpu", CPU_Accelerator())


def test_every_member_that_deepspeed_ever_asked_for_is_checked() -> None:
    recorded = ROOT / "tests" / "integrations" / "deepspeed" / "abstract_members.json"
    releases: dict[str, list[str]] = json.loads(recorded.read_text())
    members = {member for names in releases.values() for member in names}
    assert len(members) >= 65
    text = "\n".join(file.read_text(encoding="utf-8") for file in RUNTIME.glob("*.py"))
    # DeepSpeed asked for amp() until 0.18.6 and never called it.
    assert [member for member in sorted(members) if not re.search(rf"\b{member}\b", text)] == ["amp"]


def outcome(code: int | None, *results: Any, output: str = "") -> programs.Outcome:
    return code, list(results), output


@pytest.mark.parametrize(
    ("outcomes", "says"),
    [
        ([outcome(0), outcome(0)], None),
        ([outcome(-6), outcome(1, {"failure": "wrong values"})], "wrong values"),
        ([outcome(None, output="stack"), outcome(1)], "rank 1 of 2 ended with status 1"),
        ([outcome(None, output="stack")], "the process did not end within 5 s"),
    ],
)
def test_the_rank_that_failed_by_itself_is_named(outcomes: list[programs.Outcome], says: str | None) -> None:
    failure = programs.failure_of(outcomes, 5.0)
    assert (None if failure is None else failure.what) == says


def test_a_program_that_cannot_find_its_target_says_so() -> None:
    class Unknown:
        name = "nobody"

    with pytest.raises(NonconformanceError, match="UnknownAcceleratorError: there is no such plugin"):
        programs.run("process", Unknown(), "rank", timeout=60.0)  # type: ignore[arg-type]  # wrong on purpose: no target


def test_tasks_after_a_failure_are_run_together_once_more(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[list[str]] = []

    def run_to_the_end(program: str, target: Target, tasks: str, **_: Any) -> list[programs.Outcome]:
        names = [name for name, _ in json.loads(tasks)]
        runs.append(names)
        done = names[: names.index("bad")] if "bad" in names else names
        results: Iterable[Any] = [{"done": name} for name in done]
        return [outcome(1, *results, {"failure": "it is bad"}) if "bad" in names else outcome(0, *results)]

    monkeypatch.setattr(programs, "run_to_the_end", run_to_the_end)
    names = ("a", "bad", "b", "c")
    turn = InTurn("x", lambda target: [(name, {}) for name in names], ranks=lambda target: 1, timeout=1.0)
    assert turn.result(target, "c") == ["c"]
    assert turn.result(target, "a") == ["a"]
    with pytest.raises(NonconformanceError, match="it is bad"):
        turn.result(target, "bad")
    assert runs == [["a", "bad", "b", "c"], ["b", "c"]]


def test_a_device_may_take_more_from_the_driver_and_set_further_variables() -> None:
    """Clauses R5.3, R5.4 and R11.2 say what rises and what is set, not that nothing else is."""

    class Generous(CPU_Accelerator):
        def memory_reserved(self, device_index: int | None = None) -> int:
            return 3 * super().memory_reserved(device_index)

        def max_memory_reserved(self, device_index: int | None = None) -> int:
            return 3 * super().max_memory_reserved(device_index)

        def set_visible_devices_envs(self, current_env: Any, local_accelerator_ids: Any) -> None:
            super().set_visible_devices_envs(current_env, local_accelerator_ids)
            current_env["CPU_DEVICE_ORDER"] = "by node"

    generous = Target("cpu", Generous())
    memory.reserved(generous)
    memory.peak(generous, "reserved")
    processes.visible_devices(generous)


def test_the_random_state_is_put_back(target: Target) -> None:
    before = torch.get_rng_state()
    with support.random_state_kept(target):
        torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_slow_work_is_slow(target: Target) -> None:
    import time

    with support.slow_work(target) as keep_busy:
        begin = time.perf_counter()
        keep_busy()
        assert time.perf_counter() - begin > support.SLOW_SECONDS / 10


def test_an_error_of_another_type_is_a_failure() -> None:
    with pytest.raises(NonconformanceError, match="raised KeyError"):
        support.expect_raises(lambda: {}["x"], ValueError, "the call")
    with pytest.raises(NonconformanceError, match="was accepted and gave 1"):
        support.expect_raises(lambda: 1, ValueError, "the call")
    support.expect_raises(lambda: int("x"), ValueError, "the call")


def test_plain_losses_fall_and_depend_on_what_is_asked() -> None:
    losses, others = small_model.plain_losses(2)
    assert others != losses
    assert losses[-1] < 0.5 * losses[0]
    assert losses != small_model.plain_losses(1)[0]
    assert losses != small_model.plain_losses(2, accumulation=3)[0]
    assert losses != small_model.plain_losses(2, clip=True)[0]
