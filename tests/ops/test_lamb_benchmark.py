"""LAMB's yardstick: the peers compute the same, and the rows add up."""

from __future__ import annotations

import pytest
import torch

from ds_plugin_sdk.bench import lamb
from ds_plugin_sdk.ops.lamb import lamb_


def test_the_peer_computes_the_same() -> None:
    torch.manual_seed(0)
    ours = [[torch.randn(shape) for shape in ((5, 3), (700,))] for _ in range(4)]
    ours[3] = [tensor.square() for tensor in ours[3]]
    theirs = [[tensor.clone() for tensor in tensors] for tensors in ours]
    options = {"lr": lamb.LR, "betas": lamb.BETAS, "eps": lamb.EPS, "weight_decay": lamb.DECAY}
    ratios = lamb_(*ours, lamb.STEP, **options)  # type: ignore[arg-type]  # a dict of options of several types
    torch.testing.assert_close(lamb.foreach_lamb(*theirs), ratios)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right)


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lamb, "CASES", {"GPT-2 small": [(5,), (2, 3), (7,)]})
    monkeypatch.setattr(lamb, "copy_rate", lambda: 2.0)
    rows = lamb.run(seconds=0, compiled=False, threads=(1,))
    assert [row.implementation for row in rows] == [lamb.OURS, lamb.ADAM, lamb.PEER] * 2
    assert [row.dtype for row in rows] == ["float32"] * 3 + ["bfloat16"] * 3
    for row, size in zip(rows, [4] * 3 + [2] * 3, strict=True):
        assert row.times_copy == pytest.approx(18 * 10 * size / row.milliseconds * 1e-6 / 2)
    assert rows[1].adam_steps == rows[2].times_foreach == 1
