"""The checks of arguments, on any device, and how they say what is wrong.

A check knows nothing of the op that it checks for: it raises `CheckError`, and `_library.op` adds the op's name.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

# What kernels handle, and float64, which only reference implementations handle.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

TensorLists = Mapping[str, Sequence[Tensor]]


class CheckError(Exception):
    """An argument does not fit: ``"<what is wrong>; expected <what was expected>"``, as kernels say it."""


def text(dtype: torch.dtype) -> str:
    """A dtype's name as messages have it."""
    return str(dtype).removeprefix("torch.")


# ---- single tensors --------------------------------------------------------------------------------------------------
def check_floating(name: str, tensor: Tensor) -> None:
    """Check that an argument has a dtype of `DTYPES`."""
    if tensor.dtype not in DTYPES:
        raise CheckError(f"{name} is {text(tensor.dtype)}; expected float32, bfloat16 or float16")


def check_first(name: str, tensor: Tensor) -> None:
    """Check the argument that decides on dtype and device: a dtype of `DTYPES`, and at least one dimension."""
    check_floating(name, tensor)
    if tensor.dim() == 0:
        raise CheckError(f"{name} has no dimensions; expected [..., columns]")


def check_other(name: str, tensor: Tensor | None, first: Tensor, shape: Sequence[int]) -> None:
    """Check another argument, unless it is None: the dtype and device of `first`, and a shape."""
    if tensor is None:
        return
    check_device(name, tensor, first)
    check_dtype(name, tensor, first.dtype)
    if tensor.shape != tuple(shape):
        raise CheckError(f"{name} has shape {list(tensor.shape)}; expected {list(shape)}")


def check_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Check that an argument has a dtype."""
    if tensor.dtype != dtype:
        raise CheckError(f"{name} is {text(tensor.dtype)}; expected {text(dtype)}")


def check_device(name: str, tensor: Tensor, first: Tensor) -> None:
    """Check that an argument is on the device of `first`."""
    if tensor.device != first.device:
        raise CheckError(f"{name} is on {tensor.device}; expected {first.device}, all tensors on one device")


def check_written(name: str, tensor: Tensor) -> None:
    """Check that no two elements of a tensor that is written share memory."""
    if _may_overlap_itself(tensor):
        raise CheckError(f"{name} has elements that share memory (is it expanded?); expected one element at each index")


# ---- lists of tensors ------------------------------------------------------------------------------------------------
def check_lists(lists: TensorLists) -> None:
    """Check the lists against each other, as far as that needs no data.

    The lists have one length; tensors at one index have one shape; a list has one dtype; all are on one device.

    Args:
        lists: the op's list arguments by name; the first sets length, shapes and device.
    """
    first_name, first = next(iter(lists.items()))
    for name, tensors in lists.items():
        if len(tensors) != len(first):
            raise CheckError(f"{name} has {len(tensors)} tensors; expected {len(first)}, as many as {first_name}")
        for i, (tensor, model) in enumerate(zip(tensors, first, strict=True)):
            if tensor.layout != torch.strided:
                raise CheckError(f"{name}[{i}] is not strided; expected a dense tensor")
            if tensor.dtype != tensors[0].dtype:
                raise CheckError(f"{name}[{i}] has another dtype than {name}[0]; expected {text(tensors[0].dtype)}")
            if tensor.device != first[0].device:
                raise CheckError(
                    f"{name}[{i}] is on another device than {first_name}[0]; expected all tensors on one",
                )
            if tensor.shape != model.shape:
                shape, expected = list(tensor.shape), list(model.shape)
                raise CheckError(f"{name}[{i}] has shape {shape}; expected {expected}, that of {first_name}[{i}]")


def check_dtypes(lists: TensorLists) -> None:
    """Check that gradients and states have the parameters' dtype or float32, and all states one.

    Args:
        lists: parameters, gradients and states, in this order.
    """
    if not all(lists.values()):
        return
    dtypes = {name: tensors[0].dtype for name, tensors in lists.items()}
    (params, param), _, *states = dtypes.items()
    if not param.is_floating_point:
        raise CheckError(f"{params} has a dtype that no kernel handles; expected a floating-point dtype")
    for name, dtype in dtypes.items():
        if dtype not in (param, torch.float32):
            raise CheckError(f"{name} are {text(dtype)}; expected {text(param)}, as {params}, or float32")
    for name, dtype in states:
        if dtype != states[0][1]:
            raise CheckError(f"{name} are {text(dtype)}; expected {text(states[0][1])}, as {states[0][0]}")


def check_memory(lists: TensorLists, written: Sequence[str]) -> None:
    """Check that no tensor that is written shares elements with itself or memory with another.

    Views with gaps are compared with themselves only: they can interleave without sharing an element.
    """
    blocks: list[tuple[int, int, bool, str]] = []  # begin and end address, written, label
    for name, tensors in lists.items():
        for i, tensor in enumerate(tensors):
            if tensor.numel() == 0:
                continue
            label = f"{name}[{i}]"
            if name in written:
                check_written(label, tensor)
            if _is_dense(tensor):
                begin = tensor.data_ptr()
                blocks.append((begin, begin + tensor.nbytes, name in written, label))
    furthest = written_furthest = (0, "")
    for begin, end, is_written, label in sorted(blocks, key=itemgetter(0)):
        before_end, before = furthest if is_written else written_furthest
        if begin < before_end:
            raise CheckError(f"{before} and {label} share memory; expected a tensor that is written to share none")
        furthest = max(furthest, (end, label))
        if is_written:
            written_furthest = max(written_furthest, (end, label))


def check_steps(steps: Sequence[int], tensors: int) -> None:
    """Check that there is one step number, or one a tensor, each at least 1."""
    if len(steps) not in (1, tensors):
        raise CheckError(f"steps has {len(steps)} entries; expected 1, or one per tensor ({tensors})")
    for step in steps:
        if step < 1:
            raise CheckError(f"steps has an entry {step}; expected at least 1: the first update is step 1")


def _dimensions(tensor: Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the dimensions of more than one element, the smallest stride first."""
    return sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in _dimensions(tensor):
        if stride != expected:
            return False
        expected *= size
    return True


def _may_overlap_itself(tensor: Tensor) -> bool:
    if 0 in tensor.shape:
        return False  # whatever its strides
    last = 0  # offset of the last element among the dimensions seen
    for stride, size in _dimensions(tensor):
        if stride <= last:
            return True
        last += stride * (size - 1)
    return False


def is_dtensor(x: Any) -> bool:
    """Whether something is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # nothing is one before that is imported, which takes long
    return module is not None and isinstance(x, module.DTensor)
