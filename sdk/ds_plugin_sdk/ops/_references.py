"""What reference implementations have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

Given = TypeVar("Given", Tensor, Tensor | None)


def working(tensor: Tensor) -> torch.dtype:
    """The dtype to compute in: float32, or float64 for float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def apart(tensor: Given, *written: Tensor) -> Given:
    """The tensor; a copy of it where it may share memory with one that is written before it is read."""
    if tensor is None:
        return tensor
    memory = tensor.untyped_storage().data_ptr()
    return tensor.clone() if any(each.untyped_storage().data_ptr() == memory for each in written) else tensor


def one_each(steps: Sequence[int], tensors: int) -> Sequence[int]:
    """The step number of each tensor."""
    return steps if len(steps) == tensors else [steps[0]] * tensors
