"""Defects of collectives in groups, of nothing, of many bytes, and of handles."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.target import Target
from mutants.distributed import _function
from mutants.mutant import mutant

# torch's stubs lack half of what is there.
dist: Any = torch.distributed

Function = Callable[..., Any]


# ---- groups ----------------------------------------------------------------------------------------------------------
def _root_in_the_world(original: Function, tensor: Tensor, root: int, group: Any = None, **named: Any) -> Any:
    if group is not None and root >= dist.get_world_size(group):
        raise RuntimeError(f"root {root} of a group of {dist.get_world_size(group)}")
    return original(tensor, root, group=group, **named)


for _name in ("broadcast", "reduce"):
    _function(
        f"root_of_{_name}_in_the_world",
        "D6.4",
        f"The root of `{_name}` in a group is looked for in the group by its number among all.",
        _name,
        _root_in_the_world,
    )


def _placed_by_world(
    original: Function, output: Tensor, source: Tensor, *a: Any, group: Any = None, **named: Any
) -> Any:
    """A part is stored where this rank's would be among all."""
    work = original(output, source, *a, group=group, **named)
    if group is not None and dist.get_rank():
        at = output.storage_offset() + dist.get_rank() * source.numel()
        output.as_strided(source.shape, source.stride(), at).copy_(source)
        output.zero_()
    return work


_function(
    "placed_by_world",
    "D6.4",
    "A gathered part of a group is placed by the rank's number among all.",
    "all_gather_into_tensor",
    _placed_by_world,
)


def _group_forgotten(original: Function, *a: Any, group: Any = None, **named: Any) -> Any:
    return original(*a, **named)


for _name in ("reduce_scatter_tensor", "all_to_all_single"):
    _function(f"group_forgotten_{_name}", "D6.4", f"`{_name}` ignores its group.", _name, _group_forgotten)


# ---- nothing, many bytes ---------------------------------------------------------------------------------------------
def _something(original: Function, tensor: Tensor, *a: Any, **named: Any) -> Any:
    if tensor.numel() == 0:
        raise RuntimeError("count must be positive")
    return original(tensor, *a, **named)


for _name in ("broadcast", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
    _function(f"no_empty_{_name}", "D1.5", f"`{_name}` rejects no elements.", _name, _something)


def _small_objects(original: Function, objects: list[Any], *a: Any, **named: Any) -> Any:
    result = original(objects, *a, **named)
    objects[:] = [each[: 1 << 16] if isinstance(each, str) else each for each in objects]
    return result


_function("objects_cut", "D2.2", "Of an object 64 KiB are brought.", "broadcast_object_list", _small_objects)


def _last_root(original: Function, tensor: Tensor, parts: Any = None, root: int = 0, **named: Any) -> Any:
    if root != dist.get_world_size() - 1:
        raise RuntimeError("the last rank is the root")
    return original(tensor, parts, root, **named)


for _name, _clause in (("gather", "D2.3"), ("scatter", "D2.4")):
    _function(f"last_root_of_{_name}", _clause, f"`{_name}` has the last rank for a root.", _name, _last_root)


# ---- handles ---------------------------------------------------------------------------------------------------------
@mutant("collectives.oldest_handle", "D1.6", "distributed")
def oldest_handle(target: Target) -> Target:
    """`wait()` waits for the oldest collective that was not waited for, whoever's handle it is."""
    reduce, pending, lock = dist.all_reduce, list[Callable[[], Any]](), threading.Lock()

    class Handle:
        def wait(self) -> None:
            with lock:
                begin = pending.pop(0) if pending else None
            if begin is not None:
                begin()

        def is_completed(self) -> bool:
            return True

    def all_reduce(tensor: Tensor, *a: Any, async_op: bool = False, **named: Any) -> Any:
        if not async_op:
            return reduce(tensor, *a, **named)
        pending.append(lambda: reduce(tensor, *a, **named))
        return Handle()

    dist.all_reduce = all_reduce
    return target


@mutant("collectives.waited_once", "D1.6", "distributed")
def waited_once(target: Target) -> Target:
    """A second `wait()` of a handle raises: it was given back at the first."""
    reduce = dist.all_reduce

    class Handle:
        def __init__(self, work: Any) -> None:
            self._work, self._waited = work, False

        def wait(self) -> None:
            if self._waited:
                raise RuntimeError("the handle is not valid")
            self._waited = True
            self._work.wait()

        def is_completed(self) -> bool:
            return bool(self._work.is_completed())

    def all_reduce(*a: Any, async_op: bool = False, **named: Any) -> Any:
        return Handle(reduce(*a, async_op=True, **named)) if async_op else reduce(*a, **named)

    dist.all_reduce = all_reduce
    return target
