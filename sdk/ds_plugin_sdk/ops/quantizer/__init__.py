"""Grouped integer quantization: ``ds_plugin::quantize``, ``dequantize`` and the ops that communication needs.

A tensor is cut, in row-major order, into groups of equal size. With b bits, x a group's values, all in float32::

    symmetric   s = 2^b / (2 max|x|),       o = 0                  s = 1 where max|x| = 0
    asymmetric  s = 2^b / (max x - min x),  o = (max x + min x) / 2    s = 1 where they are equal

    q = clamp(round((x - o) s), -2^(b-1), 2^(b-1) - 1)       params = 1 / s, and o if asymmetric
    x' = q * params[0] + o

as DeepSpeed's CUDA source has them. Rounding is to nearest, ties to even. The largest value would need level 2^(b-1)
and gets the one below, so it loses a whole step ``1 / s``; all others are within half of one. Of 4-bit values, an
even element has the upper half of its byte, the odd one behind it the lower.

A NaN or an infinity in a group makes its params NaN or infinite, and all of the group NaN once it is dequantized; its
own level is 0. A group of no elements has s = 1 and o = 0.
"""

from ds_plugin_sdk.ops.quantizer.communication import quantized_reduce, swizzle_quantize
from ds_plugin_sdk.ops.quantizer.fake import fake_quantize_
from ds_plugin_sdk.ops.quantizer.groups import dequantize, quantize
from ds_plugin_sdk.ops.quantizer.weight_only import dequantize_range

__all__ = [
    "dequantize",
    "dequantize_range",
    "fake_quantize_",
    "quantize",
    "quantized_reduce",
    "swizzle_quantize",
]
