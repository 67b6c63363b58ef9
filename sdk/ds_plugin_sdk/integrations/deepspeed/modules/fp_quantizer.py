"""``fp_quantizer``: what DeepSpeed's FP_Quantize calls, and so its quantized linear layers and LoRA.

Formats, layouts and errors are those of `ds_plugin_sdk.ops.fp_quantizer`. DeepSpeed's front end says of 12 bits that 4
are of the mantissa; in its op, as in ours, 7 are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.ops.fp_quantizer import fp_dequantize, fp_quantize


def _mantissa(bits: int, mantissa: int) -> int:
    return 7 if bits == 12 else mantissa


def quantize(
    out: Tensor, val: Tensor, group_size: int, stochastic_rounding: int, q_bits: int, q_mantisa_bits: int
) -> Tensor:
    """Quantize `val` in groups into `out`, uint8 ``[groups, group_size * q_bits / 8 + 4]``, which is returned.

    Stochastic rounding takes its noise from torch's generator. DeepSpeed's own op adds about 10 units of float32's last
    place there, and so rounds towards zero.
    """
    noise = torch.rand(val.shape, dtype=torch.float32, device=val.device) if stochastic_rounding else None
    stored = fp_quantize(
        val, group_size=group_size, bits=q_bits, mantissa_bits=_mantissa(q_bits, q_mantisa_bits), noise=noise
    )
    return out.copy_(stored)


def dequantize(val: Tensor, val_q: Tensor, group_size: int, q_mantisa_bits: int, q_exponent_bits: int) -> None:
    """Write the values of `val_q`, what `quantize` gave, of any shape, into `val`."""
    val.copy_(_dequantize(val_q, val.dtype, group_size, q_mantisa_bits, q_exponent_bits).view(val.shape))


def selective_dequantize(
    val: Tensor, val_q: Tensor, indexes: Tensor, group_size: int, q_mantisa_bits: int, q_exponent_bits: int
) -> None:
    """Write into ``val[k]`` the values of part number ``indexes[k]`` of what was quantized.

    Raises:
        InvalidTensorError: a part is not of whole groups, or a tensor does not fit.
    """
    elements = val.numel() // max(len(indexes), 1)
    if elements % group_size:
        raise InvalidTensorError(
            f"a part has {elements} elements", op="fp_quantizer", why=f"expected whole groups of {group_size}"
        )
    bits = 1 + q_mantisa_bits + q_exponent_bits
    parts = val_q.reshape(-1, elements // group_size * (group_size * bits // 8 + 4))
    chosen = parts.index_select(0, indexes)
    val.copy_(_dequantize(chosen, val.dtype, group_size, q_mantisa_bits, q_exponent_bits).view(val.shape))


def get_scales(out: Tensor, num_groups: int) -> Tensor:
    """The scales, float32 ``[num_groups, 1]``, from their bytes, uint8 ``[num_groups, 4]``."""
    return out[:num_groups, :4].clone(memory_format=torch.contiguous_format).view(torch.float32)


def _dequantize(stored: Tensor, dtype: torch.dtype, group_size: int, mantissa: int, exponent: int) -> Tensor:
    bits = 1 + mantissa + exponent
    rows = stored.reshape(-1, group_size * bits // 8 + 4)
    return fp_dequantize(rows, group_size=group_size, bits=bits, mantissa_bits=_mantissa(bits, mantissa), dtype=dtype)
