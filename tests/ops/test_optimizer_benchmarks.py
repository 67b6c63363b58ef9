"""The measure of errors itself."""

from __future__ import annotations

import pytest
import torch

from ds_plugin_sdk.bench import accuracy


def test_errors_are_counted_in_units_of_the_last_place() -> None:
    one = torch.tensor([1.0], dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        eps = torch.finfo(dtype).eps
        assert accuracy.ulps(torch.tensor([1 + 3 * eps], dtype=dtype), one, one) == 3
        assert accuracy.ulps(torch.tensor([1.0], dtype=dtype), one + eps / 4, one) == 0.25
        # Beside 4 a unit is four times as large, even where the result is small.
        assert accuracy.ulps(torch.tensor([1 + 2 * eps], dtype=dtype), one, 4 * one) == 0.5


def test_a_wrong_kernel_shows_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    op = accuracy.OPS[2]

    def wrong(params: list[torch.Tensor], *others: object, **options: float) -> None:
        op.function(params, *others, **{**options, "lr": options["lr"] * (1 + 1e-4)})

    broken = type(op)(**{**vars(op), "function": wrong})
    assert accuracy.measure(broken, accuracy.DTYPES[0], "kernel").params_ulp > 2
