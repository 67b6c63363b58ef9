"""``quantizer``: what ZeRO++, weight-only quantization and, up to DeepSpeed 0.18, MoQ call.

Formulas, layouts and errors are those of `ds_plugin_sdk.ops.quantizer`. DeepSpeed's CUDA op reads every tensor as
float16, whatever it is; here float32 and bfloat16 are read as what they are.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from ds_plugin_sdk.ops import quantizer


class QuantizationType(enum.IntEnum):
    """Whether the range of the levels is symmetric about zero."""

    Symmetric = 0
    Asymmetric = 1


Symmetric = QuantizationType.Symmetric
Asymmetric = QuantizationType.Asymmetric


def _is_symmetric(quant_type: int) -> bool:
    return QuantizationType(quant_type) is Symmetric


# ---- ZeRO++ ----------------------------------------------------------------------------------------------------------
def quantize(input_vals: Tensor, groups: int, num_bits: int, quant_type: int) -> list[Tensor]:
    """Quantize in groups.

    Args:
        input_vals: float32, bfloat16 or float16.
        groups: number of groups.
        num_bits: 8 or 4.
        quant_type: `Symmetric` or `Asymmetric`.

    Returns:
        Levels, int8, shape of the input (last dimension halved with 4 bits); params, float32 ``[groups]`` or, if
        asymmetric, ``[groups, 2]``. DeepSpeed's CUDA op gives ``[groups, 1]``, gathers that into a flat tensor, and
        looks at the number of elements alone; gloo does not gather a matrix into a flat tensor.
    """
    symmetric = _is_symmetric(quant_type)
    levels, params = quantizer.quantize(input_vals, groups=groups, bits=num_bits, symmetric=symmetric)
    return [levels, params.flatten() if symmetric else params]


def dequantize(quantized_data: Tensor, params: Tensor, groups: int, num_bits: int, quant_type: int) -> Tensor:
    """The values as float16, which is what DeepSpeed expects of this op whatever was quantized."""
    return _dequantize(quantized_data, params, groups, num_bits, quant_type, torch.float16)


def dequantize_fp32(quantized_data: Tensor, params: Tensor, groups: int, num_bits: int, quant_type: int) -> Tensor:
    """The values as float32."""
    return _dequantize(quantized_data, params, groups, num_bits, quant_type, torch.float32)


def _dequantize(
    levels: Tensor, params: Tensor, groups: int, num_bits: int, quant_type: int, dtype: torch.dtype
) -> Tensor:
    symmetric = _is_symmetric(quant_type)
    return quantizer.dequantize(
        levels, _rows(params, groups, symmetric), bits=num_bits, symmetric=symmetric, dtype=dtype
    )


def _rows(params: Tensor, groups: int, symmetric: bool) -> Tensor:
    """Params of any shape as the op takes them, a row for each group."""
    return params.reshape(-1, 1 if symmetric else 2)[:groups]


def swizzle_quant(
    input_vals: Tensor,
    groups: int,
    num_bits: int,
    quant_type: int,
    pipeline_size: int,
    nodes: int,
    devices_per_node: int,
) -> list[Tensor]:
    """Quantize in groups that come out in the order of the two all-to-alls of qgZ.

    Returns:
        Levels, int8, one dimension; params, float32 ``[groups, 1]`` or ``[groups, 2]``.
    """
    levels, params = quantizer.swizzle_quantize(
        input_vals,
        groups=groups,
        bits=num_bits,
        symmetric=_is_symmetric(quant_type),
        pipeline=pipeline_size,
        nodes=nodes,
        devices_per_node=devices_per_node,
    )
    return [levels, params]


def quantized_reduction(
    input_vals: Tensor,
    input_scales: Tensor,
    in_groups: int,
    out_groups: int,
    num_bits: int,
    quant_type: int,
    devices_per_node: int,
) -> list[Tensor]:
    """Add up what the devices of a node sent, and quantize the sum.

    Returns:
        Levels, int8, last dimension of the input divided by `devices_per_node`; params, float32 ``[out_groups, 1]`` or
        ``[out_groups, 2]``.
    """
    symmetric = _is_symmetric(quant_type)
    levels, params = quantizer.quantized_reduce(
        input_vals,
        _rows(input_scales, in_groups, symmetric),
        out_groups=out_groups,
        devices=devices_per_node,
        bits=num_bits,
        symmetric=symmetric,
    )
    return [levels, params]


# ---- weight-only quantization ----------------------------------------------------------------------------------------
def dequantize_int4_to_half_experimental(
    data_in: Tensor, scale_buffer: Tensor, min_val_buffer: Tensor, num_group: int, group_size: int
) -> Tensor:
    """``level / scale + min`` of unsigned 4-bit levels: ``[num_group, group_size]``, dtype of the scales."""
    return quantizer.dequantize_range(data_in, scale_buffer, min_val_buffer, group_size=group_size, bits=4)


def dequantize_int8_to_half_experimental(
    data_in: Tensor, scale_buffer: Tensor, min_val_buffer: Tensor, num_group: int, group_size: int
) -> Tensor:
    """``level / scale + min`` of unsigned 8-bit levels: ``[num_group, group_size]``, dtype of the scales."""
    return quantizer.dequantize_range(data_in, scale_buffer, min_val_buffer, group_size=group_size, bits=8)


# ---- quantization in place: DeepSpeed up to 0.18 ---------------------------------------------------------------------
def _fake_quantize(vals: Tensor, groups: int, bits: int, *, symmetric: bool, stochastic: bool) -> Tensor:
    noise = torch.rand(vals.shape, dtype=torch.float32, device=vals.device) if stochastic else None
    quantizer.fake_quantize_(vals, groups=groups, bits=bits, symmetric=symmetric, noise=noise)
    return vals


def ds_quantize_fp32(vals: Tensor, groups: int, bits: int) -> Tensor:
    """Round `vals`, in place, to symmetric levels; returned."""
    return _fake_quantize(vals, groups, bits, symmetric=True, stochastic=False)


def ds_quantize_asym_fp32(vals: Tensor, groups: int, bits: int) -> Tensor:
    """Round `vals`, in place, to levels between its extremes; returned."""
    return _fake_quantize(vals, groups, bits, symmetric=False, stochastic=False)


def ds_sr_quantize_fp32(vals: Tensor, groups: int, bits: int) -> Tensor:
    """`ds_quantize_fp32` with stochastic rounding, by torch's generator of the device."""
    return _fake_quantize(vals, groups, bits, symmetric=True, stochastic=True)


def ds_sr_quantize_asym_fp32(vals: Tensor, groups: int, bits: int) -> Tensor:
    """`ds_quantize_asym_fp32` with stochastic rounding, by torch's generator of the device."""
    return _fake_quantize(vals, groups, bits, symmetric=False, stochastic=True)


# Each of them takes every dtype; DeepSpeed calls these for float16 and those above for all others.
ds_quantize_fp16 = ds_quantize_fp32
ds_quantize_asym_fp16 = ds_quantize_asym_fp32
ds_sr_quantize_fp16 = ds_sr_quantize_fp32
ds_sr_quantize_asym_fp16 = ds_sr_quantize_asym_fp32
