"""What is compared on a GPU, and how its arguments are made."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]
DEVICE = "cuda"
ROTATION_IN_L2 = 4  # the rotated arguments are so many times the L2 cache


@dataclasses.dataclass
class Case:
    """What is compared: for each implementation the calls to rotate among. The first implementation is ours."""

    name: str
    moved: int  # bytes of one call; 0 where it is not memory that the time goes to
    calls: dict[str, list[Call]]
    in_graph: bool = True
    not_in_graph: tuple[str, ...] = ()  # implementations that wait for the device, and cannot be captured


def liger(module: str, name: str, function: Callable[[Any], Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """A function of Liger's as one more implementation, if it is installed."""
    try:
        return {"Liger": function(getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name))}
    except ImportError:
        return {}


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def case_of(
    name: str,
    shapes: Sequence[tuple[int, ...]],
    moved: int,
    functions: dict[str, Callable[..., Any]],
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """A case of functions of tensors, rotating among as many sets of arguments as keep the L2 cache cold."""
    arguments = [[random(*shape, dtype=dtype) for shape in shapes] for _ in range(sets_of_arguments(moved))]

    def call(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Call:
        return lambda: function(*tensors)

    return Case(name, moved, {n: [call(f, tensors) for tensors in arguments] for n, f in functions.items()})


def sets_of_arguments(moved: int) -> int:
    """How many sets of arguments of so many bytes keep the L2 cache cold."""
    l2: int = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    return max(2, min(256, -(-ROTATION_IN_L2 * l2 // moved)))
