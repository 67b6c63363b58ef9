"""RMS norm with torch's signature, in one pass forward and one backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ds_plugin_sdk.nn._fused import Fused
from ds_plugin_sdk.nn.linear import is_autocast
from ds_plugin_sdk.ops import _library

# What torch takes for eps if none is given, in all dtypes that the op serves.
_EPS = torch.finfo(torch.float32).eps


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """`torch.nn.functional.rms_norm`: ``x / sqrt(mean(x^2) + eps) * weight`` (Zhang & Sennrich 2019).

    One op computes it, and one its gradients, where the device has a kernel; arithmetic is in float32 and rounded once.
    Input, weight and a number for each row are kept for the backward pass. All other calls are torch's: no weight, or
    one of another dtype, several dimensions, few elements, autocast, subclasses of tensors, modes, `torch.compile`,
    `torch.func`, `torch.fx`. Differentiable as often as torch's.

    Args:
        input: ``[..., columns]``.
        normalized_shape: the dimensions over which the mean is taken.
        weight: of that shape.
        eps: added to the mean of squares; the smallest step of float32 above 1 if None (of float64 for float64).

    Returns:
        Input's shape and dtype.

    Raises:
        RuntimeError: `normalized_shape` is not that of input's last dimensions, or `weight` is of another (torch's
            errors).
    """
    if (
        isinstance(input, Tensor)  # what torch.fx traces has no shape to compare
        and isinstance(weight, Tensor)
        and tuple(normalized_shape) == weight.shape
        and not is_autocast(input.device.type)
    ):
        return RMS_NORM(input, weight, eps=eps)
    return functional.rms_norm(input, list(normalized_shape), weight, eps)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` by `rms_norm`: the same arguments, parameters and state dicts."""

    def forward(self, x: Tensor) -> Tensor:
        """The norm over the last dimensions."""
        return rms_norm(x, self.normalized_shape, self.weight, self.eps)


def _fits(input: Tensor, weight: Tensor) -> bool:
    return (
        input.dim() > 0
        and input.is_contiguous()  # others keep their layout by torch's functions
        and weight.shape == input.shape[-1:]
        and weight.dtype == input.dtype
    )


def _forward(input: Tensor, weight: Tensor, eps: float | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    output, _, rstd = _library.call("add_rms_norm", input, None, weight, _EPS if eps is None else eps)
    return output, (input, weight, rstd)


def _backward(grad: Tensor, input: Tensor, weight: Tensor, rstd: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _library.call("add_rms_norm_backward", grad, None, input, rstd, weight)
    return found


def _plain(input: Tensor, weight: Tensor, eps: float | None) -> Tensor:
    return functional.rms_norm(input, list(weight.shape), weight, eps)


RMS_NORM = Fused("add_rms_norm", "transformer", _fits, _forward, _backward, _plain)

__all__ = ["RMS_NORM", "RMSNorm", "rms_norm"]
