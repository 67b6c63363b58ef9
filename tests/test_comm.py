"""Collectives through memory that ranks share: real ranks, against float64 and against torch's own."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from ds_plugin_sdk import comm
from launchers import launch

START = """
import os, sys, time
from pathlib import Path
import torch
from torch import distributed
from ds_plugin_sdk import comm
from ds_plugin_sdk.errors import CollectiveError, InvalidTensorError
from ds_plugin_sdk import torch_threads
from ds_plugin_sdk.ops import _library

torch_threads.wait_at_exit()  # DeepSpeed's ranks do so by themselves: a rank must not end with SIGABRT after its work
distributed.init_process_group("gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()
by_torch = []
own = distributed.all_reduce
distributed.all_reduce = lambda tensor, **rest: (by_torch.append(tensor.dtype), own(tensor, **rest))

def say(*words):
    sys.stdout.write(" ".join(map(str, (f"rank {rank}:", *words))) + "\\n")
    sys.stdout.flush()
"""
END = "\ndistributed.barrier()\ndistributed.destroy_process_group()\n"


SUMS = (
    START
    + """
def numbers(of, numel, dtype):
    return torch.randn(numel, generator=torch.Generator().manual_seed(of)).to(dtype)

for dtype, unit in ((torch.float32, 2**-24), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
    for numel in (1, 1000, 65536, 300_001):  # one piece, exactly one, and several
        tensor = numbers(rank, numel, dtype)
        exact = sum((numbers(of, numel, dtype).double() for of in range(ranks)), torch.zeros(1))
        comm.all_reduce(tensor)
        # Rounded once, after sums in float32, each of which is at most 16.
        assert ((tensor.double() - exact).abs() <= unit * exact.abs() + ranks * 16 * 2**-24).all(), (dtype, numel)
        everyone = [torch.empty_like(tensor) for _ in range(ranks)]
        distributed.all_gather(everyone, tensor)
        assert all(torch.equal(each, tensor) for each in everyone), (dtype, numel)

columns = torch.full((4, 6), 1.0 + rank).t()[::2]
leaf = torch.nn.Parameter(torch.full((5,), 1.0 + rank))
comm.all_reduce(columns)
comm.all_reduce(leaf)
of_a_sum = torch.tensor(1.0 + rank).expand(3, 4)  # as the gradient of a sum
comm.all_reduce(of_a_sum)
for tensor in (columns, leaf, of_a_sum):
    assert (tensor == ranks * (ranks + 1) / 2).all(), tensor
assert not by_torch, by_torch

# Plain tensors go past torch's dispatcher; of one element, which may be a part of a complex number, the op's way.
called, call = [], _library.call
_library.call = lambda name, *rest: (called.append(name), call(name, *rest))[1]
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    comm.all_reduce(torch.ones(1000, dtype=dtype))
assert not called, called
comm.all_reduce(torch.ones(1))
assert called == ["all_reduce_"], called
_library.call = call

for dtype in (torch.float64, torch.int32):
    comm.all_reduce(torch.ones(3, dtype=dtype))
largest = torch.tensor(float(rank))
comm.all_reduce(largest, distributed.ReduceOp.MAX)
say("largest", largest.item(), *by_torch)

try:
    comm.all_reduce(torch.ones(10 + rank))
except InvalidTensorError as error:
    say(error)
try:  # as many bytes
    comm.all_reduce(torch.ones(10, dtype=torch.bfloat16 if rank else torch.float16))
except InvalidTensorError as error:
    say(error)
try:
    torch.vmap(lambda x: (comm.all_reduce(x), x)[1])(torch.ones(2, 3))
except RuntimeError as error:
    say("vmap:", "c10d" in str(error))
after = torch.ones(3)
comm.all_reduce(after)
distributed.barrier()
mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/ds-plugin-" in line]
say("then", after.tolist(), len(mapped), sum("(deleted)" in line for line in mapped))
"""
    + END
)

PARTS = (
    START
    + """
for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
    def counted(*tensors, name=name, own=getattr(distributed, name), **rest):
        by_torch.append(name)
        return own(*tensors, **rest)
    setattr(distributed, name, counted)

def numbers(of, numel, dtype):
    values = torch.randn(numel, generator=torch.Generator().manual_seed(of)) * 8
    return values.bool() if dtype == torch.bool else values.to(dtype)

for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool):
    for numel in (1, 1000, 65536, 300_001):
        expected = torch.cat([numbers(of, numel, dtype) for of in range(ranks)])
        for in_place in (False, True):
            output = torch.zeros(ranks * numel, dtype=dtype)
            mine = output[rank * numel : (rank + 1) * numel] if in_place else torch.zeros(numel, dtype=dtype)
            mine.copy_(numbers(rank, numel, dtype))
            comm.all_gather_into_tensor(output, mine)
            assert torch.equal(output, expected), (dtype, numel, in_place)
assert not by_torch, by_torch

for dtype, unit in ((torch.float32, 2**-24), (torch.bfloat16, 2**-8), (torch.float16, 2**-11)):
    for numel in (1, 1000, 65536, 300_001):
        part = slice(rank * numel, (rank + 1) * numel)
        exact = sum((numbers(of, ranks * numel, dtype)[part].double() for of in range(ranks)), torch.zeros(1))
        for in_place in (False, True):
            input = numbers(rank, ranks * numel, dtype)
            output = input[part] if in_place else torch.zeros(numel, dtype=dtype)
            comm.reduce_scatter_tensor(output, input)
            assert ((output.double() - exact).abs() <= unit * exact.abs() + ranks * 128 * 2**-24).all(), (dtype, numel)
            kept = numbers(rank, ranks * numel, dtype)
            kept[part] = input[part]
            assert torch.equal(input, kept), "the input was modified"
assert not by_torch, by_torch

# A graph that has kept what was there sees that it is gone.
for collective, sizes in ((comm.all_gather_into_tensor, (ranks, 1)), (comm.reduce_scatter_tensor, (1, ranks))):
    output, input = map(torch.ones, sizes)
    before = output._version
    collective(output, input)
    assert output._version > before, collective

# Not contiguous, and of a leaf that wants a gradient.
columns = torch.zeros(5, ranks * 2).t()
comm.all_gather_into_tensor(columns, torch.nn.Parameter(torch.full((5, 2), 1.0 + rank).t()))
assert columns[::2, 0].tolist() == [1.0 + of for of in range(ranks)], columns
sums = torch.zeros(3, 2)[:, 0]
comm.reduce_scatter_tensor(sums, torch.full((3 * ranks, 2), 1.0 + rank)[:, 0])
assert (sums == ranks * (ranks + 1) / 2).all() and not by_torch, (sums, by_torch)

# An input elsewhere in the output, and one that torch has marked as negated.
buffer = torch.arange(ranks * 3.0) + 100 * rank
comm.all_gather_into_tensor(buffer, buffer[:3])
assert buffer.tolist() == [100.0 * of + i for of in range(ranks) for i in range(3)], buffer
buffer = torch.arange(ranks * 3.0)
comm.reduce_scatter_tensor(buffer[1:4], buffer)
assert buffer[1:4].tolist() == [ranks * (3.0 * rank + i) for i in range(3)], buffer
negated = torch.tensor([1 + 2j]).conj().imag
comm.all_gather_into_tensor(torch.empty(ranks), negated)
comm.all_gather_into_tensor(torch.zeros(ranks, dtype=torch.complex64).conj().imag, torch.ones(1))
assert not by_torch, by_torch

comm.all_gather_into_tensor(torch.empty(0), torch.empty(0))
comm.reduce_scatter_tensor(torch.empty(0), torch.empty(0))
assert by_torch == ["all_gather_into_tensor", "reduce_scatter_tensor"], by_torch
by_torch.clear()
comm.all_gather_into_tensor(torch.empty(ranks, dtype=torch.complex64), torch.ones(1, dtype=torch.complex64))
comm.reduce_scatter_tensor(torch.ones(2, dtype=torch.int32), torch.ones(2 * ranks, dtype=torch.int32))
comm.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * ranks), distributed.ReduceOp.MAX)
say("by torch", *by_torch)
try:
    comm.all_gather_into_tensor(torch.empty(3), torch.ones(2))
except Exception as error:
    say("does not fit:", type(error).__name__)

memory = comm._groups[distributed.group.WORLD]._memory
for name, tensors in (("all_reduce_", [torch.ones(4)]), ("all_gather_", [torch.ones(4 * ranks), torch.ones(4)])):
    try:
        _library.call(name, *tensors, memory, rank, ranks, -2, 1.0)
    except InvalidTensorError as error:
        say(error)

for wrong in (
    lambda: comm.all_gather_into_tensor(torch.empty(ranks * (4 + rank)), torch.ones(4 + rank)),
    lambda: comm.reduce_scatter_tensor(torch.empty(5), torch.ones(5 * ranks))
    if rank
    else comm.all_gather_into_tensor(torch.empty(5 * ranks), torch.ones(5)),
    # One of them past torch's dispatcher.
    lambda: comm.all_gather_into_tensor(torch.empty(5 * ranks), torch.ones(5))
    if rank
    else comm.all_reduce(torch.ones(5)),
    lambda: comm.all_reduce(torch.ones(1 if rank else 10)),
):
    try:
        wrong()
    except InvalidTensorError as error:
        say(error)
after = torch.empty(ranks)
comm.all_gather_into_tensor(after, torch.full((1,), float(rank)))
say("then", after.tolist())
"""
    + END
)

ENDED = (
    START
    + """
comm.all_reduce(torch.ones(3))
if rank == 1:
    say("ends")
    os._exit(0)
for _ in range(2):
    try:
        comm.all_reduce(torch.ones(3))
    except CollectiveError as error:
        say(str(error).replace("\\n", " "))
os._exit(0)
"""
)

# Rank 0 lives, and has no part in it.
ENDED_IN_A_GROUP = (
    START
    + """
from torch import distributed
group = distributed.new_group([1, 2])
if rank == 0:
    time.sleep(5)
    os._exit(0)
for number, elements in enumerate((3, 2 + rank, 3)):
    if rank == 2 and number == 2:
        os._exit(0)
    try:
        comm.all_reduce(torch.ones(elements), group=group)
    except (CollectiveError, InvalidTensorError) as error:
        say(str(error).replace("\\n", " "))
os._exit(0)
"""
)

# In the middle of a large sum: it waits for a rank that is late, which finds its piece there and its share missing.
ENDED_WITHIN = (
    START
    + """
import threading, time
comm.all_reduce(torch.ones(3))
if rank == 3:
    threading.Timer(0.5, os._exit, [0]).start()
if rank == 1:
    time.sleep(2)
try:
    comm.all_reduce(torch.ones(1 << 16))
except CollectiveError as error:
    say(str(error).replace("\\n", " "))
os._exit(0)
"""
)

INTERRUPTED = (
    START
    + """
import signal

class Interrupted(Exception):
    pass

def interrupt(*_):
    raise Interrupted

comm.all_reduce(torch.ones(3))
if rank == 0:
    signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        comm.all_reduce(torch.ones(3))
    except Interrupted:
        say("interrupted")
    try:
        comm.all_reduce(torch.ones(3))
    except CollectiveError as error:
        say(str(error).replace("\\n", " "))
    Path("over").touch()
else:
    while not Path("over").exists():  # a rank that ended would be another matter
        time.sleep(0.01)
os._exit(0)
"""
)

FAKE = """
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from ds_plugin_sdk import comm

distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
comm.all_reduce(torch.ones(3))
print("rank 0: done")
"""

SUBCLASSES = (
    START
    + """
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor
two = TwoTensor(torch.ones(3), torch.full((3,), 2.0))
comm.all_reduce(two)
try:
    mesh = init_device_mesh("cpu", (ranks,))
    comm.all_reduce(DTensor.from_local(torch.ones(3), mesh, [Replicate()]))
except NotImplementedError:
    say("torch's own error")
plain = torch.ones(3)
comm.all_reduce(plain)
say("added", two.a.tolist(), two.b.tolist(), plain.tolist())
"""
    + END
)

LATE = (
    START
    + """
from datetime import timedelta
comm.all_reduce(torch.ones(3))
tensor = torch.ones(200_000)
if rank == 1:
    time.sleep(2.5)
comm.all_reduce(tensor)
say("in time", tensor.unique().tolist())
group = distributed.new_group(timeout=timedelta(seconds=5))  # in which a busy machine can make it, and let both begin
comm.all_reduce(tensor, group=group)
if rank == 0:
    try:
        comm.all_reduce(tensor, group=group)
    except CollectiveError as error:
        say(str(error).replace("\\n", " "))
"""
    + END
)

WITHOUT = (
    START
    + """
if rank == 1:  # a rank in another container, say
    comm._SHARED_MEMORY = Path("/nowhere")
    def from_file(*_, **__):
        raise RuntimeError("no such file")
    torch.from_file = from_file
tensor = torch.ones(3)
comm.all_reduce(tensor)
say(tensor.tolist(), *by_torch)
"""
    + END
)

UNBUILT = (
    START
    + """
from ds_plugin_sdk import registry
from ds_plugin_sdk.errors import CompileError
if rank == 1:
    def fail(*_):
        raise CompileError("compiling failed", why="no compiler here")
    registry.load_kernels = fail
begun = time.monotonic()
for _ in range(2):
    try:
        comm.all_reduce(torch.ones(3))
    except (CollectiveError, CompileError) as error:
        soon = time.monotonic() - begun < 60
        say(type(error).__name__, str(error).replace("\\n", " "), "at once" if soon else "late")
"""
    + END
)

COMPILED = (
    START
    + """
class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        return input

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        comm.all_reduce(gradient)
        return gradient

pair = distributed.new_group()

def step(x, times, group):
    y = x * 1
    comm.all_reduce(y, group=group)
    both = torch.empty(ranks * y.numel())
    comm.all_gather_into_tensor(both, y.detach(), group=group)
    part = torch.empty(4)
    comm.reduce_scatter_tensor(part, both, group=group)
    comm.all_reduce(torch.ones(3))  # which nobody reads: Inductor likes to have it first, or to leave it out
    return (Sum.apply(x) * part * times).sum()

for backend, calls in (("eager", 6), ("aot_eager", 6), ("inductor", 3)):
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for call in range(calls):
        group = pair if call >= 3 else None
        x = torch.full((4,), 1.0 + rank, requires_grad=True)
        # One rank is compiled, then the other, then both are.
        loss = (compiled if call % 3 in (rank, 2) else step)(x, call // 3 + 1, group)
        loss.backward()
        say(backend, loss.item(), x.grad.unique().tolist())
    torch.compiler.reset()

class Model(torch.nn.Module):
    def forward(self, x):
        y = x * 2
        comm.all_reduce(y)
        return y

distributed.all_reduce = own
program = torch.export.export(Model(), (torch.ones(3),)).run_decompositions()
assert not any("ds_plugin" in str(node.target) for node in program.graph.nodes)  # it is to run where the SDK is not
say("exported", program.module()(torch.ones(3)).tolist())
"""
    + END
)

PROFILED = (
    START
    + """
comm.all_reduce(torch.ones(3))
with torch.profiler.profile() as profile:
    comm.all_reduce(torch.ones(1000))
    comm.all_gather_into_tensor(torch.empty(ranks * 3), torch.ones(3))
    comm.reduce_scatter_tensor(torch.empty(3), torch.ones(ranks * 3))
say(*sorted(event.key for event in profile.key_averages() if "ds_plugin" in event.key))
"""
    + END
)

pytestmark = [pytest.mark.compiler, pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]
shared_memory = pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="ranks share no memory here: no /dev/shm")


def run(program: str, ranks: int, folder: Path) -> list[str]:
    """What the ranks say, in the order of their numbers."""
    path = folder / "program.py"
    path.write_text(program, encoding="utf-8")
    return sorted(re.findall(r"^rank \d: .*$", launch("torchrun", ranks, path), flags=re.MULTILINE))


@shared_memory
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums(ranks: int, tmp_path: Path) -> None:
    said = run(SUMS, ranks, tmp_path)
    for rank in range(ranks):
        other = 1 if rank == 0 else 0
        largest = f"rank {rank}: largest {ranks - 1.0} torch.float64 torch.int32 torch.float32"
        rejected = (
            f"rank {rank}: rank {other} has {40 + 4 * other} bytes left where this rank has {40 + 4 * rank} "
            "(op 'all_reduce_'): expected as many of all"
        )
        theirs, ours = ("bfloat16", "float16")[:: 1 if rank == 0 else -1]
        mixed = (
            f"rank {rank}: rank {other} adds up {theirs} where this rank adds up {ours} (op 'all_reduce_'): "
            "expected the same of all"
        )
        # One mapping, of a file that has no name any more.
        then = f"rank {rank}: then {[float(ranks)] * 3} 1 1"
        assert {largest, rejected, mixed, f"rank {rank}: vmap: True", then} <= set(said), said


@shared_memory
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_are_gathered_and_sums_are_scattered(ranks: int, tmp_path: Path) -> None:
    said = run(PARTS, ranks, tmp_path)
    for rank in range(ranks):
        other = 1 if rank == 0 else 0
        by_torch = "all_gather_into_tensor reduce_scatter_tensor reduce_scatter_tensor"
        sizes = (
            f"rank {rank}: rank {other} has {16 + 4 * other} bytes left where this rank has {16 + 4 * rank} "
            "(op 'all_gather_'): expected as many of all"
        )
        mine, theirs = ("all_gather_", "reduce_scatter_")[:: -1 if rank else 1]
        mixed = f"rank {rank}: rank {other} is in {theirs} (op '{mine}'): expected the same of all"
        mine, theirs = ("all_reduce_", "all_gather_")[:: -1 if rank else 1]
        past = f"rank {rank}: rank {0 if rank else 1} is in {theirs} (op '{mine}'): expected the same of all"
        ours, others = (4, 40) if rank else (40, 4)
        one = f"rank {rank}: rank {other} has {others} bytes left where this rank has {ours} (op 'all_reduce_'): "
        then = f"rank {rank}: then {[float(of) for of in range(ranks)]}"
        assert {f"rank {rank}: by torch {by_torch}", sizes, mixed, past, then} <= set(said), said
        assert any(line.startswith(one) for line in said), said
        assert sum("start is -2 (op 'all_" in line for line in said) == 2 * ranks, said
        assert any(line.startswith(f"rank {rank}: does not fit: ") for line in said)


@shared_memory
def test_a_rank_that_ended_within_a_sum_is_told(tmp_path: Path) -> None:
    said = run(ENDED_WITHIN, 4, tmp_path)
    assert len(said) == 3, said
    assert all("rank 3 of 4 ended before all_reduce" in line for line in said)


@shared_memory
def test_a_rank_that_ended_is_told(tmp_path: Path) -> None:
    again, ended, _ = run(ENDED, 2, tmp_path)
    assert ended.startswith(
        "rank 0: rank 1 of 2 ended before all_reduce (op 'all_reduce'): rank 0 has waited for it for"
    )
    assert again.startswith("rank 0: an earlier collective of this group was interrupted (op 'all_reduce'): ")


@shared_memory
def test_in_a_group_ranks_have_the_job_s_numbers(tmp_path: Path) -> None:
    said = run(ENDED_IN_A_GROUP, 3, tmp_path)
    assert [line.partition(" (op")[0] for line in said] == [
        "rank 1: rank 2 has 16 bytes left where this rank has 12",
        "rank 1: rank 2 of the group of ranks [1, 2] ended before all_reduce",
        "rank 2: rank 1 has 12 bytes left where this rank has 16",
    ]
    assert "rank 1 has waited for it" in said[1]


@shared_memory
def test_after_an_interruption_nothing_is_added_up(tmp_path: Path) -> None:
    """What was posted for it would be taken for the next sum's."""
    after, interrupted = run(INTERRUPTED, 2, tmp_path)
    assert interrupted == "rank 0: interrupted"
    assert after.startswith("rank 0: an earlier collective of this group was interrupted (op 'all_reduce'): ")


def test_ranks_that_do_not_exist_are_not_waited_for(tmp_path: Path) -> None:
    assert run(FAKE, 1, tmp_path) == ["rank 0: done"]


@shared_memory
def test_a_subclass_s_own_collectives_run(tmp_path: Path) -> None:
    """Of a wrapper of tensors the elements are not where its own would be; the group stays whole."""
    said = run(SUBCLASSES, 2, tmp_path)
    for rank in range(2):
        added = f"rank {rank}: added [2.0, 2.0, 2.0] [4.0, 4.0, 4.0] [2.0, 2.0, 2.0]"
        assert {f"rank {rank}: torch's own error", added} <= set(said), said


def test_a_late_rank_is_waited_for_until_the_groups_timeout(tmp_path: Path) -> None:
    said = run(LATE, 2, tmp_path)
    assert {"rank 0: in time [2.0]", "rank 1: in time [2.0]"} <= set(said), said
    [late] = [line for line in said if "in time" not in line]
    assert late.startswith("rank 0: ranks [1] of 2 did not call all_reduce (op 'all_reduce'): rank 0 has waited for"), (
        said
    )
    assert "every rank of a group must call the same collectives in the same order" in late


def test_where_one_rank_has_no_shared_memory_all_take_torchs(tmp_path: Path) -> None:
    assert run(WITHOUT, 2, tmp_path) == [f"rank {rank}: [2.0, 2.0, 2.0] torch.float32" for rank in range(2)]


@shared_memory
def test_where_one_rank_must_not_do_without_the_kernel_all_raise(tmp_path: Path) -> None:
    assert run(UNBUILT, 2, tmp_path) == [
        *[
            "rank 0: CollectiveError rank 1 of 2 cannot take part in collectives (op 'all_reduce'): CompileError: "
            "compiling failed: no compiler here at once"
        ]
        * 2,
        *["rank 1: CompileError compiling failed: no compiler here at once"] * 2,
    ]


@shared_memory
@pytest.mark.timeout(600)
def test_compiled_ranks_meet_ranks_that_are_not(tmp_path: Path) -> None:
    steps = [("aot_eager", 1), ("aot_eager", 2), ("eager", 1), ("eager", 2), ("inductor", 1)]
    assert run(COMPILED, 2, tmp_path) == sorted(
        line
        for rank in range(2)
        for line in (
            *(f"rank {rank}: {backend} {24.0 * (rank + 1) * times} [{12.0 * times}]" for backend, times in steps * 3),
            f"rank {rank}: exported [4.0, 4.0, 4.0]",
        )
    )


@shared_memory
def test_a_profiler_sees_them(tmp_path: Path) -> None:
    names = "ds_plugin::all_gather_ ds_plugin::all_reduce_ ds_plugin::reduce_scatter_"
    assert run(PROFILED, 2, tmp_path) == [f"rank {rank}: {names}" for rank in range(2)]


def test_it_offers_what_torch_distributed_has_by_the_same_name() -> None:
    own = {name for name, value in vars(comm).items() if getattr(value, "__module__", None) == comm.__name__}
    assert set(comm.__all__) == {name for name in own if hasattr(distributed, name)}


@pytest.mark.parametrize("wrong", [None, [torch.ones(1)]])
def test_torch_says_what_is_no_tensor(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"torch\.Tensor"):
        comm.all_reduce(wrong)
