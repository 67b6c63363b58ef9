"""Weights in 8 bits: how many columns share a scale, and what products read."""

from __future__ import annotations

import pytest
import torch

from ds_plugin_sdk.integrations.transformers.weights import quantize
from ds_plugin_sdk.ops.linear import dequantize_weight, linear

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]


@pytest.mark.parametrize(
    ("columns", "group"), [(256, 128), (1000, 125), (131, 131), (262, 131), (1009, 1009), (10, 10)]
)
def test_a_scale_serves_many_columns(columns: int, group: int) -> None:
    weight, input = torch.randn(8, columns), torch.randn(3, columns)
    levels, scales = quantize(weight, 8)
    assert scales.shape == (8, columns // group)
    stored = dequantize_weight(levels, scales)
    expected = input @ stored.t()
    close = 0.02 * float(expected.abs().max())  # inputs may be rounded to 8 bits, too
    torch.testing.assert_close(linear(input, levels, scales=scales), expected, rtol=0, atol=close)
    torch.testing.assert_close(stored, weight, rtol=0, atol=float(weight.abs().max()) / 127)
