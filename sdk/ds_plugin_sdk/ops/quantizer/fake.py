"""``ds_plugin::fake_quantize_``, for training with quantization in mind."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_dtype, check_floating, check_memory
from ds_plugin_sdk.ops._references import working
from ds_plugin_sdk.ops.quantizer._parts import check_groups, check_same_device

# DeepSpeed's: keeps a group of equal values from dividing by zero when quantized in place.
_EPSILON = 1e-5


def fake_quantize_(
    x: Tensor, *, groups: int, bits: int = 8, symmetric: bool = True, noise: Tensor | None = None
) -> None:
    """Round a tensor, in place, to the values that quantization would leave of it.

    Of each group, in float32, with r rounding to nearest, ties to even::

        symmetric   s = 2^bits / (2 max|x| + 1e-5)       x <- clamp(r(x s), -2^(bits-1), 2^(bits-1) - 1) / s
        asymmetric  s = 2^bits / (max x - min x + 1e-5)  x <- r((x - min x) s) / s + min x

    as the fake quantizers of DeepSpeed up to 0.18 have it, whose float32 form rounds its result to a whole number and
    is not followed there. With `noise`, r(v) is ``floor(v + noise)``: uniform noise makes the rounding stochastic, its
    mean v. Autograd does not record the step: gradients pass straight through.

    Args:
        x: float32, bfloat16 or float16 (float64: reference only), any shape.
        groups: number of groups, a divisor of ``x.numel()``.
        bits: 2 to 16.
        symmetric: whether the range is symmetric about 0; otherwise it is that of the values.
        noise: float32 in [0, 1), shape of `x`; none for rounding to nearest.

    Raises:
        InvalidTensorError: dtype, shape or memory do not fit; nothing was modified.
    """
    _library.call("fake_quantize_", x, noise, groups, bits, symmetric)
    _library.mark_modified([x])


def _check(x: Tensor, noise: Tensor | None, groups: int, bits: int) -> None:
    check_floating("x", x)
    if not 2 <= bits <= 16:
        raise CheckError(f"bits is {bits}; expected 2 to 16")
    check_groups("x", x.numel(), groups)
    if noise is None:
        return
    check_dtype("noise", noise, torch.float32)
    check_same_device("noise", noise, x)
    if noise.shape != x.shape:
        raise CheckError(f"noise has shape {list(noise.shape)}; expected {list(x.shape)}, that of x")


@_library.op(
    "fake_quantize_(Tensor(a!) x, Tensor? noise, int groups, int bits, bool symmetric) -> ()",
    check=_check,
    unrecorded=True,
)
def fake_quantize_reference(x: Tensor, noise: Tensor | None, groups: int, bits: int, symmetric: bool) -> None:
    """``ds_plugin::fake_quantize_`` in plain torch, on any device."""
    check_memory({"x": [x], "noise": [] if noise is None else [noise]}, ("x",))
    if x.numel() == 0:
        return
    values = x.to(working(x)).reshape(groups, -1)
    least = torch.zeros_like(values[:, :1]) if symmetric else values.amin(dim=1, keepdim=True)
    span = 2 * values.abs().amax(dim=1, keepdim=True) if symmetric else values.amax(dim=1, keepdim=True) - least
    scale = 2**bits / (span + _EPSILON)
    levels = (values - least) * scale
    levels = levels.round() if noise is None else (levels + noise.reshape(groups, -1)).floor()
    if symmetric:
        levels = levels.clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    x.copy_((levels * (1 / scale) + least).reshape(x.shape))
