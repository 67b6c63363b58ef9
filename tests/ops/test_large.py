"""Tensors of more than 2^31 elements, whose indices need 64 bits: `make test-large`, with 20 GB of free memory."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.ops import activation, lion, norm, quantizer, softmax

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.timeout(900),
    pytest.mark.skipif("DS_TEST_LARGE" not in os.environ, reason="takes 20 GB of memory: make test-large"),
]

COLUMNS = 1 << 12
ROWS = (1 << 19) + 3  # 2^31 elements, and three rows more
ENDS = (0, (1 << 19) - 1, 1 << 19, ROWS - 1)  # rows on either side of 2^31


@pytest.fixture(scope="session", autouse=True)
def kernels(native: Callable[..., None]) -> None:
    native("activation", "lion", "norm", "quantizer", "softmax")


@pytest.fixture
def large() -> Tensor:
    """Rows that differ from each other, in bfloat16."""
    pattern = torch.randn(5, COLUMNS).to(torch.bfloat16)
    made = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16)
    for i in range(5):
        made[i::5] = pattern[i]
    return made


def test_bias_activation(large: Tensor) -> None:
    bias = torch.randn(COLUMNS).to(torch.bfloat16)
    expected = {row: functional.silu(large[row].float() + bias.float()) for row in ENDS}
    activation.bias_activation_(large, bias, "silu")
    for row in ENDS:
        torch.testing.assert_close(large[row].float(), expected[row], rtol=2**-7, atol=1e-5)


def test_rms_norm(large: Tensor) -> None:
    weight = torch.randn(COLUMNS).to(torch.bfloat16)
    found = norm.rms_norm(large, weight)
    for row in ENDS:
        expected = functional.rms_norm(large[row].float(), (COLUMNS,), weight.float(), 1e-6)
        torch.testing.assert_close(found[row].float(), expected, rtol=2**-7, atol=1e-5)


def test_softmax(large: Tensor) -> None:
    expected = {row: torch.softmax(large[row].float() * 0.5, dim=-1) for row in ENDS}
    softmax.softmax_(large.view(1, 1, ROWS, COLUMNS), scale=0.5)
    for row in ENDS:
        torch.testing.assert_close(large[row].float(), expected[row], rtol=2**-7, atol=1e-6)


def test_lion(large: Tensor) -> None:
    params, moments = torch.zeros_like(large), torch.zeros_like(large)
    lion.lion_([params], [large], [moments], lr=0.5, betas=(0.9, 0.5), weight_decay=0.0)
    for row in ENDS:
        assert torch.equal(params[row], -0.5 * large[row].sign())
        torch.testing.assert_close(moments[row], large[row] / 2)


def test_quantizer(large: Tensor) -> None:
    levels, params = quantizer.quantize(large, groups=ROWS, bits=8)
    found = quantizer.dequantize(levels, params, bits=8, dtype=torch.bfloat16)
    for row in ENDS:
        step = large[row].abs().amax().float() / 127
        assert (found.view(ROWS, COLUMNS)[row].float() - large[row].float()).abs().amax() <= step
