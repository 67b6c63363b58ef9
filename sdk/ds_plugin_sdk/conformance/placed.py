"""Tensors that are part of a larger piece of memory: with gaps, in another order, and guards that nobody may write."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in a larger piece of memory.

    Attributes:
        order: of the dimensions; below 0.5 as they are, else shuffled, by this number.
        gap: elements from one to the next of the last dimension.
        pad: elements between rows.
        shift: elements before the first and after the last.
        repeated: which dimension, as a share of them, has the same memory for all its entries; None for none.
        one: whether all entries have the same memory, as the gradient of a sum has it.
        rows: whether the dimensions before the last lie in the opposite order, each row in one piece.
    """

    order: float = 0.0
    gap: int = 1
    pad: int = 0
    shift: int = 0
    repeated: float | None = None
    one: bool = False
    rows: bool = False

    @property
    def shared(self) -> bool:
        """Whether entries have the same memory."""
        return self.one or self.repeated is not None

    def values(self, tensor: Tensor) -> Tensor:
        """The tensor's values, the same along the dimension that is repeated."""
        if not self.shared or tensor.dim() == 0 or tensor.numel() == 0:
            return tensor
        if self.one:
            return tensor.flatten()[:1].expand(tensor.numel()).reshape(tensor.shape).contiguous()
        assert self.repeated is not None
        at = int(self.repeated * tensor.dim())
        return tensor.narrow(at, 0, 1).expand(tensor.shape).contiguous()

    def strides(self, shape: Sequence[int]) -> tuple[list[int], int]:
        """Strides, and elements of memory from the first to the last."""
        if self.one:
            return [0] * len(shape), 1
        order = list(range(len(shape)))
        random.Random(self.order).shuffle(order)
        if self.order < 0.5:
            order.sort()
        if self.rows:
            order = [*reversed(order[:-1]), *order[-1:]]
        strides, step = [0] * len(shape), self.gap
        repeated = None if self.repeated is None else int(self.repeated * len(shape))
        for at in reversed(order):
            if at == repeated:
                continue
            strides[at] = step
            step = step * max(shape[at], 1) + self.pad
        return strides, 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True) if size > 1)


@dataclass(frozen=True)
class Placed:
    """A tensor on a device, the memory that it is part of, and what that held."""

    tensor: Tensor
    memory: Tensor | None = None
    before: Tensor | None = None

    @staticmethod
    def at(tensor: Tensor, layout: Layout | None, device: torch.device) -> Placed:
        """A copy of a tensor, as a layout says, in memory that is otherwise NaN, or as large as integers get.

        So what is read beside the tensor shows in the results.
        """
        if tensor.is_meta:
            return Placed(tensor)
        if layout is None:
            # An expanded tensor stays one.
            first = tensor[..., :1].to(device, copy=True) if tensor.dim() and tensor.stride()[-1] == 0 else None
            return Placed(tensor.to(device, copy=True) if first is None else first.expand(tensor.shape))
        strides, elements = layout.strides(tensor.shape)
        memory = torch.full((elements + 2 * layout.shift,), _beside(tensor.dtype), dtype=tensor.dtype).to(device)
        view = torch.as_strided(memory, tensor.shape, strides, layout.shift)
        if tensor.numel():
            (_once(view) if layout.shared else view).copy_(_once(tensor, view.stride()) if layout.shared else tensor)
        return Placed(view, memory, memory.clone())

    def beyond(self) -> bool:
        """Whether memory that is no part of the tensor has changed."""
        if self.memory is None or self.before is None or self.tensor.numel() == 0:
            return False
        view = torch.as_strided(self.before, self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset())
        _once(view).copy_(_once(self.tensor))
        return not same_bits(self.before, self.memory)


def _beside(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, on any device, have the same shape and bits."""
    return a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).view(-1).view(torch.uint8)


def _once(tensor: Tensor, strides: Sequence[int] | None = None) -> Tensor:
    """A tensor without what is repeated."""
    for at, stride in enumerate(tensor.stride() if strides is None else strides):
        tensor = tensor.narrow(at, 0, 1) if stride == 0 and tensor.shape[at] > 1 else tensor
    return tensor
