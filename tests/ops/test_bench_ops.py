"""`sdk bench ops`: families run, rows add up, peers compute the same, charts are drawn."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_plugin_sdk.bench import (
    adam,
    calls,
    direct,
    evoformer,
    fp_quantizer,
    inference,
    lamb,
    ops,
    quantizer,
    sparse_attention,
    timing,
    transformer,
)
from ds_plugin_sdk.cli import main
from ds_plugin_sdk.conformance import op_info
from ds_plugin_sdk.conformance.op_info import Make, OpInfo, Sample
from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.ops.lamb import lamb_

pytestmark = pytest.mark.compiler


LAST_SAMPLE = direct.chosen
SOME = [op_info.find(name) for name in ("adam_", "rms_norm", "quantize")]


def small_sample(info: OpInfo, dtype: torch.dtype) -> Sample:
    """The first that has elements."""
    return next(sample for sample in info.samples(Make.seeded(dtype)) if sample.kind != "empty")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every family on tensors that take no time; memory copies 2 GB/s."""
    shapes = {setting: [(5,), (2, 3), (7,)] for setting in lamb.SETTINGS}
    monkeypatch.setattr(adam, "SHAPES", shapes)
    monkeypatch.setattr(lamb, "SHAPES", shapes)
    monkeypatch.setattr(transformer, "SIZES", {"small": (1, 8, 32, 2)})
    monkeypatch.setattr(quantizer, "SIZES", {"16 k": 16 << 10})
    monkeypatch.setattr(fp_quantizer, "SIZES", {"1 k": 1 << 10})
    monkeypatch.setattr(sparse_attention, "LENGTH", 512)
    patterns = {name: sparse_attention.PATTERNS[name] for name in ("bigbird", "local")}
    monkeypatch.setattr(sparse_attention, "PATTERNS", patterns)
    monkeypatch.setattr(inference, "SETTINGS", {"decode": (1, 1, 8)})
    monkeypatch.setattr(evoformer, "SETTINGS", {"small": (2, 8, 2, 8)})
    monkeypatch.setattr(direct, "op_info", SimpleNamespace(infos=lambda: SOME))
    monkeypatch.setattr(direct, "chosen", small_sample)
    monkeypatch.setattr(ops, "copy_rates", lambda: [2.0])
    monkeypatch.setattr(timing, "_TURN", 0.0)
    threads = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("family", ops.FAMILIES)
def test_every_family_has_rows(family: str) -> None:
    rows = ops.run(family, threads=(1, 2), seconds=0)
    assert {(row.dtype, row.threads) for row in rows} == {(d, t) for d in ops.DTYPES for t in (1, 2)}
    assert all(row.times and all(value > 0 for value in row.times.values()) for row in rows)
    assert len({(row.what, row.setting, row.dtype, row.threads) for row in rows}) == len(rows)


@pytest.mark.parametrize(("family", "bytes_moved"), [("adam", 18 * 28), ("lamb", 18 * 40)])
def test_rates_are_those_of_the_bytes_that_must_move(family: str, bytes_moved: int) -> None:
    for row in ops.run(family, dtypes=["float32"], seconds=0):
        assert row.microseconds is not None
        assert row.times_copy == pytest.approx(bytes_moved / row.microseconds * 1e-3 / 2)


def _case(ours: Callable[[], object], **peers: Callable[[], object]) -> Any:
    return lambda dtype, compile: iter([timing.Case(name, "all", ours, peers) for name in ("a", "b")])


def test_means_are_geometric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "cases", _case(lambda: None, eager=lambda: None))
    first, second, mean = ops.run("inference", dtypes=["float32"], seconds=0)
    assert mean.what == ops.MEAN and mean.microseconds is None
    assert mean.times["eager"] == pytest.approx(math.sqrt(first.times["eager"] * second.times["eager"]))


def test_a_peer_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(lamb, "cases", _case(lambda: None, eager=lambda: None, broken=broken))
    with pytest.warns(RuntimeWarning, match="broken is not compared: no compiler"):
        rows = ops.run("lamb", dtypes=["float32"], seconds=0)
    assert [list(row.times) for row in rows] == [["eager"]] * 2


def test_what_is_not_known_is_rejected() -> None:
    with pytest.raises(SdkError, match="no family 'lab'"):
        ops.run("lab")
    with pytest.raises(SdkError, match="no dtype 'float8'"):
        ops.run("lamb", dtypes=["float8"])


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's, at the import of its compiler
def test_torch_compile_is_a_peer_where_it_is_asked_for() -> None:
    case = next(case for case in lamb.cases(torch.float32, True) if case.setting in lamb.COMPILED)
    assert list(case.peers) == ["torch foreach", "adam_", "torch.compile"]


@pytest.mark.parametrize("name", sorted(direct._TORCH))
def test_the_torch_functions_of_direct_calls_compute_the_same(name: str) -> None:
    info = op_info.find(name)
    ours, theirs = (dict(LAST_SAMPLE(info, torch.float32).arguments) for _ in range(2))
    found, expected = info.function(**ours), direct._TORCH[name](**theirs)
    if isinstance(expected, torch.Tensor | tuple):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for written in info.written:
        torch.testing.assert_close(ours[written], theirs[written], rtol=1e-4, atol=1e-5)


def test_the_torch_functions_of_small_calls_compute_the_same() -> None:
    compared = [case for case in calls.cases(torch.float32, False) if case.what not in calls.OPTIMIZERS]
    assert len(compared) == 9
    for case in compared:
        torch.testing.assert_close(case.ours(), case.peers["torch"](), rtol=1e-4, atol=1e-5)


def test_lamb_s_peer_computes_the_same() -> None:
    torch.manual_seed(0)
    ours = [[torch.randn(shape) for shape in ((5, 3), (700,))] for _ in range(4)]
    ours[3] = [tensor.square() for tensor in ours[3]]
    theirs = [[tensor.clone() for tensor in tensors] for tensors in ours]
    options = {"lr": lamb.LR, "betas": lamb.BETAS, "eps": lamb.EPS, "weight_decay": lamb.DECAY}
    ratios = lamb_(*ours, lamb.STEP, **options)  # type: ignore[arg-type]  # a dict of options of several types
    torch.testing.assert_close(lamb.foreach_lamb(*theirs), ratios)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right)


def _sdk(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sdk", "bench", "ops", *arguments])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


OPTIONS = ("--family", "lamb", "--family", "quantizer", "--dtype", "bfloat16", "--seconds", "0")


def test_the_command_prints_tables_and_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert _sdk(monkeypatch, *OPTIONS, "--chart", str(tmp_path)) == 0
    text = capsys.readouterr().out
    assert "times torch foreach" in text and "16 k, 4 bits" in text and "peak" not in text
    for family in ("lamb", "quantizer"):
        assert (tmp_path / f"{family}.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _sdk(monkeypatch, *OPTIONS, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["lamb", "quantizer"]
    assert found["lamb"][0]["times"]["adam_"] > 0


def test_without_matplotlib_nothing_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert _sdk(monkeypatch, *OPTIONS, "--chart", str(tmp_path)) != 0
    streams = capsys.readouterr()
    assert "pip install 'ds-plugin-sdk[chart]'" in streams.err and not streams.out
