"""Quantization to small floating-point numbers beyond what the suite checks of every op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk import op_builder
from ds_plugin_sdk.errors import InvalidTensorError, SdkError
from ds_plugin_sdk.integrations.deepspeed.modules import fp_quantizer as module
from ds_plugin_sdk.ops.fp_quantizer import FORMATS, fp_dequantize, fp_quantize


@pytest.fixture(scope="module", autouse=True)
def fp_kernels(native: Callable[..., None]) -> None:
    native("fp_quantizer")


def there_and_back(x: Tensor, group_size: int, bits: int, mantissa: int, implementation: str) -> Tensor:
    ops = torch.ops.ds_plugin if implementation == "kernel" else torch.ops.ds_plugin_reference
    stored = ops.fp_quantize(x, None, group_size, bits, mantissa)
    values: Tensor = ops.fp_dequantize(stored, group_size, bits, mantissa, torch.float32)
    return values.reshape(x.shape)


@pytest.mark.parametrize(("bits", "mantissa"), FORMATS)
def test_every_number_of_a_format_comes_back(bits: int, mantissa: int, implementation: str) -> None:
    """0 among them, which has no number in DeepSpeed's own op."""
    form = FORMATS[bits, mantissa]
    numbers = [
        (1 + m / 2**mantissa) * 2.0 ** (e - form.bias) for e in range(1, 2**form.exponent) for m in range(2**mantissa)
    ]
    row = [0.0, *numbers, *(-x for x in numbers)]
    x = torch.tensor(row + [form.largest] * (-len(row) % 8))
    assert x.max() == form.largest
    assert torch.equal(there_and_back(x, len(x), bits, mantissa, implementation), x)


@pytest.mark.parametrize(("bits", "mantissa"), FORMATS)
def test_the_error_is_half_a_step(bits: int, mantissa: int, implementation: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 512).bfloat16()
    error = (there_and_back(x, 128, bits, mantissa, implementation) - x.float()).abs()
    form = FORMATS[bits, mantissa]
    scales = x.float().abs().reshape(-1, 128).amax(dim=1, keepdim=True) / form.largest
    least = scales * 2.0 ** (1 - form.bias)  # what is less becomes this
    step = torch.maximum(x.float().abs().reshape(-1, 128) * 2.0**-mantissa / 2, least)
    assert (error.reshape(-1, 128) <= step * 1.001).all()


def test_numbers_lie_one_behind_the_other_and_the_scale_behind_them(implementation: str) -> None:
    ops = torch.ops.ds_plugin if implementation == "kernel" else torch.ops.ds_plugin_reference
    six = torch.tensor([28.0, -28.0, 1.0, -1.0, 0.25, 2.0, 0.0, 1.25])
    codes = [31, 63, 12, 44, 4, 16, 0, 13]
    stream = sum(code << 6 * i for i, code in enumerate(codes)).to_bytes(6, "little") + b"\x00\x00\x80\x3f"
    assert bytes(ops.fp_quantize(six, None, 8, 6, 2)[0].tolist()) == stream
    twelve = torch.tensor([510.0, 1.0, -1.0, 0.0, 2.0, 1.0 + 2**-7, 3.0, -510.0])
    codes = [2047, 896, 2944, 0, 1024, 897, 1088, 4095]
    stream = sum(code << 12 * i for i, code in enumerate(codes)).to_bytes(12, "little") + b"\x00\x00\x80\x3f"
    assert bytes(ops.fp_quantize(twelve, None, 8, 12, 7)[0].tolist()) == stream


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_in_its_group_alone(bad: float, implementation: str) -> None:
    x = torch.ones(3, 24)
    x[1, 17] = bad
    values = there_and_back(x, 24, 8, 3, implementation)
    assert values[1].isnan().all() and torch.equal(values[::2], x[::2])


def test_noise_makes_the_mean_exact(implementation: str) -> None:
    torch.manual_seed(0)
    ops = torch.ops.ds_plugin if implementation == "kernel" else torch.ops.ds_plugin_reference
    x = torch.full((64, 512), 1.03)
    x[:, 0] = 480 / 256
    stored = ops.fp_quantize(x, torch.rand(x.shape), 512, 8, 3)
    values = ops.fp_dequantize(stored, 512, 8, 3, torch.float32)[:, 1:]
    assert sorted(set(values.flatten().tolist())) == [1.0, 1.125]
    assert values.mean().item() == pytest.approx(1.03, abs=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 7}, "bits is 7 with a mantissa of 3"),
        ({"bits": 8, "mantissa_bits": 4}, "bits is 8 with a mantissa of 4"),
        ({"group_size": 12}, "group_size is 12"),
        ({"group_size": 32}, "x has 48 elements.*multiple of group_size, which is 32"),
        ({"x": torch.ones(48, dtype=torch.int32)}, "x "),
        ({"noise": torch.zeros(47)}, r"noise has shape \[47\]"),
        ({"noise": torch.zeros(48).half()}, "noise "),
    ],
)
def test_what_does_not_fit_is_rejected(change: dict[str, Any], message: str) -> None:
    arguments = {"x": torch.ones(48), "group_size": 16, **change}
    with pytest.raises(InvalidTensorError, match=message):
        fp_quantize(**arguments)


def test_what_was_not_stored_so_is_rejected() -> None:
    stored = fp_quantize(torch.ones(48), group_size=16)
    with pytest.raises(InvalidTensorError, match=r"stored has shape \[3, 20\].*\[groups, 12\]"):
        fp_dequantize(stored, group_size=8)
    with pytest.raises(InvalidTensorError, match="stored"):
        fp_dequantize(stored.int(), group_size=16)
    with pytest.raises(InvalidTensorError, match="dtype"):
        fp_dequantize(stored, group_size=16, dtype=torch.float64)


# ---- what DeepSpeed calls --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("bits", "mantissa"), [(8, 3), (8, 2), (12, 4), (6, 2), (4, 1)])
def test_deepspeeds_functions(bits: int, mantissa: int) -> None:
    """Its front end says 4 of the mantissa of 12 bits, and means 7."""
    torch.manual_seed(0)
    x = torch.randn(4, 2, 64).bfloat16()
    out = torch.ones(16, 32 * bits // 8 + 4, dtype=torch.uint8)
    assert module.quantize(out, x, 32, 0, bits, mantissa) is out
    expected = fp_quantize(x, group_size=32, bits=bits, mantissa_bits=7 if bits == 12 else mantissa)
    assert torch.equal(out, expected)
    values = torch.empty_like(x)
    module.dequantize(values, out, 32, mantissa, bits - 1 - mantissa)
    assert (values - x).abs().max() < x.abs().max() / 3
    parts = torch.empty(2, 2, 64).bfloat16()
    module.selective_dequantize(parts, out, torch.tensor([3, 1], dtype=torch.int32), 32, mantissa, bits - 1 - mantissa)
    assert torch.equal(parts, values[[3, 1]])
    scales = module.get_scales(out[:, -4:], 16)
    largest = x.float().reshape(-1, 32).abs().amax(dim=1)
    torch.testing.assert_close(scales.flatten() * FORMATS[bits, 7 if bits == 12 else mantissa].largest, largest)
    torch.manual_seed(1)
    stochastic = module.quantize(torch.empty_like(out), x, 32, 1, bits, mantissa)
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(module.quantize(torch.empty_like(out), x, 32, 1, bits, mantissa), stochastic)
    finally:
        torch.set_default_dtype(torch.float32)
    assert not torch.equal(stochastic, out) and torch.equal(stochastic[:, -4:], out[:, -4:])


def test_parts_that_cut_groups_are_rejected() -> None:
    stored = fp_quantize(torch.ones(4, 24), group_size=32)
    with pytest.raises(InvalidTensorError, match="a part has 24 elements"):
        module.selective_dequantize(torch.empty(1, 24), stored, torch.tensor([1]), 32, 3, 4)


@pytest.mark.parametrize("device_type", ["cpu", "meta"])
def test_the_builder_tells_of_its_formats(device_type: str) -> None:
    builder = op_builder.find("FPQuantizerBuilder", None, device_type)
    assert builder.get_default_quant_dtype() is torch.uint8
    assert [builder.get_quant_range(bits) for bits in (8, 6, 12, 4)] == [480, 28, 510, 6]
    with pytest.raises(SdkError, match=r"no format of 5 bits .*one of 4, 6, 8, 12"):
        builder.get_quant_range(5)
