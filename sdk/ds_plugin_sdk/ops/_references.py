"""What reference implementations have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def working(tensor: Tensor) -> torch.dtype:
    """The dtype to compute in: float32, or float64 for float64."""
    return torch.promote_types(tensor.dtype, torch.float32)


def one_each(steps: Sequence[int], tensors: int) -> Sequence[int]:
    """The step number of each tensor."""
    return steps if len(steps) == tensors else [steps[0]] * tensors
