"""Every collective that DeepSpeed uses, on tensors of the device: one of two ranks.

Its arguments are the seconds after which a collective gives up, and a list, in JSON, of tasks with their parameters:
``[["all_reduce", {"op": "SUM"}], ...]``. It gives ``{"done": index}`` after each, or ``{"failure": ...}`` and ends, for
the ranks no longer agree on what comes next.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from ds_plugin_sdk import torch_threads
from ds_plugin_sdk.conformance.check import NonconformanceError, expect, expect_equal
from ds_plugin_sdk.conformance.programs import free_port, give
from ds_plugin_sdk.conformance.runtime.support import current_device_kept, slow_work
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.settings import settings

# torch's stubs lack half of what is there.
dist: Any = torch.distributed

# How long a rank is too late that does not come at all.
LATE_SECONDS = 120.0

Task = Callable[..., None]
_tasks: dict[str, Task] = {}


def _task(function: Task) -> Task:
    _tasks[function.__name__] = function
    return function


class _Rank:
    """What the tasks know of this process."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.other = 1 - self.rank
        self.device = target.accelerator.current_device_name()

    def tensor(self, *values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)

    @property
    def mine(self) -> torch.Tensor:
        """1 on rank 0, 2 on rank 1."""
        return self.tensor(self.rank + 1.0)


def _values(tensor: torch.Tensor) -> list[Any]:
    values: list[Any] = tensor.float().cpu().tolist()
    return values


# ---------------------------------------------------------------------------------------------------------- reductions
@_task
def all_reduce(it: _Rank, op: str, dtype: str = "") -> None:
    if dtype:
        _expect_largest_or_smallest(it, op, dtype)
        return
    values = it.tensor(it.rank + 1.0, -3.0 * (it.rank + 1), 0.5)
    expected = {"SUM": [3, -9, 1], "MAX": [2, -3, 0.5], "MIN": [1, -6, 0.5], "PRODUCT": [2, 18, 0.25]}[op]
    dist.all_reduce(values, op=getattr(dist.ReduceOp, op))
    expect_equal(_values(values), expected, f"all_reduce({op}) of [1, -3, 0.5] and [2, -6, 0.5]")


def _expect_largest_or_smallest(it: _Rank, op: str, dtype: str) -> None:
    """Of bytes, also of those that are negative numbers where they are read as signed."""
    each: list[list[float]] = [[1, 200, 5], [2, 100, 5]] if dtype == "uint8" else [[1, -3, 0.5], [2, -6, 0.5]]
    values = it.tensor(*each[it.rank], dtype=getattr(torch, dtype))
    dist.all_reduce(values, op=getattr(dist.ReduceOp, op))
    expected = [max(pair) if op == "MAX" else min(pair) for pair in zip(*each, strict=True)]
    expect_equal(_values(values), expected, f"all_reduce({op}) of {each[0]} and {each[1]} in {dtype}")


@_task
def all_reduce_average(it: _Rank) -> None:
    values, part = it.tensor(1.0 + it.rank, 4.0), it.tensor(0.0)
    source = values.clone()
    with contextlib.suppress(RuntimeError, ValueError):  # gloo has none, and says so
        dist.all_reduce(values, op=dist.ReduceOp.AVG)
        expect_equal(_values(values), [1.5, 4.0], "all_reduce(AVG) of [1, 4] and [2, 4]")
    with contextlib.suppress(RuntimeError, ValueError):
        dist.reduce_scatter_tensor(part, source, op=dist.ReduceOp.AVG)
        expect_equal(_values(part), [[1.5], [4.0]][it.rank], "reduce_scatter_tensor(AVG) of [1, 4] and [2, 4]")


@_task
def all_reduce_dtype(it: _Rank, dtype: str) -> None:
    values = it.tensor(1 + it.rank, 64, 0, dtype=getattr(torch, dtype))
    dist.all_reduce(values)
    expect_equal(_values(values), [3, 128, 0], f"all_reduce of [1, 64, 0] and [2, 64, 0] in {dtype}")
    expect_equal(str(values.dtype), f"torch.{dtype}", "its dtype")


@_task
def all_reduce_large(it: _Rank) -> None:
    count = 3_000_001  # more than any buffer, and no multiple of anything
    values = torch.arange(count, device=it.device).remainder_(997).float() * (it.rank + 1)
    dist.all_reduce(values)
    expected = torch.arange(count).remainder_(997).float() * 3
    wrong = int((values.cpu() != expected).sum())
    expect_equal(wrong, 0, f"wrong elements of {count} after all_reduce")


@_task
def large(it: _Rank, collective: str) -> None:
    count = 3_000_001
    mine = torch.arange(count, device=it.device).remainder_(997).float()
    part, host = mine + 1000 * it.rank, torch.arange(count).remainder_(997).float()
    if collective == "broadcast":
        dist.broadcast(part, 1)
        found, expected = part, host + 1000
    elif collective == "all_gather_into_tensor":
        found, expected = torch.zeros(2 * count, device=it.device), torch.cat([host, host + 1000])
        dist.all_gather_into_tensor(found, part)
    elif collective == "reduce_scatter_tensor":
        found, expected = torch.zeros(count, device=it.device), 2 * (host + 1000 * it.rank)
        dist.reduce_scatter_tensor(found, torch.cat([mine, mine + 1000]))
    elif collective == "all_to_all_single":
        both = torch.cat([part, part + 10_000])
        found = torch.zeros(2 * count, device=it.device)
        expected = torch.cat([host, host + 1000]) + 10_000 * it.rank
        dist.all_to_all_single(found, both)
    else:
        found, expected = part, host
        dist.send(part, 1) if it.rank == 0 else dist.recv(part, 0)
    wrong = int((found.cpu() != expected).sum())
    expect_equal(wrong, 0, f"wrong elements of {len(expected)} after {collective}")


@_task
def more_ranks(it: _Rank) -> None:
    """Of any number of ranks; a ring of two has no direction."""
    size, rank = it.size, it.rank
    numbers = [float(each) for each in range(size)]
    values = it.mine
    dist.all_reduce(values)
    expect_equal(_values(values), [sum(numbers) + size], f"all_reduce of {size} ranks")
    gathered = torch.zeros(2 * size, device=it.device)
    dist.all_gather_into_tensor(gathered, it.tensor(rank, rank + 100.0))
    expect_equal(_values(gathered), [each for n in numbers for each in (n, n + 100)], f"all_gather of {size} ranks")
    part = it.tensor(0.0)
    dist.reduce_scatter_tensor(part, it.tensor(*numbers) + 10.0 * rank)
    expect_equal(_values(part), [size * rank + 10 * sum(numbers)], f"reduce_scatter on rank {rank} of {size}")
    exchanged = torch.zeros(size, device=it.device)
    dist.all_to_all_single(exchanged, it.tensor(*numbers) + 10.0 * rank)
    expect_equal(_values(exchanged), [10 * n + rank for n in numbers], f"all_to_all_single on rank {rank} of {size}")
    for root in range(size):
        named = it.mine
        dist.broadcast(named, root)
        expect_equal(_values(named), [root + 1], f"broadcast from rank {root} of {size}")
    pair = dist.new_group([size - 2, size - 1])
    if rank >= size - 2:
        named = it.mine
        dist.broadcast(named, size - 1, group=pair)
        expect_equal(_values(named), [size], f"broadcast of the last two of {size} ranks")


@_task
def integers(it: _Rank) -> None:
    large, small = 2**40 + 3, -(2**33) - 1
    mine = torch.tensor([large + it.rank, small], device=it.device)
    for op, expected in ((dist.ReduceOp.SUM, [2 * large + 1, 2 * small]), (dist.ReduceOp.MAX, [large + 1, small])):
        reduced = mine.clone()
        dist.all_reduce(reduced, op=op)
        expect_equal(reduced.tolist(), expected, f"all_reduce({op}) of int64")
    named, gathered = mine.clone(), torch.zeros(4, dtype=torch.int64, device=it.device)
    dist.broadcast(named, 1)
    expect_equal(named.tolist(), [large + 1, small], "broadcast of int64")
    dist.all_gather_into_tensor(gathered, mine)
    expect_equal(gathered.tolist(), [large, small, large + 1, small], "all_gather_into_tensor of int64")


@_task
def parts(it: _Rank) -> None:
    """Slices, whose neighbours stay as they are, and numbers."""
    two = [(it.rank + 1.0) * each for each in (1, 10)]

    def flat(*values: float) -> torch.Tensor:
        return it.tensor(-1, *values, -1)

    reduced, named, scattered, gathered = flat(*two), flat(*two), flat(0), flat(0, 0, 0, 0)
    dist.all_reduce(reduced[1:3])
    dist.broadcast(named[1:3], 1)
    dist.reduce_scatter_tensor(scattered[1:2], flat(*two)[1:3])
    dist.all_gather_into_tensor(gathered[1:5], flat(*two)[1:3])
    expected = {
        "all_reduce": (reduced, [3, 30]),
        "broadcast": (named, [2, 20]),
        "reduce_scatter_tensor": (scattered, [[3], [30]][it.rank]),
        "all_gather_into_tensor": (gathered, [1, 10, 2, 20]),
    }
    for name, (values, right) in expected.items():
        expect_equal(_values(values), [-1, *right, -1], f"{name} of a slice, and the numbers beside it")
    number = it.tensor(it.rank + 1.0)[0].clone()
    dist.all_reduce(number)
    expect_equal(_values(number), 3, "all_reduce of a tensor of no dimensions")
    number = it.tensor(it.rank + 1.0)[0].clone()
    dist.broadcast(number, 1)
    expect_equal(_values(number), 2, "broadcast of a tensor of no dimensions")


@_task
def all_reduce_empty(it: _Rank) -> None:
    def nothing() -> torch.Tensor:
        return torch.empty(0, device=it.device)

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(nothing()),
        "broadcast": lambda: dist.broadcast(nothing(), 1),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(nothing(), nothing()),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(nothing(), nothing()),
        "all_to_all_single": lambda: dist.all_to_all_single(nothing(), nothing()),
    }
    for name, call in calls.items():
        call()
        values = it.mine
        dist.all_reduce(values)
        expect_equal(_values(values), [3], f"all_reduce after {name} of no elements")


@_task
def asynchronous(it: _Rank) -> None:
    first, second = it.mine, it.mine * 10
    third, fourth = it.mine * 100, it.mine * 1000
    late = [dist.all_reduce(values, async_op=True) for values in (third, fourth)]
    for work, values, expected_sum in zip(late[::-1], (fourth, third), (3000.0, 300.0), strict=True):
        work.wait()
        expect_equal(_values(values), [expected_sum], "an all_reduce after wait() of it, the last one first")
        work.wait()
    works = [dist.all_reduce(values, async_op=True) for values in (first, second)]
    for work in works:
        expect(work is not None, "all_reduce(async_op=True) gave None", why="expected a work handle")
        work.wait()
    expect_equal(_values(first) + _values(second), [3, 30], "two asynchronous all_reduce after wait()")
    it.target.accelerator.synchronize()
    expect_equal([bool(work.is_completed()) for work in works], [True, True], "is_completed() after wait()")
    gathered, scattered, sent = it.tensor(0.0, 0.0), it.tensor(0.0), it.tensor(0.0, 0.0)
    parts, exchanged = it.tensor(1.0, 10.0) * (it.rank + 1), it.tensor(1.0, 2.0) + 10 * it.rank
    named = it.tensor(5.0 + it.rank)
    calls: dict[str, tuple[Callable[[], Any], torch.Tensor, list[float]]] = {
        "all_gather_into_tensor": (
            lambda: dist.all_gather_into_tensor(gathered, it.mine, async_op=True),
            gathered,
            [1, 2],
        ),
        "reduce_scatter_tensor": (
            lambda: dist.reduce_scatter_tensor(scattered, parts, async_op=True),
            scattered,
            [[3.0], [30.0]][it.rank],
        ),
        "all_to_all_single": (
            lambda: dist.all_to_all_single(sent, exchanged, async_op=True),
            sent,
            [[1.0, 11.0], [2.0, 12.0]][it.rank],
        ),
        "broadcast": (lambda: dist.broadcast(named, 1, async_op=True), named, [6.0]),
    }
    for name, (call, result, expected) in calls.items():
        work = call()
        expect(work is not None, f"{name}(async_op=True) gave None", why="expected a work handle")
        work.wait()
        expect_equal(_values(result), expected, f"an asynchronous {name} after wait(), on rank {it.rank}")


@_task
def reduce(it: _Rank) -> None:
    for root in range(it.size):
        values = it.mine
        dist.reduce(values, root)
        if it.rank == root:
            expect_equal(_values(values), [3], f"reduce to rank {root}")


@_task
def reduce_scatter(it: _Rank) -> None:
    out = it.tensor(0.0)
    dist.reduce_scatter(out, [it.tensor(1.0 + it.rank), it.tensor(10.0 + it.rank)])
    expect_equal(_values(out), [[3.0], [21.0]][it.rank], f"reduce_scatter on rank {it.rank}")


@_task
def reduce_scatter_tensor(it: _Rank, dtype: str) -> None:
    out = torch.zeros(2, dtype=getattr(torch, dtype), device=it.device)
    source = it.tensor(1, 2, 3, 4, dtype=getattr(torch, dtype)) * (it.rank + 1)
    dist.reduce_scatter_tensor(out, source)
    expect_equal(_values(out), [[3.0, 6.0], [9.0, 12.0]][it.rank], f"reduce_scatter_tensor in {dtype}, rank {it.rank}")
    row = torch.zeros(1, 2, dtype=getattr(torch, dtype), device=it.device)
    dist.reduce_scatter_tensor(row, source.view(2, 2))
    rows = [[[3.0, 6.0]], [[9.0, 12.0]]][it.rank]
    expect_equal(_values(row), rows, f"reduce_scatter_tensor of a matrix in {dtype}, rank {it.rank}")


# ---------------------------------------------------------------------------------------- broadcast, gather and scatter
@_task
def broadcast(it: _Rank, dtype: str) -> None:
    for root in range(it.size):
        values = it.tensor(5 * it.rank + 1, 7, dtype=getattr(torch, dtype))
        dist.broadcast(values, root)
        expect_equal(_values(values), [5 * root + 1, 7], f"broadcast of {dtype} from rank {root}")


@_task
def objects(it: _Rank) -> None:
    for root in (1, 0):
        sent = [{"rank": root, "name": "one"}, "x" * 300_000]
        named = sent if it.rank == root else [None, None]
        dist.broadcast_object_list(named, root)
        expect(named == sent, f"broadcast_object_list from rank {root} brought something else than was sent")
    gathered = [None] * it.size
    dist.all_gather_object(gathered, {"rank": it.rank})
    expect_equal(gathered, [{"rank": 0}, {"rank": 1}], "all_gather_object")


@_task
def gather(it: _Rank) -> None:
    for root in (1, 0):
        parts = [it.tensor(0.0) for _ in range(it.size)] if it.rank == root else None
        dist.gather(it.mine, parts, root)
        if parts is not None:
            expect_equal([_values(part) for part in parts], [[1], [2]], f"gather to rank {root}")


@_task
def scatter(it: _Rank) -> None:
    for root in (1, 0):
        out = it.tensor(0.0)
        dist.scatter(out, [it.tensor(5.0), it.tensor(6.0)] if it.rank == root else None, root)
        expect_equal(_values(out), [5.0 + it.rank], f"scatter from rank {root}, on rank {it.rank}")


@_task
def all_gather(it: _Rank) -> None:
    parts = [it.tensor(0.0, 0.0) for _ in range(it.size)]
    dist.all_gather(parts, it.tensor(it.rank, it.rank + 10.0))
    expect_equal([_values(part) for part in parts], [[0, 10], [1, 11]], "all_gather")


@_task
def all_gather_into_tensor(it: _Rank, dtype: str) -> None:
    out = torch.zeros(4, dtype=getattr(torch, dtype), device=it.device)
    dist.all_gather_into_tensor(out, it.tensor(it.rank + 1, it.rank + 10, dtype=getattr(torch, dtype)))
    expect_equal(_values(out), [1, 10, 2, 11], f"all_gather_into_tensor in {dtype}")
    mine = it.tensor(*range(4), dtype=getattr(torch, dtype)).view(2, 2) + 10 * it.rank
    rows = torch.zeros(4, 2, dtype=mine.dtype, device=it.device)
    dist.all_gather_into_tensor(rows, mine)
    expect_equal(_values(rows), [[0, 1], [2, 3], [10, 11], [12, 13]], f"all_gather_into_tensor of matrices in {dtype}")


@_task
def all_gather_in_place(it: _Rank) -> None:
    flat = torch.zeros(4, device=it.device)
    mine = flat.narrow(0, 2 * it.rank, 2)
    mine.fill_(it.rank + 1.0)
    dist.all_gather_into_tensor(flat, mine)
    expect_equal(_values(flat), [1, 1, 2, 2], "all_gather_into_tensor from a part of its output")


@_task
def coalesced(it: _Rank) -> None:
    outs = [torch.zeros(2, device=it.device) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        context = dist._coalescing_manager(device=torch.device(it.device), async_ops=True)
        try:
            manager = stack.enter_context(context)
        except RuntimeError:  # gloo has none, and says so; torch would otherwise collect what shall be coalesced
            dist.distributed_c10d._world.pg_coalesce_state.clear()
            return
        for index, out in enumerate(outs):
            dist.all_gather_into_tensor(out, it.tensor(it.rank + 10.0 * index))
    manager.wait()
    expect_equal([_values(out) for out in outs], [[0, 1], [10, 11], [20, 21]], "three coalesced all_gather_into_tensor")


# ------------------------------------------------------------------------------------------- all to all, point to point
@_task
def all_to_all_single(it: _Rank) -> None:
    out = torch.zeros(4, device=it.device)
    dist.all_to_all_single(out, it.tensor(1, 2, 3, 4) + 10 * it.rank)
    expect_equal(_values(out), [[1, 2, 11, 12], [3, 4, 13, 14]][it.rank], f"all_to_all_single on rank {it.rank}")


@_task
def all_to_all_uneven(it: _Rank) -> None:
    out = torch.zeros([3, 1][it.rank], device=it.device)
    source = [it.tensor(1, 2), it.tensor(3, 4)][it.rank]
    dist.all_to_all_single(out, source, [[1, 2], [1, 0]][it.rank], [[1, 1], [2, 0]][it.rank])
    expect_equal(_values(out), [[1, 3, 4], [2]][it.rank], f"all_to_all_single with uneven splits on rank {it.rank}")
    rows = torch.zeros(len(out), 3, device=it.device)
    of_each = it.tensor(1, 10, 100)  # what a row's columns are multiplied by
    dist.all_to_all_single(rows, source.unsqueeze(1) * of_each, [[1, 2], [1, 0]][it.rank], [[1, 1], [2, 0]][it.rank])
    expected = [[value, 10 * value, 100 * value] for value in [[1, 3, 4], [2]][it.rank]]
    expect_equal(_values(rows), expected, f"all_to_all_single of uneven numbers of rows on rank {it.rank}")


@_task
def all_to_all(it: _Rank) -> None:
    parts = [it.tensor(0.0), it.tensor(0.0)]
    dist.all_to_all(parts, [it.tensor(2.0 * it.rank), it.tensor(2.0 * it.rank + 1)])
    expect_equal([_values(part) for part in parts], [[it.rank], [it.rank + 2]], f"all_to_all on rank {it.rank}")


@_task
def send_and_receive(it: _Rank) -> None:
    if it.rank == 0:
        dist.send(it.tensor(7.0), 1)
        dist.send(it.tensor(8.0), 1)
        return
    got = it.tensor(0.0)
    for expected in (7, 8):
        dist.recv(got, 0)
        expect_equal(_values(got), [expected], "a value received from rank 0")


@_task
def both_ways(it: _Rank) -> None:
    got = it.tensor(0.0)
    sent = it.mine
    operations = [dist.P2POp(dist.isend, sent, it.other), dist.P2POp(dist.irecv, got, it.other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    expect_equal(_values(got), [it.other + 1], "what batch_isend_irecv brought")
    work = dist.isend(sent, it.other) if it.rank == 0 else dist.irecv(got.zero_(), it.other)
    work.wait()
    if it.rank == 1:
        expect_equal(_values(got), [1], "what irecv brought")


# -------------------------------------------------------------------------------------------------- groups and ordering
@_task
def barrier(it: _Rank) -> None:
    dist.barrier()
    begin = time.perf_counter()
    if it.rank == 1:
        time.sleep(1.5)  # a busy machine lets the other begin to count up to a second after the first barrier
    dist.barrier()
    it.target.accelerator.synchronize()
    waited = time.perf_counter() - begin
    expect(waited > 0.4, f"rank {it.rank} left a barrier after {waited:.2f} s", why="the other entered after 1.5 s")


@_task
def groups(it: _Rank) -> None:
    alone = [dist.new_group([rank]) for rank in range(it.size)]
    both = dist.new_group([1, 0])
    values = it.mine
    dist.all_reduce(values, group=alone[it.rank])
    expect_equal(_values(values), [it.rank + 1], "all_reduce in a group of this rank alone")
    dist.all_reduce(values, group=both)
    expect_equal(_values(values), [3], "all_reduce in a second group of both ranks")
    _in_group_of_one(it, alone[it.rank])
    for group in (both, *alone):
        if dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)


def _in_group_of_one(it: _Rank, group: Any) -> None:
    """Ranks are named by their number among all, and stand in a group by their place in it, which is the first here."""
    mine, who = it.tensor(it.rank + 1.0, 7.0), f"in a group of rank {it.rank} alone"
    calls: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
        "broadcast": lambda out, own: dist.broadcast(out.copy_(own), it.rank, group=group),
        "reduce": lambda out, own: dist.reduce(out.copy_(own), it.rank, group=group),
        "all_gather": lambda out, own: dist.all_gather([out], own, group=group),
        "gather": lambda out, own: dist.gather(own, [out], it.rank, group=group),
        "scatter": lambda out, own: dist.scatter(out, [own], it.rank, group=group),
        "all_gather_into_tensor": lambda out, own: dist.all_gather_into_tensor(out, own, group=group),
        "reduce_scatter_tensor": lambda out, own: dist.reduce_scatter_tensor(out, own, group=group),
        "all_to_all_single": lambda out, own: dist.all_to_all_single(out, own, group=group),
    }
    for name, call in calls.items():
        memory = it.tensor(*[0.0] * 6)
        call(memory[2:4], mine)
        expect_equal(_values(memory), [0, 0, it.rank + 1, 7, 0, 0], f"{name} {who}, and the numbers beside it")
    expect_equal((dist.get_rank(group), dist.get_world_size(group)), (0, 1), f"rank and size {who}")


_PART = 1 << 10


class _Call:
    """A collective whose input is as many times `_PART` numbers as there are ranks, 1 on rank 0 and 2 on rank 1.

    Attributes:
        source: its input.
        result: its output, which of some is the input.
        expected: what the output is to be, on the host.
    """

    def __init__(self, it: _Rank, collective: str) -> None:
        self.collective, self.other = collective, it.other
        self.source = torch.zeros(2 * _PART, device=it.device)
        numbers: dict[str, list[float]] = {
            "all_reduce": [3, 3],
            "broadcast": [2, 2],
            "all_gather_into_tensor": [1, 1, 2, 2],
            "reduce_scatter_tensor": [3],
            "all_to_all_single": [1, 2],
            "batch_isend_irecv": [1.0 + it.other] * 2,
        }
        self.expected = torch.tensor(numbers[collective]).repeat_interleave(_PART)
        in_place = collective in ("all_reduce", "broadcast")
        self.result = self.source if in_place else torch.zeros(len(self.expected), device=it.device)

    def start(self, asynchronous: bool) -> list[Any]:
        """Make the call; what is to be waited for."""
        function = getattr(dist, self.collective)
        if self.collective == "batch_isend_irecv":
            tensors = ((dist.isend, self.source), (dist.irecv, self.result))
            works: list[Any] = function([dist.P2POp(operation, tensor, self.other) for operation, tensor in tensors])
            return works
        arguments = {"all_reduce": (self.source,), "broadcast": (self.source, 1)}
        work = function(*arguments.get(self.collective, (self.result, self.source)), async_op=asynchronous)
        return [work] if asynchronous else []

    def __call__(self, asynchronous: bool) -> None:
        for work in self.start(asynchronous):
            work.wait()

    def expect(self, right: torch.Tensor, how: str) -> None:
        """Expect these numbers of the result, and name the worst of each part if they are others."""
        seen = self.result.cpu()
        worst = (seen - right).abs().nan_to_num(float("inf")).view(-1, _PART).argmax(1)
        found, wanted = (
            tensor.view(-1, _PART).gather(1, worst[:, None]).flatten().tolist() for tensor in (seen, right)
        )
        expect(torch.equal(seen, right), f"{self.collective} {how}: {found}", why=f"expected {wanted}")


@_task
def ordered(it: _Rank, collective: str, by: str) -> None:
    call = _Call(it, collective)
    it.target.accelerator.synchronize()
    with slow_work(it.target) as keep_busy:
        keep_busy()
        call.source.fill_(1.0 + it.rank)
        call(by == "wait")
        call.result.mul_(2)
        call.expect(2 * call.expected, "of values filled on the current stream, doubled there")


@_task
def on_a_side_stream(it: _Rank, collective: str) -> None:
    accelerator = it.target.accelerator
    call, side = _Call(it, collective), accelerator.Stream()
    accelerator.synchronize()
    with slow_work(it.target) as keep_busy:
        keep_busy()
        call.source.fill_(1.0 + it.rank)
        side.wait_stream(accelerator.current_stream())
        with accelerator.stream(side):
            call(False)
        accelerator.current_stream().wait_stream(side)
        call.expect(call.expected, "on a side stream, as ZeRO overlaps")


@_task
def input_reused(it: _Rank, collective: str, how: str) -> None:
    call = _Call(it, collective)
    call.source.fill_(1.0 + it.rank)
    it.target.accelerator.synchronize()
    dist.barrier()
    if it.rank == 1:
        time.sleep(0.3)  # the other has begun, and may have read none of it
    if how == "written":
        call(False)
        call.source.fill_(float("nan"))
    else:
        works = call.start(True)
        del call.source
        others = [torch.full((2 * _PART,), float("nan"), device=it.device) for _ in range(3)]
        for work in works:
            work.wait()
        del others
    call.expect(call.expected, f"whose input was {how} after the call")


@_task
def parallel_module(it: _Rank) -> None:
    torch.manual_seed(0)
    layer, twin = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    twin.load_state_dict(layer.state_dict())
    ids = None if torch.device(it.device).index is None else [torch.device(it.device).index]
    parallel = torch.nn.parallel.DistributedDataParallel(layer.to(it.device), device_ids=ids)
    x = torch.arange(8.0).view(2, 4) / 8
    torch.autograd.backward(parallel(x[it.rank : it.rank + 1].to(it.device)).square().mean())
    torch.autograd.backward(twin(x).square().mean())
    assert layer.weight.grad is not None
    assert twin.weight.grad is not None
    worst = float((layer.weight.grad.cpu() - twin.weight.grad).abs().max())
    expect(worst < 1e-5, f"gradients of DistributedDataParallel are off by {worst:g}", why="expected the mean of both")


@_task
def device_kept(it: _Rank) -> None:
    with current_device_kept(it.target):
        before = it.target.accelerator.current_device_name()
        dist.all_reduce(it.mine)
        after = it.target.accelerator.current_device_name()
    expect_equal(after, before, "current_device_name() after a collective")


@_task
def again(it: _Rank) -> None:
    # At another port: a rank that is quicker would find the store that is about to end.
    port = [free_port() if it.rank == 0 else None]
    dist.broadcast_object_list(port, 0)
    dist.destroy_process_group()
    backend = it.target.accelerator.communication_backend_name()
    dist.init_process_group(backend, f"tcp://127.0.0.1:{port[0]}", rank=it.rank, world_size=it.size)
    values = it.mine
    dist.all_reduce(values)
    expect_equal(_values(values), [3], "all_reduce after the process group was destroyed and made again")


# ------------------------------------------------------------------------------------------------------------- failures
@_task
def a_rank_dies(it: _Rank) -> None:
    if it.rank == 1:
        os._exit(0)  # without a word, as when the system kills it
    time.sleep(0.5)
    values = it.mine
    dist.all_reduce(values)
    it.target.accelerator.synchronize()
    expect(False, f"all_reduce with a rank that died gave {_values(values)}", why="expected an error")


@_task
def a_rank_is_late(it: _Rank) -> None:
    if it.rank == 1:
        time.sleep(LATE_SECONDS)
        os._exit(0)
    values = it.mine
    dist.all_reduce(values)
    it.target.accelerator.synchronize()
    expect(False, f"all_reduce with a rank that did not come gave {_values(values)}", why="expected an error")


@_task
def ends_by_itself(it: _Rank) -> None:
    values = it.mine
    dist.all_reduce(values)
    expect_equal(_values(values), [3], "all_reduce")


def main() -> None:
    target = Target.find(sys.argv[1])
    patience, tasks = float(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    target.accelerator.set_device(settings.local_rank)
    backend = target.accelerator.communication_backend_name()
    dist.init_process_group(backend, timeout=timedelta(seconds=patience))
    torch_threads.wait_at_exit()  # as in a program with DeepSpeed
    it = _Rank(target)
    for index, (name, parameters) in enumerate(tasks):
        try:
            _tasks[name](it, **parameters)
        except Exception as error:
            traceback.print_exc()
            own = isinstance(error, NonconformanceError)
            give({"failure": str(error) if own else f"{type(error).__name__}: {error}", "own": own})
            sys.stdout.flush()
            os._exit(1)  # threads of the backend may wait for the other rank for ever
        give({"done": index})
    if [name for name, _ in tasks] != ["ends_by_itself"]:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
