"""The benchmark of the CUDA ops, as far as it goes without a GPU: every case is called, on tensors without data."""

from __future__ import annotations

import importlib.machinery
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from gpu_check import cases, cuda_cases, cuda_ops, deepspeed_cuda_ops, optimizer_cases


@pytest.fixture
def no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device for the GPU, with an L2 cache of 50 MB, and nothing compiled."""
    monkeypatch.setattr(cases, "DEVICE", "meta")
    monkeypatch.setattr(torch, "compile", lambda function: function)
    properties = types.SimpleNamespace(L2_cache_size=50 << 20)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.mark.parametrize("group", [name for name in cuda_cases.groups_of_cases(None) if name != "optimizers"])
def test_every_case_can_be_called(no_data: None, group: str) -> None:
    count = 0
    for case in cuda_cases.groups_of_cases(None)[group]():
        assert len({len(calls) for calls in case.calls.values()}) == 1, "all rotate among as many arguments"
        assert next(iter(case.calls)).startswith("ds_plugin"), "ours comes first"
        for calls in case.calls.values():
            calls[0]()
        count += 1
    assert count


@pytest.mark.compiler
@pytest.mark.usefixtures("compiled_once")
def test_every_optimizer_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    monkeypatch.setattr(optimizer_cases, "MODELS", {"small": (lambda: [(3, 4), (5,)], torch.float32)})
    names = []
    for case in optimizer_cases.optimizer_cases(None):
        names.append(case.name)
        for (call,) in case.calls.values():
            call()
    assert names == ["Adam small", "LAMB small"]


def test_an_implementation_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(cuda_ops, "take_turns", lambda runs, turns: dict.fromkeys(runs, 2.0))
    case = cases.Case("c", 8_000_000, {"ours": [lambda: None], "theirs": [fails]}, in_graph=False)
    errors: dict[str, str] = {}
    (row,) = cuda_ops.rows_of(case, copy_rate=8.0, turns=1, errors=errors)
    assert (row.implementation, row.gigabytes_per_second, row.times_copy) == ("ours", 4.0, 0.5)
    assert errors == {"c, theirs": "ValueError: no such kernel"}


def test_it_is_noted_where_ours_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = ["default"]

    def waits() -> None:
        if modes[-1] == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(cuda_ops, "take_turns", lambda runs, turns: dict.fromkeys(runs, 2.0))
    case = cases.Case("c", 0, {"ours": [waits], "theirs": [waits]}, in_graph=False)
    errors: dict[str, str] = {}
    assert len(list(cuda_ops.rows_of(case, copy_rate=8.0, turns=1, errors=errors))) == 2
    assert errors == {"c, ours waits for the device": "RuntimeError: called a synchronizing CUDA operation"}
    assert modes[-1] == "default"


def test_what_ours_is_compared_with_stays_if_ours_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(cuda_ops, "take_turns", lambda runs, turns: dict.fromkeys(runs, 2.0))
    case = cases.Case("c", 0, {"ours": [fails], "theirs": [lambda: None]}, in_graph=False)
    (row,) = cuda_ops.rows_of(case, copy_rate=8.0, turns=1, errors={})
    assert (row.implementation, row.speed_of_ours, row.times_copy) == ("theirs", None, None)


def test_ops_that_have_no_kernels_are_named() -> None:
    """Otherwise figures of torch's ops would pass for those of kernels."""
    assert set(cuda_ops.without_kernels()) == set(cuda_ops.OPS)


def test_another_process_goes_on_where_a_gpu_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one(name: str) -> Callable[[], Iterator[cases.Case]]:
        return lambda: iter([cases.Case(name, 0, {"ours": [lambda: None]}, in_graph=False)])

    monkeypatch.setattr(cuda_ops, "groups_of_cases", lambda own: {"first": one("a"), "second": one("b")})
    monkeypatch.setattr(cuda_ops, "take_turns", lambda runs, turns: dict.fromkeys(runs, 2.0))
    monkeypatch.setattr(cuda_ops, "without_kernels", dict)
    monkeypatch.setattr(cuda_ops, "measured_copy_rate", lambda: 4000.0)
    monkeypatch.setattr(cuda_ops, "launches", dict)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    monkeypatch.setattr(torch, "randn", lambda *shape, **more: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: 1 / 0)
    path = tmp_path / "ops.json"
    assert cuda_ops.run(time.monotonic() + 60, 1, None, cuda_ops.Facts.of(path)) is False
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert cuda_ops.run(time.monotonic() + 60, 1, None, cuda_ops.Facts.of(path)) is True
    facts = cuda_ops.Facts.of(path)
    assert [row["case"] for row in facts.rows] == ["a", "b"] and facts.complete
    assert list(facts.errors) == ["the GPU after first"]


def test_ops_that_were_not_built_are_none(tmp_path: Path) -> None:
    assert deepspeed_cuda_ops.load("fused_adam", tmp_path) is None


def test_why_an_op_does_not_build_is_said_in_a_line() -> None:
    output = "nvcc -c a.cu\na.cu(3): error: no operator\n  detail\nsubprocess.CalledProcessError: non-zero exit status"
    assert deepspeed_cuda_ops.first_error(output) == "a.cu(3): error: no operator"
    assert deepspeed_cuda_ops.first_error("ld: cannot find -lcurand\ncollect2: error") == "ld: cannot find -lcurand"
    assert deepspeed_cuda_ops.first_error("Traceback\n\n  killed\n") == "killed"
    assert deepspeed_cuda_ops.first_error("") == "no output"


def test_pips_cuda_libraries_are_found_by_a_linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    library = site / "nvidia" / "cu13" / "lib" / "libcurand.so.10"
    for path in (library, site / "torch" / "__init__.py"):
        path.parent.mkdir(parents=True)
        path.touch()
    spec = importlib.machinery.ModuleSpec("torch", None, origin=str(site / "torch" / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    for _ in range(2):
        given = {"LIBRARY_PATH": "/mine", "CUDA_HOME": "/toolkit"}
        found = deepspeed_cuda_ops.with_pips_cuda(given, tmp_path / "links")
    assert found["LIBRARY_PATH"] == f"/mine:{tmp_path / 'links'}"
    assert found["CPLUS_INCLUDE_PATH"] == f"/toolkit/include:{site / 'nvidia' / 'cu13' / 'include'}"
    assert (tmp_path / "links" / "libcurand.so").resolve() == library
