"""Random calls: they agree, what disagrees is found and made smaller, and a case can be run again."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_plugin_cpu.accelerator import CPU_Accelerator
from ds_plugin_sdk import op_builder
from ds_plugin_sdk.conformance import fuzz, op_info
from ds_plugin_sdk.conformance.campaign import Fuzzer
from ds_plugin_sdk.conformance.fuzz import Found, Fuzzed
from ds_plugin_sdk.conformance.process import WorkerError
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.errors import ConformanceError

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("compiled_once"), pytest.mark.timeout(900)]


def test_every_op_agrees_on_some_random_calls() -> None:
    failures: list[str] = []
    with Fuzzer("cpu") as fuzzer:
        tally = fuzzer.campaign(0, seed=1, tell=lambda case, found: failures.append(f"{case.id}: {found.failure}"))
    assert failures == []
    dtypes = set(CPU_Accelerator().supported_dtypes())
    assert set(tally.calls) == {op.name for op in op_info.infos() if dtypes.intersection(op.dtypes)}


def test_a_case_is_all_in_its_id() -> None:
    case = Fuzzed("rms_norm", "bfloat16", 7, 40, (0, 2))
    assert Fuzzed.of(case.id) == case
    first, second = (case.arguments()["input"] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(ConformanceError, match="is no case"):
        Fuzzed.of("rms_norm:float32")


def _rms_norm(defect: str) -> Any:
    """The op, with a defect of kernels' kind."""
    info = op_info.find("rms_norm")

    def function(input: Tensor, weight: Tensor, eps: float) -> Tensor:
        result: Tensor = info.function(input, weight, eps)
        if defect == "tail" and input.shape[-1] % 8 == 3:
            result[..., -1:] = 0.5
        if defect == "layout" and input.storage_offset() % 4:
            result += 1
        if defect == "beyond" and input.storage_offset():
            torch.as_strided(input, (1,), (1,), 0).zero_()
        return result

    return dataclasses.replace(info, function=function)


@pytest.mark.parametrize(
    ("defect", "said"), [("tail", "times the allowed error"), ("layout", "times"), ("beyond", "wrote beyond input")]
)
def test_a_defect_is_found(defect: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference has the same function and its defect, and the formula has not."""
    broken = _rms_norm(defect)
    monkeypatch.setattr(op_info, "find", lambda name: broken)
    target = Target.find("cpu")
    fuzz.start(target)
    failures = [fuzz.run(target, Fuzzed("rms_norm", "float32", seed, 200)).failure for seed in range(60)]
    assert any(said in failure for failure in failures), failures


def _spoilt(op: str, spoil: Callable[[Tensor], None]) -> Any:
    """An op whose kernel is wrong; its reference, which `compare` calls next, is not."""
    info = op_info.find(op)
    calls = itertools.count()

    def function(**arguments: Any) -> Any:
        results = info.function(**arguments)
        if next(calls) % 2 == 0:
            changed = arguments[info.written[0]] if info.written else results
            spoil(changed[0] if isinstance(changed, list | tuple) else changed)
        return results

    return dataclasses.replace(info, function=function)


def _lose_last(levels: Tensor) -> None:
    levels.view(-1)[-1:] = 0


def _turn_huge(result: Tensor) -> None:
    result[result > 1e15] *= -1


def _shift_small(result: Tensor) -> None:
    result[result.abs() < 4] += 1e-2


@pytest.mark.parametrize(
    ("op", "kind", "spoil"),
    [
        ("quantize", "layout", _lose_last),
        ("fake_quantize_", "layout", _lose_last),
        ("lion_", "layout", _lose_last),
        ("bias_activation", "extreme", _turn_huge),
        ("bias_activation", "extreme", _shift_small),
        ("softmax", "special", lambda result: result.nan_to_num_(0.0)),
    ],
)
def test_a_defect_is_found_where_rounding_decides(op: str, kind: str, spoil: Callable[[Tensor], None]) -> None:
    """Of levels, whose last bit may be either; beside huge values; and of NaN."""
    target = Target.find("cpu")
    fuzz.start(target)
    found = []
    for seed in range(4):
        arguments = Fuzzed(op, "float32", seed, 40).arguments()
        first = next(name for name, value in arguments.items() if isinstance(value, Tensor | list))
        given = arguments[first]
        value = {"layout": 1.0, "extreme": 1e16, "special": torch.nan}[kind]
        if isinstance(given, Tensor) and given.numel():
            given.view(-1)[0] *= value
        found.append(fuzz.compare(target, _spoilt(op, spoil), arguments, {}, {kind})[0])
        assert fuzz.compare(target, op_info.find(op), arguments, {}, {kind}) == ("", False)
    assert any("times the allowed error" in failure for failure in found), found


def test_a_failure_is_made_smaller_and_a_crash_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        """Crashes at sizes of 9 and more, whatever the edits."""

        def __init__(self, target: str) -> None:
            self.closed = False

        def ask(self, request: dict[str, Any], timeout: float) -> Any:
            if request["do"] == "start fuzz":
                return ["float32"]
            if Fuzzed.of(request["case"]).largest >= 9:
                raise WorkerError("the process ended by signal SIGSEGV", "the stack", hung=False)
            return dataclasses.asdict(Found("", "rms_norm()", 2, False))

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr("ds_plugin_sdk.conformance.campaign.Worker", Broken)
    told: list[tuple[Fuzzed, Found]] = []
    with Fuzzer("cpu") as fuzzer:
        tally = fuzzer.campaign(0, ops=["rms_norm"], tell=lambda case, found: told.append((case, found)))
    assert tally.failures == told
    assert {case.largest for case, _ in told} == {9}
    assert "SIGSEGV" in told[0][1].failure


@pytest.mark.parametrize("rejects", [True, False])
def test_an_assertion_of_a_kernel_rejects_what_the_reference_rejects(
    rejects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asserting:
        """Its device ends the process at an index that is out of range."""

        def __init__(self, target: str) -> None:
            self.closed = False

        def ask(self, request: dict[str, Any], timeout: float) -> Any:
            assert not self.closed
            if request["do"] == "start fuzz":
                return ["float32"]
            if request["do"] == "fuzz reference":
                return rejects
            raise WorkerError("the process ended by signal SIGABRT", "Assertion `index < n' failed.", hung=False)

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr("ds_plugin_sdk.conformance.campaign.Worker", Asserting)
    with Fuzzer("cpu") as fuzzer:
        found = fuzzer.run(Fuzzed("token_gather", "float32", 1))
    assert found.rejected == rejects
    assert bool(found.failure) != rejects


def test_what_the_reference_rejects() -> None:
    cases = [Fuzzed("token_sort_", "float32", seed, 40) for seed in range(60)]
    rejected = [case for case in cases if fuzz.rejected_by_reference(case)]
    kinds = [{edit.kind for edit in case.edits(case.arguments())} for case in rejected]
    assert rejected
    assert all("wrong" in each for each in kinds)


def test_only_the_kernels_of_the_ops_asked_for_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(op_builder, "load_family", lambda family, device: loaded.append(family))
    target = Target.find("cpu")
    fuzz.start(target, ["adam_", "adam_rollback_"])
    assert loaded == ["adam"]
    fuzz.start(target)
    assert len(loaded) > 10


def test_no_such_op() -> None:
    with Fuzzer("cpu") as fuzzer:
        with pytest.raises(ConformanceError, match="there is no op 'nonsense'"):
            fuzzer.campaign(0, ops=["nonsense"], tell=lambda case, found: None)
        with pytest.raises(ConformanceError, match="there is no op of dtype 'nonsense'"):
            fuzzer.campaign(0, dtypes=["nonsense"], tell=lambda case, found: None)
        with pytest.raises(ConformanceError, match="no op is left"):
            fuzzer.campaign(0, ops=["adam_rollback_"], dtypes=["bfloat16"], tell=lambda case, found: None)


def test_a_tensor_without_elements_is_not_cut_into_billions_of_groups() -> None:
    info = op_info.find("quantize")
    arguments = {"x": torch.ones(1, 0), "groups": 4, "bits": 8, "symmetric": True}
    edits = [fuzz._wrong(info, arguments, random.Random(seed)) for seed in range(300)]
    groups = {edit.apply(arguments["groups"]) for edit in edits if edit.argument == "groups"}
    assert {-1, 0, 1} < groups
    assert max(groups) <= 1024


def test_what_kernel_and_reference_lose_to_an_exponential_is_no_failure() -> None:
    """e^(score - logsumexp) is beyond float32 and times a gradient of 0: NaN in both, 0 in float64."""
    target = Target.find("cpu")
    fuzz.start(target)
    case = Fuzzed.of("evoformer_attention_backward:float16:1300012:40:3,4")
    assert {edit.kind for edit in case.edits(case.arguments())} == {"extreme"}
    assert fuzz.run(target, case).failure == ""
