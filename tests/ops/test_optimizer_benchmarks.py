"""The yardsticks themselves."""

from __future__ import annotations

import pytest
import torch

from ds_plugin_sdk.bench import accuracy, adam


def test_errors_are_counted_in_units_of_the_last_place() -> None:
    one = torch.tensor([1.0], dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        eps = torch.finfo(dtype).eps
        assert accuracy.ulps(torch.tensor([1 + 3 * eps], dtype=dtype), one, one) == 3
        assert accuracy.ulps(torch.tensor([1.0], dtype=dtype), one + eps / 4, one) == 0.25
        # Beside 4 a unit is four times as large, even where the result is small.
        assert accuracy.ulps(torch.tensor([1 + 2 * eps], dtype=dtype), one, 4 * one) == 0.5


def test_a_wrong_kernel_shows_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    op = accuracy.OPTIMIZER_OPS[2]

    def wrong(params: list[torch.Tensor], *others: object, **options: float) -> None:
        op.kernel(params, *others, **{**options, "lr": options["lr"] * (1 + 1e-4)})

    broken = type(op)(**{**vars(op), "kernel": wrong})
    assert accuracy.measure(broken, accuracy.DTYPES[0], "kernel").params_ulp > 2


def test_adam_s_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adam, "CASES", {"three": [(5,), (2, 3), (7,)]})
    monkeypatch.setattr(adam, "_copy_rate", lambda: 2.0)
    rows = adam.run(seconds=0, deepspeed=False)
    names = ["ds_plugin::adam_", "FusedAdam", "torch fused", "torch foreach"]
    assert [row.implementation for row in rows] == names
    for row in rows:
        assert row.milliseconds > 0
        assert row.gigabytes_per_second == pytest.approx(18 * 28 / row.milliseconds * 1e-6)
        assert row.times_copy == row.gigabytes_per_second / 2
    assert rows[2].times_torch_fused == 1
