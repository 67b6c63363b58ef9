"""What ops over single tensors have in common: the checks, on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_plugin_sdk.ops._library import invalid
from ds_plugin_sdk.ops._multi_tensor import text

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_first(op: str, name: str, tensor: Tensor) -> None:
    """Check the argument that decides on dtype and device: a dtype that kernels handle, and at least one dimension.

    Raises:
        InvalidTensorError: otherwise.
    """
    if tensor.dtype not in DTYPES:
        raise invalid(op, f"{name} is {text(tensor.dtype)}; expected float32, bfloat16 or float16")
    if tensor.dim() == 0:
        raise invalid(op, f"{name} has no dimensions; expected [..., columns]")


def check(op: str, name: str, tensor: Tensor | None, first: Tensor, shape: Sequence[int]) -> None:
    """Check another argument, unless it is None: dtype and device of `first`, and a shape.

    Raises:
        InvalidTensorError: otherwise.
    """
    if tensor is None:
        return
    if tensor.device != first.device:
        raise invalid(op, f"{name} is on {tensor.device}; expected {first.device}, all tensors on one device")
    if tensor.dtype != first.dtype:
        raise invalid(op, f"{name} is {text(tensor.dtype)}; expected {text(first.dtype)}")
    if tensor.shape != tuple(shape):
        raise invalid(op, f"{name} has shape {list(tensor.shape)}; expected {list(shape)}")


def check_written(op: str, name: str, tensor: Tensor) -> None:
    """Check that no two elements of a tensor that is written share memory.

    Raises:
        InvalidTensorError: they do.
    """
    last = 0  # offset of the last element among the dimensions seen
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= last:
                raise invalid(
                    op,
                    f"{name} has elements that share memory (is it expanded?); expected one element at each index",
                )
            last += stride * (size - 1)


def working(tensor: Tensor) -> torch.dtype:
    """The dtype in which a reference computes: float32, or float64 for float64."""
    return torch.promote_types(tensor.dtype, torch.float32)
