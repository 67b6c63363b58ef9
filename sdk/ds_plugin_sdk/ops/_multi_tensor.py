"""What ops over lists of tensors (optimizer steps) have in common: the checks, on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ds_plugin_sdk.ops._library import invalid

TensorLists = Mapping[str, Sequence[Tensor]]


def check_lists(op: str, lists: TensorLists) -> None:
    """Check the lists against each other, as far as that needs no data.

    The lists have one length; tensors at one index have one shape; a list has one dtype; all are on one device.

    Args:
        op: name for messages.
        lists: the op's list arguments by name; the first sets length, shapes and device.

    Raises:
        InvalidTensorError: they do not; the message names the argument and what was expected.
    """
    first_name, first = next(iter(lists.items()))
    for name, tensors in lists.items():
        if len(tensors) != len(first):
            raise invalid(op, f"{name} has {len(tensors)} tensors; expected {len(first)}, as many as {first_name}")
        for i, (tensor, model) in enumerate(zip(tensors, first, strict=True)):
            if tensor.layout != torch.strided:
                raise invalid(op, f"{name}[{i}] is not strided; expected a dense tensor")
            if tensor.dtype != tensors[0].dtype:
                raise invalid(op, f"{name}[{i}] has another dtype than {name}[0]; expected {text(tensors[0].dtype)}")
            if tensor.device != first[0].device:
                raise invalid(
                    op,
                    f"{name}[{i}] is on another device than {first_name}[0]; expected all tensors on one",
                )
            if tensor.shape != model.shape:
                shape, expected = list(tensor.shape), list(model.shape)
                raise invalid(op, f"{name}[{i}] has shape {shape}; expected {expected}, that of {first_name}[{i}]")


def check_dtypes(op: str, lists: TensorLists) -> None:
    """Check that gradients and states have the parameters' dtype or float32, and all states one.

    Args:
        op: name for messages.
        lists: parameters, gradients and states, in this order.

    Raises:
        InvalidTensorError: they do not.
    """
    if not all(lists.values()):
        return
    dtypes = {name: tensors[0].dtype for name, tensors in lists.items()}
    (params, param), _, *states = dtypes.items()
    if not param.is_floating_point:
        raise invalid(op, f"{params} has a dtype that no kernel handles; expected a floating-point dtype")
    for name, dtype in dtypes.items():
        if dtype not in (param, torch.float32):
            raise invalid(op, f"{name} are {text(dtype)}; expected {text(param)}, as {params}, or float32")
    for name, dtype in states:
        if dtype != states[0][1]:
            raise invalid(op, f"{name} are {text(dtype)}; expected {text(states[0][1])}, as {states[0][0]}")


def check_memory(op: str, lists: TensorLists, written: Sequence[str]) -> None:
    """Check that no tensor that is written shares elements with itself or memory with another.

    Views with gaps are compared with themselves only: they can interleave without sharing an element.

    Raises:
        InvalidTensorError: two do; the message names them.
    """
    blocks: list[tuple[int, int, bool, str]] = []  # begin and end address, written, label
    for name, tensors in lists.items():
        for i, tensor in enumerate(tensors):
            if tensor.numel() == 0:
                continue
            if name in written and _may_overlap_itself(tensor):
                raise invalid(
                    op,
                    f"{name}[{i}] has elements that share memory (is it expanded?); expected one element at each index",
                )
            if _is_dense(tensor):
                begin = tensor.data_ptr()
                blocks.append((begin, begin + tensor.nbytes, name in written, f"{name}[{i}]"))
    furthest = written_furthest = (0, "")
    for begin, end, is_written, label in sorted(blocks, key=itemgetter(0)):
        before_end, before = furthest if is_written else written_furthest
        if begin < before_end:
            raise invalid(op, f"{before} and {label} share memory; expected a tensor that is written to share none")
        furthest = max(furthest, (end, label))
        if is_written:
            written_furthest = max(written_furthest, (end, label))


def check_steps(op: str, steps: Sequence[int], tensors: int) -> None:
    """Check that there is one step number, or one a tensor, each at least 1.

    Raises:
        InvalidTensorError: otherwise.
    """
    if len(steps) not in (1, tensors):
        raise invalid(op, f"steps has {len(steps)} entries; expected 1, or one per tensor ({tensors})")
    for step in steps:
        if step < 1:
            raise invalid(op, f"steps has an entry {step}; expected at least 1: the first update is step 1")


def one_each(steps: Sequence[int], tensors: int) -> Sequence[int]:
    """The step number of each tensor."""
    return steps if len(steps) == tensors else [steps[0]] * tensors


def mark_modified(*lists: Sequence[Tensor]) -> None:
    """Let autograd notice what a kernel wrote behind its back."""
    if not torch.compiler.is_compiling():  # there the op's schema says it
        for tensors in lists:
            increment_version(tensors)


def text(dtype: torch.dtype) -> str:
    """A dtype's name as messages have it."""
    return str(dtype).removeprefix("torch.")


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
    last = 0  # offset of the last element among the dimensions seen
    for stride, size in _dimensions(tensor):
        if stride <= last:
            return True
        last += stride * (size - 1)
    return False
