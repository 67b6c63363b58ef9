"""Tensors as one run of memory: ``ds_plugin::flatten``, and views that need no op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_dtype
from ds_plugin_sdk.ops._library import invalid


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """The elements of all tensors, one after the other.

    Args:
        tensors: any shapes, one dtype, one device; at least one.

    Returns:
        A new contiguous tensor of one dimension.

    Raises:
        InvalidTensorError: there are none, or dtypes or devices differ.
    """
    result: Tensor = _library.call("flatten", tensors)
    return result


def unflatten(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undoes `flatten`, without a copy: views of `flat`.

    Args:
        flat: contiguous, one dimension.
        like: tensors with the shapes of the result; their elements together are as many as those of `flat`.

    Returns:
        A view for each tensor of `like`, of its shape and of flat's dtype.

    Raises:
        InvalidTensorError: the shapes do not fit.
    """
    sizes = [tensor.numel() for tensor in like]
    if flat.dim() != 1 or flat.numel() != sum(sizes):
        raise invalid("unflatten", f"flat has shape {list(flat.shape)}; expected [{sum(sizes)}], as many as in like")
    return [part.view(tensor.shape) for part, tensor in zip(flat.split_with_sizes(sizes), like, strict=True)]


@overload
def cast_to_byte_tensor(tensors: Tensor) -> Tensor: ...
@overload
def cast_to_byte_tensor(tensors: Sequence[Tensor]) -> list[Tensor]: ...
def cast_to_byte_tensor(tensors: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor]:
    """The bytes of a tensor, or of each of a list, without a copy.

    Args:
        tensors: contiguous tensors of any shape and dtype.

    Returns:
        For each tensor a uint8 view of one dimension. One of at most one byte is returned as it is, as DeepSpeed's own
        op does.

    Raises:
        InvalidTensorError: a tensor is not contiguous, so that there is no such view.
    """
    return _bytes(tensors) if isinstance(tensors, Tensor) else [_bytes(tensor) for tensor in tensors]


def _bytes(tensor: Tensor) -> Tensor:
    if tensor.nbytes <= 1:
        return tensor
    if not tensor.is_contiguous():
        raise invalid(
            "cast_to_byte_tensor", f"a tensor of shape {list(tensor.shape)} has gaps; expected a contiguous one"
        )
    return tensor.detach().view(-1).view(torch.uint8)


def _check(tensors: Sequence[Tensor]) -> None:
    if not tensors:
        raise CheckError("tensors is empty; expected at least one tensor")
    for i, tensor in enumerate(tensors):
        if tensor.device != tensors[0].device:
            raise CheckError(f"tensors[{i}] is on another device than tensors[0]; expected all on one")
        check_dtype(f"tensors[{i}]", tensor, tensors[0].dtype)


def _save(ctx: Any, inputs: tuple[Sequence[Tensor]], output: Tensor) -> None:
    ctx.shapes = [tensor.shape for tensor in inputs[0]]


def _derive(ctx: Any, grad: Tensor) -> list[Tensor]:
    parts = grad.split_with_sizes([shape.numel() for shape in ctx.shapes])
    return [part.view(shape) for part, shape in zip(parts, ctx.shapes, strict=True)]


@_library.op(
    "flatten(Tensor[] tensors) -> Tensor",
    check=_check,
    outputs=lambda tensors: tensors[0].new_empty(sum(tensor.numel() for tensor in tensors)),
    autograd=_library.Autograd(_derive, _save, raises=True),  # views, which may be derived again
)
def flatten_reference(tensors: Sequence[Tensor]) -> Tensor:
    """``ds_plugin::flatten`` in plain torch, on any device."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if len(tensors) > 1 else tensors[0].flatten().clone()


__all__ = ["cast_to_byte_tensor", "flatten", "unflatten"]
