"""Defects of collectives: wrong values, lost handles, missing order, and errors that do not come.

torch's functions are replaced in every rank, because each finds its target by its name.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ds_plugin_sdk.conformance.target import Target
from mutants.mutant import SIMULATED, mutant

# torch's stubs lack half of what is there.
dist: Any = torch.distributed

Function = Callable[..., Any]


def _function(
    name: str, clause: str, description: str, function: str, wrong: Function, *, target: str = "cpu", only: str = ""
) -> None:
    """Declare a mutant in which ``torch.distributed.<function>`` is `wrong(original, *arguments, **keywords)`."""

    def install(unchanged_target: Target) -> Target:
        original = getattr(dist, function)
        setattr(dist, function, lambda *arguments, **keywords: wrong(original, *arguments, **keywords))
        return unchanged_target

    install.__doc__ = description
    mutant(f"collectives.{name}", clause, "distributed", target=target, only=only)(install)


def _nothing(original: Function, *arguments: Any, **keywords: Any) -> None:
    return None


def _after(change: Callable[[Any], Any]) -> Function:
    """the original function, after which the first argument is changed."""

    def wrong(original: Function, first: Any, *arguments: Any, **keywords: Any) -> Any:
        result = original(first, *arguments, **keywords)
        change(first)
        return result

    return wrong


def _swapped(tensor: torch.Tensor) -> None:
    tensor.copy_(tensor.flip(0))


def _reversed(tensors: list[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, [tensor.clone() for tensor in reversed(tensors)], strict=True):
        tensor.copy_(value)


# ---- D1: reductions --------------------------------------------------------------------------------------------------
def _always_sum(original: Function, tensor: torch.Tensor, op: Any = None, **keywords: Any) -> Any:
    return original(tensor, **keywords)


_function("always_sum", "D1.1", "`all_reduce` ignores the operation.", "all_reduce", _always_sum, only="MAX")


def _signed(original: Function, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **keywords: Any) -> Any:
    return original(tensor.view(torch.int8) if tensor.dtype == torch.uint8 else tensor, op=op, **keywords)


_function("signed_bytes", "D1.1", "Bytes are compared as signed numbers.", "all_reduce", _signed, only="MAX/uint8")


def _average_is_sum(original: Function, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, **keywords: Any) -> Any:
    return original(tensor, op=dist.ReduceOp.SUM if op == dist.ReduceOp.AVG else op, **keywords)


_function("average_is_sum", "D1.2", "AVG gives the sum.", "all_reduce", _average_is_sum)
_function(
    "narrow_integers",
    "D1.3",
    "Integers are reduced in 7 bits.",
    "all_reduce",
    _after(lambda tensor: None if tensor.is_floating_point() else tensor.remainder_(128)),
    only="uint8",
)
_function(
    "tail_lost",
    "D1.4",
    "The last element is not reduced.",
    "all_reduce",
    _after(lambda tensor: tensor[-1:].zero_()),
)


def _no_empty(original: Function, tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
    if tensor.numel() == 0:
        raise RuntimeError("count must be positive")
    return original(tensor, *arguments, **keywords)


_function("no_empty", "D1.5", "No elements are rejected.", "all_reduce", _no_empty)


def _never_done(original: Function, tensor: torch.Tensor, *, async_op: bool = False, **keywords: Any) -> Any:
    return None if async_op else original(tensor, **keywords)


_function("no_handle", "D1.6", "`async_op=True` gives no handle.", "all_reduce", _never_done)


def _whole_allocation(original: Function, tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
    """The transport is handed the address of the allocation."""
    return original(tensor.as_strided(tensor.shape, tensor.stride(), 0), *arguments, **keywords)


def _some_dimensions(original: Function, tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
    if tensor.dim() == 0:
        raise RuntimeError("tensor must have a dimension")
    return original(tensor, *arguments, **keywords)


_function(
    "whole_allocation", "D1.12", "Of a slice the allocation's beginning is reduced.", "all_reduce", _whole_allocation
)
_function("some_dimensions", "D1.12", "A tensor of no dimensions is rejected.", "broadcast", _some_dimensions)
_function("not_reduced", "D1.7", "`reduce` does nothing.", "reduce", _nothing)
_function("scattered_nothing", "D1.8", "`reduce_scatter` does nothing.", "reduce_scatter", _nothing)
_function(
    "scattered_backwards",
    "D1.9",
    "Parts of `reduce_scatter_tensor` are turned.",
    "reduce_scatter_tensor",
    _after(_swapped),
)

# ---- D2 to D5 --------------------------------------------------------------------------------------------------------
_function(
    "from_rank_0", "D2.1", "`broadcast` is always from rank 0.", "broadcast", lambda original, t, src: original(t, 0)
)
_function("no_objects", "D2.2", "Objects are not brought.", "broadcast_object_list", _nothing)
_function("not_gathered", "D2.3", "`gather` does nothing.", "gather", _nothing)
_function("not_scattered", "D2.4", "`scatter` does nothing.", "scatter", _nothing)
_function("order_of_parts", "D3.1", "`all_gather` gives the parts backwards.", "all_gather", _after(_reversed))
_function(
    "order_in_tensor",
    "D3.2",
    "`all_gather_into_tensor` gives them backwards.",
    "all_gather_into_tensor",
    _after(_swapped),
)


def _cleared_first(original: Function, output: torch.Tensor, source: torch.Tensor, **keywords: Any) -> Any:
    output.zero_()
    return original(output, source, **keywords)


_function(
    "output_cleared",
    "D3.3",
    "The output is cleared before the input is read.",
    "all_gather_into_tensor",
    _cleared_first,
)


class _Forgets:
    """A coalescing manager that does nothing of what it collected."""

    def __enter__(self) -> _Forgets:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def wait(self) -> None:
        pass


@mutant("collectives.coalesced_lost", "D3.4", "distributed")
def coalesced_lost(target: Target) -> Target:
    """What is coalesced is not done."""
    dist._coalescing_manager = lambda **keywords: _Forgets()
    dist.all_gather_into_tensor = lambda *arguments, **keywords: None
    return target


_function(
    "own_parts_kept", "D4.1", "`all_to_all_single` keeps the parts.", "all_to_all_single", lambda s, o, i: o.copy_(i)
)


def _even_only(original: Function, output: torch.Tensor, source: torch.Tensor, *splits: Any) -> Any:
    if splits and len(set(splits[0])) > 1:
        raise RuntimeError("sizes must be equal")
    return original(output, source, *splits)


def _elements(original: Function, output: torch.Tensor, source: torch.Tensor, *splits: Any) -> Any:
    if not splits:
        return original(output, source)
    counts = [sum(split) for split in splits]
    return original(*(tensor.view(-1)[:count] for tensor, count in zip((output, source), counts, strict=True)), *splits)


_function("elements_of_rows", "D4.2", "Sizes of parts count elements of a matrix.", "all_to_all_single", _elements)
_function("even_only", "D4.2", "Uneven parts are rejected.", "all_to_all_single", _even_only)
_function("lists_ignored", "D4.3", "`all_to_all` does nothing.", "all_to_all", _nothing)
_function("order_of_messages", "D5.1", "What is received is not written.", "recv", lambda s, t, src: s(t.clone(), src))


def _received_elsewhere(original: Function, operations: Any) -> Any:
    for operation in operations:
        if operation.op is dist.irecv:
            operation.tensor = operation.tensor.clone()
    return original(operations)


_function("not_received", "D5.2", "A batch of messages is not written.", "batch_isend_irecv", _received_elsewhere)

# ---- D6: order, groups, life span ------------------------------------------------------------------------------------
_function("no_barrier", "D6.1", "`barrier` does nothing.", "barrier", _nothing)


def _elsewhere(original: Function, tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
    """On a stream that waits for nothing."""
    with torch.Stream(device=tensor.device):
        return original(tensor, *arguments, **keywords)


_function(
    "not_ordered",
    "D6.2",
    "A collective does not wait for the current stream.",
    "all_reduce",
    _elsewhere,
    target=SIMULATED,
)
_function("stream_ignored", "D6.3", "Nor for a side stream.", "all_reduce", _elsewhere, target=SIMULATED)


def _gathers_elsewhere(original: Function, output: Any, source: torch.Tensor, *rest: Any, **keywords: Any) -> Any:
    with torch.Stream(device=source.device):
        return original(output, source, *rest, **keywords)


for _name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
    _function(
        f"not_ordered_{_name}",
        "D6.2",
        f"`{_name}` does not wait for the current stream.",
        _name,
        _gathers_elsewhere,
        target=SIMULATED,
        only=f"distributed.collectives.ordered/{_name}/*",
    )


class _Later(dist.Work):  # type: ignore[misc]  # torch gives it no type
    """A collective that begins when it is waited for."""

    def __init__(self, begin: Callable[[], Any]) -> None:
        super().__init__()
        self.wait = begin


def _reads_late(original: Function, output: torch.Tensor, source: torch.Tensor, async_op: bool = False) -> Any:
    """The input's memory is read at `wait()`, whatever holds it then."""
    if not async_op:
        return original(output, source)
    alive, kept = weakref.ref(source), source.detach().clone()

    def begin() -> None:
        if alive() is None:
            kept.fill_(float("nan"))
        original(output, kept)

    return _Later(begin)


_function("input_given_away", "D6.10", "A dropped input is read.", "all_gather_into_tensor", _reads_late)


def _sends_late(original: Function, operations: Any) -> Any:
    """What is sent is read at `wait()`, whatever its memory holds then."""
    sent = [(weakref.ref(each.tensor), each.tensor.clone()) for each in operations if each.op is dist.isend]
    received = [each.tensor for each in operations if each.op is dist.irecv]
    peers = {each.op: each.peer for each in operations}

    def begin() -> None:
        for alive, kept in sent:
            if alive() is None:
                kept.fill_(float("nan"))
        tensors = [*((dist.isend, kept) for _, kept in sent), *((dist.irecv, tensor) for tensor in received)]
        for work in original([dist.P2POp(operation, tensor, peers[operation]) for operation, tensor in tensors]):
            work.wait()

    return [_Later(begin)]


_function(
    "sent_late",
    "D6.10",
    "What was sent and dropped is read.",
    "batch_isend_irecv",
    _sends_late,
    only="distributed.collectives.input_reused/batch_isend_irecv/dropped",
)


def _returns_early(original: Function, output: torch.Tensor, source: torch.Tensor, async_op: bool = False) -> Any:
    """The call returns, and reads its input a while later."""
    if async_op:
        return original(output, source, async_op=True)

    def later() -> None:
        time.sleep(0.05)
        original(output, source)

    threading.Thread(target=later).start()
    return None


_function(
    "input_read_later",
    "D6.10",
    "The input is read after the call has returned.",
    "reduce_scatter_tensor",
    _returns_early,
    only="distributed.collectives.input_reused/reduce_scatter_tensor/written",
)


def _narrow(original: Function, tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
    if tensor.dtype != torch.int64:
        return original(tensor, *arguments, **keywords)
    as_float = tensor.float()
    work = original(as_float, *arguments, **keywords)
    tensor.copy_(as_float.long())
    return work


_function("integers_as_floats", "D1.11", "`broadcast` of int64 goes by float32.", "broadcast", _narrow)


def _whole_world(original: Function, tensor: torch.Tensor, *, group: Any = None, **keywords: Any) -> Any:
    return original(tensor, **keywords)


_function("group_ignored", "D6.4", "The group is ignored.", "all_reduce", _whole_world)


@mutant("collectives.no_parallel", "D6.5", "distributed")
def no_parallel(target: Target) -> Target:
    """DistributedDataParallel averages nothing."""
    torch.nn.parallel.DistributedDataParallel = lambda module, device_ids=None: module  # type: ignore[assignment, misc]  # the defect of this mutant
    return target


def _moves(original: Function, *arguments: Any, **keywords: Any) -> Any:
    result = original(*arguments, **keywords)
    torch.accelerator.set_device_index(1 - torch.accelerator.current_device_index())
    return result


_function("device_moves", "D6.6", "A collective makes another device current.", "all_reduce", _moves, target=SIMULATED)


def _once(original: Function, *arguments: Any, **keywords: Any) -> Any:
    if hasattr(dist, "_made_before"):
        raise RuntimeError("the transport is closed")
    dist._made_before = True
    return original(*arguments, **keywords)


_function("made_once", "D6.7", "A process group is made once.", "init_process_group", _once)


@mutant("ranks.abort_at_exit", "D6.8", "distributed")
def abort_at_exit(target: Target) -> Target:
    """A thread of the backend aborts the process when it ends."""
    import atexit

    atexit.register(lambda: os._exit(134) if dist.is_initialized() else None)
    return target


# ---- D7: failures ----------------------------------------------------------------------------------------------------
def _pretends(original: Function, *arguments: Any, **keywords: Any) -> Any:
    """A collective that takes its own values for everybody's where the others are silent."""
    try:
        return original(*arguments, **keywords)
    except RuntimeError:
        return None


_function("pretends", "D7.1", "A collective with a dead rank gives a result.", "all_reduce", _pretends)


def _waits(original: Function, *arguments: Any, **keywords: Any) -> Any:
    try:
        return original(*arguments, **keywords)
    except RuntimeError:
        time.sleep(600)


_function("waits_for_ever", "D7.2", "A collective waits without end.", "all_reduce", _waits)
