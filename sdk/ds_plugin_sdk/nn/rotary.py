"""Rotary position embedding with a derivative, which is turning back."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_plugin_sdk.nn._fused import Fused
from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError
from ds_plugin_sdk.ops.rotary import check_rotary


def rotary(input: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """`ds_plugin_sdk.ops.rotary.rotary`, which can be differentiated with respect to input.

    The op computes it, and its gradient, where the device has a kernel: cos and sin alone are kept for the backward
    pass. All other calls are torch's own functions, as in `ds_plugin_sdk.nn.rms_norm`; so are those in which cos or sin
    wants a gradient.

    Args:
        input: queries or keys, ``[batch, heads, tokens, head_dim]``.
        cos, sin: ``[batch or 1, tokens, rotary_dim / 2]``, float32 (float64 for float64), such as
            `ds_plugin_sdk.ops.rotary.angles` gives. Elements of a head beyond rotary_dim stay.
        interleaved: pair element 2i with element 2i + 1 (GPT-J); else element i with i + rotary_dim / 2 (LLaMA).

    Returns:
        Input's shape and dtype, and its layout where that has no gaps.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit.
    """
    try:
        check_rotary(input, cos, sin)
    except CheckError as error:
        raise _library.invalid("rotary", str(error)) from None
    return ROTARY(input, cos, sin, interleaved=interleaved)


def _fits(input: Tensor, cos: Tensor, sin: Tensor) -> bool:
    wanted = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    return cos.dtype == sin.dtype == torch.float32 and not wanted


def _forward(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    return _library.call("rotary", input, cos, sin, interleaved), (cos, sin)


def _backward(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, None, None]:
    return _library.call("rotary", grad, cos, -sin, interleaved), None, None


def _plain_backward(grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, None, None]:
    return _plain(grad, cos, -sin, interleaved), None, None


def _plain(input: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    size = 2 * cos.shape[-1]
    has_rest = size < input.shape[-1]
    turned = input[..., :size] if has_rest else input  # is_grads_batched fails at a slice of everything
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    c, s = cos.unsqueeze(1), sin.unsqueeze(1)
    pairs = first * c - second * s, second * c + first * s
    both = torch.stack(pairs, dim=-1).reshape(turned.shape) if interleaved else torch.cat(pairs, dim=-1)
    both = both.to(input.dtype)
    return torch.cat([both, input[..., size:]], dim=-1) if has_rest else both


ROTARY = Fused("rotary", "rotary", _fits, _forward, _backward, _plain, _plain_backward)

__all__ = ["ROTARY", "rotary"]
