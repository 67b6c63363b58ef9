"""Collectives for tensors in host memory: a machine's ranks need no sockets.

    from ds_plugin_sdk import comm

    comm.all_reduce(activations, group=tensor_parallel_group)

Between layers that are divided among ranks, a token's activations are summed: some kilobytes, dozens of times a token.
ZeRO sums gradients and gathers parameters, all of a model's in each step. Ranks of one machine do it in memory that
they share; gloo's sockets take several times as long, and for little tensors dozens of times.

The functions are those of `torch.distributed` of the same names. Sums of float32, bfloat16 and float16, and gathering
of what is not complex, go through shared memory if all ranks of the group run on one machine: added up in float32 in
the order of the ranks and rounded once, so that all have the same bits. All else is `torch.distributed`'s, and so is a
group in which one rank cannot have shared memory or the kernel. In a graph of torch.compile each is one op, so that it
does not matter which of the ranks are compiled; torch takes no such op within torch.cond or nested_compile_region.

All of them raise:
    CollectiveError: a rank has ended, did not come within the group's time, or must not do without the kernel and has
        none (``DS_PLUGIN_FALLBACK=0``).
    BuildError: that rank is this one.
    InvalidTensorError: the ranks call different collectives, or their tensors differ in size, or in dtype if they are
        added up.
    ValueError: there is no process group yet (torch's error): call `torch.distributed.init_process_group` first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, distributed
from torch._C._distributed_c10d import _resolve_process_group
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.constants import default_pg_timeout

from ds_plugin_sdk.errors import CollectiveError, InvalidTensorError
from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops.all_reduce import STATE_BYTES, SharedRanks

_SHARED_MEMORY = Path("/dev/shm")  # what the ranks of a machine have in common, in memory
_SLOT_BYTES = 256 * 1024  # of a tensor that goes through at a time: it stays in a core's cache
_PATIENCE = 1.0  # seconds until a rank that waits looks whether the others still live
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_is_batched: Callable[[Tensor], bool] = torch._C._functorch.is_batchedtensor  # by torch.vmap, for which torch has words

_groups: WeakKeyDictionary[ProcessGroup, _SharedMemory | None] = WeakKeyDictionary()


def all_reduce(tensor: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: ProcessGroup | None = None) -> None:
    """Replace a tensor by its reduction over the ranks of a group.

    Args:
        tensor: any shape, the same on all ranks of the group, as is its dtype.
        op: the reduction.
        group: its ranks, None for all.

    Raises:
        CollectiveError, BuildError, InvalidTensorError, ValueError: as the module says.
    """
    if not shared_all_reduce(tensor, op, group):
        distributed.all_reduce(tensor, op=op, group=group)


def all_gather_into_tensor(output: Tensor, input: Tensor, group: ProcessGroup | None = None) -> None:
    """Put the ranks' tensors one after the other.

    Args:
        output: as large as the inputs of all ranks; this rank's may be in its place there.
        input: the same size and dtype on all ranks of the group.
        group: its ranks, None for all.

    Raises:
        CollectiveError, BuildError, InvalidTensorError, ValueError: as the module says.
    """
    if not shared_all_gather(output, input, group):
        distributed.all_gather_into_tensor(output, input, group=group)


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: ReduceOp.RedOpType = ReduceOp.SUM, group: ProcessGroup | None = None
) -> None:
    """Reduce a tensor that has a part for each rank, and keep this rank's part.

    Args:
        output: a part; it may be this rank's of `input`.
        input: as large as the parts of all ranks, the same size and dtype on all of them. Modified only as `output` is.
        op: the reduction.
        group: its ranks, None for all.

    Raises:
        CollectiveError, BuildError, InvalidTensorError, ValueError: as the module says.
    """
    if not shared_reduce_scatter(output, input, op, group):
        distributed.reduce_scatter_tensor(output, input, op=op, group=group)


def shared_all_reduce(tensor: Tensor, op: ReduceOp.RedOpType, group: ProcessGroup | None) -> bool:
    """`all_reduce` if it goes through shared memory; False, on all ranks, if it is for the process group."""
    if not _sums(tensor, op):
        return False
    if torch.compiler.is_compiling():
        return _in_graph("all_reduce_in_group_", group, tensor)
    shared = _shared_by(group)
    if shared is None:
        return False
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_contiguous():
        shared.all_reduce(plain)
    else:
        sums = shared.all_reduce(plain.contiguous())
        # Expanded ones, as a sum's gradient, have elements in one place: torch would not write those.
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in plain.stride())
        plain[once].copy_(sums[once])
    return True


def shared_all_gather(output: Tensor, input: Tensor, group: ProcessGroup | None) -> bool:
    """`all_gather_into_tensor` in the same way."""
    if not _gathers(output, input):
        return False
    if torch.compiler.is_compiling():
        return _in_graph("all_gather_in_group_", group, output, input)
    shared = _shared_by(group)
    if shared is None or not shared.divides(output, input):
        return False
    _into(output.detach(), lambda whole: shared.all_gather(whole, _plain(input)))
    return True


def shared_reduce_scatter(output: Tensor, input: Tensor, op: ReduceOp.RedOpType, group: ProcessGroup | None) -> bool:
    """`reduce_scatter_tensor` in the same way."""
    if not (_sums(input, op) and _gathers(output, input)):
        return False
    if torch.compiler.is_compiling():
        return _in_graph("reduce_scatter_in_group_", group, output, input)
    shared = _shared_by(group)
    if shared is None or not shared.divides(input, output):
        return False
    _into(output.detach(), lambda part: shared.reduce_scatter(part, _plain(input)))
    return True


def _plain(input: Tensor) -> Tensor:
    return input.detach().resolve_neg().contiguous()


def _into(output: Tensor, write: Callable[[Tensor], None]) -> None:
    if output.is_contiguous() and not output.is_neg():
        write(output)
        if not output.is_inference():
            increment_version(output)  # as torch's collectives do: a graph may have kept what was there
    else:
        whole = torch.empty_like(output, memory_format=torch.contiguous_format)
        write(whole)
        output.copy_(whole)


# What all ranks of a collective answer alike.
def _sums(tensor: Tensor, op: ReduceOp.RedOpType) -> bool:
    return (
        isinstance(tensor, Tensor)  # torch has words for what is none
        and tensor.is_cpu
        and _strided(tensor)
        and tensor.dtype in _DTYPES
        and tensor.numel() > 0  # else this rank would not wait for others that have some
        and (op is ReduceOp.SUM or op == ReduceOp.SUM)  # the second takes longer than all else here
    )


def _gathers(output: Tensor, input: Tensor) -> bool:
    return (
        isinstance(output, Tensor)
        and isinstance(input, Tensor)
        and output.is_cpu
        and input.is_cpu
        and _strided(output)
        and _strided(input)
        and output.dtype == input.dtype
        and not input.dtype.is_complex  # whose conjugates are marked, and not computed
        and input.numel() > 0
    )


def _strided(tensor: Tensor) -> bool:
    # Dynamo does not let a backward pass look at layouts: the ops below do when they run.
    return torch.compiler.is_compiling() or (
        tensor.layout == torch.strided
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__  # a subclass's elements may lie elsewhere
        and not _is_batched(tensor)
    )


# For graphs. A compiled rank may meet ranks that are not compiled, as Dynamo gives up what it compiled too often on one
# rank; torch's own collectives of graphs know only the process group, where that rank would wait for the others.
_order = torch.empty(0, device="cpu")  # each says that it modifies this: so none is left out, or comes before another
_library.register(
    "all_reduce_in_group_(Tensor(a!) self, Tensor(b!) order, str group) -> ()",
    lambda self, _, group: all_reduce(self, group=_resolve_process_group(group)),
    fake=lambda *_: None,
)
_library.register(
    "all_gather_in_group_(Tensor(a!) output, Tensor input, Tensor(b!) order, str group) -> ()",
    lambda output, input, _, group: all_gather_into_tensor(output, input, _resolve_process_group(group)),
    fake=lambda *_: None,
)
_library.register(
    "reduce_scatter_in_group_(Tensor(a!) output, Tensor input, Tensor(b!) order, str group) -> ()",
    lambda output, input, _, group: reduce_scatter_tensor(output, input, group=_resolve_process_group(group)),
    fake=lambda *_: None,
)


def _in_graph(op: str, group: ProcessGroup | None, *tensors: Tensor) -> bool:
    members = _members(group)
    if members is None or torch.compiler.is_exporting():  # whose programs run where this package is not
        return False
    getattr(torch.ops.ds_plugin, op)(*tensors, _order, members.group_name)
    return True


def _members(group: ProcessGroup | None) -> ProcessGroup | None:
    """The group; None where torch has words for it: it is of other ranks, or there is none."""
    group = distributed.group.WORLD if group is None else group
    return group if isinstance(group, ProcessGroup) else None


def _shared_by(group: ProcessGroup | None) -> _SharedMemory | None:
    """The memory that the ranks of a group share, or None. Collective when the group is first seen."""
    members = _members(group)
    if members is None:
        return None
    try:
        return _groups[members]
    except KeyError:
        alone = members.size() == 1 or distributed.get_backend(members) == "fake"  # whose other ranks do not exist
        return _groups.setdefault(members, None if alone else _SharedMemory.of(members))


class _SharedMemory:
    """Memory that the ranks of a group share, as the kernels of `ds_plugin_sdk.ops.all_reduce` lay it out.

    Its file has no name any more when the first sum is taken: whatever ends the ranks, nothing is left of it. Each rank
    holds a lock on a byte of it, which the system takes back when the rank ends; so the others learn of that.
    """

    def __init__(self, path: Path, group: ProcessGroup) -> None:
        self._rank, self._ranks = group.rank(), group.size()
        self._global_ranks, self._among = _in_the_job(group)
        self._timeout = _timeout_of(group)
        self._broken_off = False
        self._one_at_a_time = threading.RLock()
        size = path.stat().st_size
        self._memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8, device="cpu")
        # After from_file, which closes a descriptor of its own: that gives up all of a process's locks on a file.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        finalize(self, os.close, self._file).atexit = False  # the lock is for as long as the process lives
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._rank)
        self._pass = SharedRanks(self._memory, self._rank, self._ranks, _PATIENCE)
        self._pass.all_reduce(torch.empty(0, device="cpu"), 0)  # fails where there is no kernel

    @classmethod
    def of(cls, group: ProcessGroup) -> _SharedMemory | None:
        """The group's, made by its first rank and opened by all; None, for all, if one of them cannot.

        Raises, for all, what one of them raises that has no kernel and may not do without it.
        """
        # All are there before the file is: a job that hangs here, and is killed, leaves none.
        distributed.all_gather_object([None] * group.size(), None, group=group)
        path = _new_file(group.size()) if group.rank() == 0 else None
        shared, error = None, None
        try:
            paths = [path]
            distributed.broadcast_object_list(paths, group_src=0, group=group)
            path = paths[0]
            if path is not None:
                shared, error = cls._open(path, group)
            outcomes = [(False, "")] * group.size()
            mine = (shared is not None, f"{type(error).__name__}: {error}" if error else "")
            distributed.all_gather_object(outcomes, mine, group=group)
        finally:
            if path is not None and group.rank() == 0:
                path.unlink()
        if error is not None:
            raise error
        ranks, among = _in_the_job(group)
        for rank, (_, why) in zip(ranks, outcomes, strict=True):
            if why:
                raise CollectiveError(
                    f"rank {rank} of {among} cannot take part in collectives", op="all_reduce", why=why
                )
        return shared if all(opened for opened, _ in outcomes) else None

    @classmethod
    def _open(cls, path: Path, group: ProcessGroup) -> tuple[_SharedMemory | None, Exception | None]:
        """This rank's view of the file, or None where it cannot have it; and an error that is to be raised."""
        try:
            return cls(path, group), None
        except (OSError, RuntimeError):
            return None, None
        except Exception as error:  # the other ranks wait for this one's answer, whatever it is
            return None, error

    def divides(self, whole: Tensor, part: Tensor) -> bool:
        """Whether a tensor has a part of this size for each rank."""
        return whole.numel() == self._ranks * part.numel()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor, replaced by the sum over the ranks."""
        self._run(tensor.numel(), self._pass.all_reduce, tensor)
        return tensor

    def all_gather(self, output: Tensor, input: Tensor) -> None:
        """The ranks' inputs one after the other; both contiguous."""
        place = output.data_ptr() + self._rank * input.nbytes
        if _overlap(output, input) and input.data_ptr() != place:
            input = input.clone()
        outputs, mine = (_bytes(tensor) for tensor in (output, input))  # of any dtype
        self._run(mine.numel(), self._pass.all_gather, outputs, mine)

    def reduce_scatter(self, output: Tensor, input: Tensor) -> None:
        """The sum of this rank's part of the ranks' inputs; both contiguous."""
        if _overlap(output, input) and (output.data_ptr() - input.data_ptr()) % output.nbytes:
            input = input.clone()
        self._run(output.numel(), self._pass.reduce_scatter, output, input)

    def _run(self, elements: int, collective: Callable[..., int], *tensors: Tensor) -> None:
        """All of a method of `SharedRanks`, which gives where it stopped."""
        with self._one_at_a_time:  # of the process's threads
            self._run_alone(elements, collective, *tensors)

    def _run_alone(self, elements: int, collective: Callable[..., int], *tensors: Tensor) -> None:
        if self._broken_off:
            raise CollectiveError(
                "an earlier collective of this group was interrupted",
                op=collective.__name__,
                why=f"what rank {self._global_ranks[self._rank]} posted for it is where the others look for this one's",
                hint="restart the job",
            )
        self._broken_off = True  # as long as it is not whole: whatever ends the call, a signal's handler too
        try:
            done = collective(*tensors, 0)
            if done < elements:
                self._go_on(done, elements, collective, *tensors)
        except InvalidTensorError as error:
            self._broken_off = False  # all ranks have that, and are through with it
            # The kernels know a rank by its place in the group.
            what = re.sub(r"(?<=^rank )\d+", lambda place: str(self._global_ranks[int(place[0])]), error.what)
            raise InvalidTensorError(what, op=error.op, why=error.why) from error
        self._broken_off = False

    def _go_on(self, done: int, elements: int, collective: Callable[..., int], *tensors: Tensor) -> None:
        """Wait for the others until it is whole or they cannot come."""
        begun = time.monotonic()
        while done < elements:
            self._see_to_the_others(collective.__name__, time.monotonic() - begun)
            done = collective(*tensors, done)

    def _see_to_the_others(self, collective: str, waited: float) -> None:
        # Pieces that each rank has posted, and pieces of which it has added up its share: RankState of the kernels.
        states = self._memory[: self._ranks * STATE_BYTES].view(torch.int64).view(self._ranks, -1)[:, :2].tolist()
        posted, shared = states[self._rank]
        missing = [rank for rank, state in enumerate(states) if state[0] < posted or state[1] < shared]
        this_rank = self._global_ranks[self._rank]
        for rank in missing:
            if self._has_ended(rank):
                raise CollectiveError(
                    f"rank {self._global_ranks[rank]} of {self._among} ended before {collective}",
                    op=collective,
                    why=f"rank {this_rank} has waited for it for {waited:.0f} s, and its process is gone",
                    hint="what that rank printed last says why; restart the job",
                )
        if missing and waited > self._timeout:
            raise CollectiveError(
                f"ranks {[self._global_ranks[rank] for rank in missing]} of {self._among} did not call {collective}",
                op=collective,
                why=f"rank {this_rank} has waited for {waited:.0f} s, the group's timeout",
                hint="every rank of a group must call the same collectives in the same order",
            )

    def _has_ended(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


def _in_the_job(group: ProcessGroup) -> tuple[list[int], str]:
    """The ranks of the job that are a group's, by their places in it; and how to call them together."""
    ranks = distributed.get_process_group_ranks(group)
    whole = len(ranks) == distributed.get_world_size()
    return ranks, str(len(ranks)) if whole else f"the group of ranks {ranks}"


def _bytes(tensor: Tensor) -> Tensor:
    """Those of a contiguous tensor; of one element it may have any strides."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two contiguous tensors have memory in common."""
    return a.data_ptr() < b.data_ptr() + b.nbytes and b.data_ptr() < a.data_ptr() + a.nbytes


def _new_file(ranks: int) -> Path | None:
    """A file in memory for that many ranks; None where there is no such place, or no space."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="ds-plugin-", dir=_SHARED_MEMORY)
    except OSError:
        return None
    try:
        # Taken now: memory that a full file system lacks when it is written to ends the process.
        os.posix_fallocate(descriptor, 0, ranks * (STATE_BYTES + 2 * _SLOT_BYTES))
    except OSError:
        Path(name).unlink()
        return None
    finally:
        os.close(descriptor)
    return Path(name)


def _timeout_of(group: ProcessGroup) -> float:
    """Seconds that a group waits for a rank."""
    timeout = default_pg_timeout
    with contextlib.suppress(AttributeError, RuntimeError):  # torch has no public name for it
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    return timeout.total_seconds()


__all__ = ["all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"]
