"""Collectives of the device: tensors are staged on the host, where torch's gloo does the work.

A vendor replaces it method by method with calls of their own library, or as a whole; until then it has every collective
that torch.distributed offers. It is synchronous: when a call returns, its result is there, but for `irecv`.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

# torch's stubs lack half of what is there, and their signatures are those of the callers, not of the backends.
dist: Any = torch.distributed
c10d: Any = torch._C._distributed_c10d

# Tensors, lists of tensors, lists of lists of them.
Tensors = Any
Work = Any


def register(backend: str, device_type: str, group: type[StagedProcessGroup] | None = None) -> None:
    """Make ``init_process_group(backend)`` and the device's default backend known to torch.distributed.

    Args:
        backend: the name, as ``zapccl``.
        device_type: torch's name of the device.
        group: a vendor's class on `StagedProcessGroup`, whose methods call the vendor's library.
    """

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> StagedProcessGroup:
        made = (group or StagedProcessGroup)(store, rank, size, timeout, backend)
        if (gloo := getattr(made, "_gloo", None)) is not None:  # a vendor's group may do without
            # What torch asks of a group's backends, such as for which devices there are any, is answered by gloo's.
            kind = dist.ProcessGroup.BackendType.GLOO
            for device in (device_type, "cpu"):
                made._register_backend(torch.device(device), kind, gloo)
            made._set_default_backend(kind)
        return made

    dist.Backend.register_backend(backend, create, devices=[device_type, "cpu"])
    atexit.register(_destroy, backend)


def _destroy(backend: str) -> None:
    """gloo's threads abort the process if they are still there when it ends."""
    if dist.is_initialized() and dist.get_backend() == backend:
        dist.destroy_process_group()


class Done(dist.Work):  # type: ignore[misc]  # torch gives it no type
    """What is done, with results in the host's memory. What torch makes of a future takes no limit of time to wait."""

    def __init__(self, results: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self._results = list(results)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._results

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future


class _Received(Done):
    """A receive that is done. gloo's own would wait for one more message each time it is waited for."""

    def __init__(self, source: int) -> None:
        super().__init__()
        self._source = source

    def _source_rank(self) -> int:
        return self._source


class _Receiving(_Received):
    """A receive under way: what came is in the tensors once it was waited for."""

    def __init__(self, source: int, work: Work, tensors: Tensors, staged: Tensors) -> None:
        super().__init__(source)
        self._under_way: Work | None = work
        self._copies = list(zip(_flat(tensors), _flat(staged), strict=True))

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._under_way is not None:
            self._under_way.wait(*([] if timeout is None else [timeout]))
            self._under_way = None
            _copy_back(self._copies)
        return True

    def is_completed(self) -> bool:
        return self._under_way is None

    is_success = is_completed


def done(tensors: list[torch.Tensor]) -> Work:
    """What a collective returns that is done, or is in its devices' current streams, with the future that
    DistributedDataParallel wants.
    """
    devices = list({tensor.device for tensor in tensors if tensor.device.type != "cpu"})
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]  # torch takes devices, too
    future.set_result(tensors)
    return c10d._create_work_from_future(future)


def _map(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`function` of every tensor in nested lists; all else as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return [_map(function, item) for item in value] if isinstance(value, (list, tuple)) else value


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _copy_back(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give each tensor what its host copy has, unless that is its own memory."""
    for result, host in copies:
        if result is not host and result.data_ptr() != host.data_ptr():
            result.detach().copy_(host)


def _flat(value: Tensors) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _map(lambda tensor: found.append(tensor) or tensor, value)  # type: ignore[func-returns-value]  # append gives None, and so the tensor
    return found


class _Gloo(dist.ProcessGroupGloo):  # type: ignore[misc]  # torch gives it no type
    """gloo within a group. Its own communicator can be split from torch 2.15 on; the group would not be."""

    supports_splitting = False


class StagedProcessGroup(dist.ProcessGroup):  # type: ignore[misc]  # torch gives it no type
    """A process group over gloo for tensors of any device.

    Method names and arguments are torch's; both the names before torch 2.13 and those from then on are there.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, backend: str) -> None:
        super().__init__(rank, size)
        self._gloo = _Gloo(store, rank, size, timeout)
        self._backend = backend
        self._name = self._description = ""

    def _run(self, name: str, outputs: Tensors, *inputs: Any) -> Work:
        """Call gloo's `name` on host copies, and copy back its first argument, where all outputs are.

        Inputs may be views of outputs, so outputs are copied in as well.
        """
        options: Any = inputs[-1]
        average = getattr(options, "reduceOp", None) == dist.ReduceOp.AVG  # gloo has none
        staged = _map(_on_host, outputs)
        try:
            if average:
                options.reduceOp = dist.ReduceOp.SUM
            getattr(self._gloo, name)(staged, *(_map(_on_host, value) for value in inputs)).wait()
        finally:
            if average:
                options.reduceOp = dist.ReduceOp.AVG
        results = _flat(outputs)
        for host in _flat(staged) if average else []:
            host.div_(self.size()) if host.is_floating_point() else host.floor_divide_(self.size())
        _copy_back(zip(results, _flat(staged), strict=True))
        return done(results)

    def _run_each(self, name: str, outputs: list[Tensors], *inputs: Any) -> Work:
        for index, output in enumerate(outputs):
            self._run(name, output, *(value[index] if isinstance(value, (list, tuple)) else value for value in inputs))
        return done(_flat(outputs))

    # ------------------------------------------------------------------ collectives
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._run("allreduce", tensors, opts or c10d.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        options = c10d.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts.reduceOp
        return self._run_each("allreduce", [[tensor] for tensor in tensors], options)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._run("broadcast", tensors, opts or c10d.BroadcastOptions())

    def reduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return self._run("reduce", tensors, opts or c10d.ReduceOptions())

    def allgather(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._run("allgather", outputs, inputs, opts or c10d.AllgatherOptions())

    def allgather_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._run("allgather_coalesced", outputs, inputs, opts or c10d.AllgatherOptions())

    def all_gather_single(self, output: Tensors, input: Tensors, opts: Any = None) -> Work:
        return self._run("_allgather_base", output, input, opts or c10d.AllgatherOptions())

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._run_each("_allgather_base", outputs, inputs, opts or c10d.AllgatherOptions())

    def gather(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._run("gather", outputs, inputs, opts or c10d.GatherOptions())

    def scatter(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._run("scatter", outputs, inputs, opts or c10d.ScatterOptions())

    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._run("reduce_scatter", outputs, inputs, opts or c10d.ReduceScatterOptions())

    def reduce_scatter_single(self, output: Tensors, input: Tensors, opts: Any = None) -> Work:
        return self._run("_reduce_scatter_base", output, input, opts or c10d.ReduceScatterOptions())

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        return self._run_each("_reduce_scatter_base", outputs, inputs, opts or c10d.ReduceScatterOptions())

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Through the form on one tensor: in older torch gloo lacks that on lists."""
        received, sent = (torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (outputs, inputs))
        counts, sent_counts = ([tensor.numel() for tensor in tensors] for tensors in (outputs, inputs))
        self.all_to_all_single(received, sent, counts, sent_counts, opts)
        for output, part in zip(outputs, torch.split(received, counts), strict=True):
            output.detach().copy_(part.view_as(output))
        return done(outputs)

    def all_to_all_single(
        self, output: Tensors, input: Tensors, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Work:
        return self._run("alltoall_base", output, input, output_splits, input_splits, opts or c10d.AllToAllOptions())

    def barrier(self, opts: Any = None) -> Work:
        self._gloo.barrier(opts or c10d.BarrierOptions()).wait()
        return done([])

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ------------------------------------------------------------------ point to point
    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> Work:
        return self._gloo.send(_map(_on_host, tensors), dstRank, tag)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> Work:
        staged = _map(_on_host, tensors)
        return _Receiving(srcRank, self._gloo.recv(staged, srcRank, tag), tensors, staged)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        staged = _map(_on_host, tensors)
        work = self._gloo.recv_anysource(staged, tag)
        work.wait()
        _copy_back(zip(_flat(tensors), _flat(staged), strict=True))
        return _Received(work._source_rank())

    # ------------------------------------------------------------------ coalescing: calls are made one by one
    def _start_coalescing(self, device: torch.device) -> None:
        pass

    def _end_coalescing(self, device: torch.device) -> Work:
        return done([])

    # ------------------------------------------------------------------ what torch asks a group
    def getBackendName(self) -> str:
        """The name that the group was registered by."""
        return self._backend

    def getRank(self) -> int:
        """The rank of this process."""
        return int(self.rank())

    def getSize(self) -> int:
        """How many ranks there are."""
        return int(self.size())

    def setGroupName(self, name: str) -> None:
        """Keep the name that torch.distributed gives the group."""
        self._name = name

    def getGroupName(self) -> str:
        """The group's name."""
        return self._name

    def setGroupDesc(self, description: str) -> None:
        """Keep the description that torch.distributed gives the group."""
        self._description = description

    def getGroupDesc(self) -> str:
        """The group's description."""
        return self._description

    def shutdown(self) -> None:
        """gloo ends with its last reference."""
