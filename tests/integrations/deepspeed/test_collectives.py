"""DeepSpeed's collectives on our plugin: right for every group, op and dtype, under every launcher."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_plugin_sdk import comm, registry
from ds_plugin_sdk.integrations.deepspeed import collectives
from launchers import LAUNCHERS, launch

# DeepSpeed's own shared-memory op gives sums over all ranks for any group and op, leaves float64 and int32 as they are,
# and crashes where its launcher has not set LOCAL_SIZE.
PROGRAM = """
import datetime
import os
import deepspeed
import torch
from deepspeed import comm as dist

deepspeed.init_distributed("gloo", distributed_port=int(os.environ["MASTER_PORT"]), verbose=False)
rank = dist.get_rank()
group = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        tensor = torch.full((1000,), rank + 1, dtype=dtype)
        dist.inference_all_reduce(tensor, op=op, group=group)
        values = tensor.unique().tolist()
        print(f"rank {rank} {str(dtype)[6:]} {'sum' if op == dist.ReduceOp.SUM else 'max'} {values}", flush=True)

# The same three ways: into a result, and into one that a handle is waited for.
for dtype in (torch.float32, torch.bfloat16, torch.int32):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        for async_op in (False, True):
            mine, both = torch.full((1000,), rank + 1, dtype=dtype), torch.zeros(2000, dtype=dtype)
            handles = [dist.all_gather_into_tensor(both, mine, group=group, async_op=async_op)]
            for handle in handles:
                assert (handle is None) is not async_op
                assert not async_op or isinstance(handle, torch.distributed.Work) and handle.wait() is not False
            scattered, reduced = torch.zeros(1000, dtype=dtype), mine.clone()
            for handle in (
                dist.reduce_scatter_tensor(scattered, both, op=op, group=group, async_op=async_op),
                dist.all_reduce(reduced, op=op, group=group, async_op=async_op),
            ):
                assert (handle is None) is not async_op
                if async_op:
                    handle.wait(datetime.timedelta(seconds=60))
                    if op == dist.ReduceOp.SUM and dtype != torch.int32:  # not gloo's
                        assert handle.is_completed() and handle.is_success()
                        assert handle.get_future().wait() == handle.result()
            low, high = rank // 2 * 2 + 1, rank // 2 * 2 + 2
            added = op == dist.ReduceOp.SUM
            assert both.tolist() == [low] * 1000 + [high] * 1000
            assert scattered.unique().tolist() == [(rank + 1) * (2 if added else 1)], scattered
            assert reduced.unique().tolist() == [low + high if added else high], reduced
print(f"rank {rank} all three", flush=True)

# Gradients of embeddings may be sparse: those are torch's to add up.
for async_op in (False, True):
    rows = torch.sparse_coo_tensor([[rank, 5]], torch.ones(2, 4), (8, 4)).coalesce()
    handle = dist.all_reduce(rows, group=group, async_op=async_op)
    if async_op:
        handle.wait()
    expected = torch.zeros(8, 4)
    expected[rank // 2 * 2] = expected[rank // 2 * 2 + 1] = 1
    expected[5] = 2
    assert torch.equal(rows.to_dense(), expected), rows
dist.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.deepspeed
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.usefixtures("compiled_once")
def test_two_groups_of_two_ranks(launcher: str, tmp_path: Path) -> None:
    program = tmp_path / "reduce.py"
    program.write_text(PROGRAM, encoding="utf-8")
    printed = launch(launcher, 4, program)
    lines = re.findall(r"rank (\d) (\w+) (sum|max) \[([\d.]+)\]", printed)
    assert len(set(lines)) == 4 * 5 * 2, printed
    assert printed.count("all three") == 4
    expected = {("0", "sum"): 3, ("0", "max"): 2, ("1", "sum"): 7, ("1", "max"): 4}
    wrong = [line for line in lines if float(line[3]) != expected[str(int(line[0]) // 2), line[2]]]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("its_own_op", "ranks", "asked"),
    [(None, 2, "the SDK"), (None, 1, "nobody"), ("DeepSpeed's op", 2, "DeepSpeed"), ("DeepSpeed's op", 1, "DeepSpeed")],
)
def test_who_has_deepspeeds_op_keeps_it(
    its_own_op: str | None, ranks: int, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    class TorchBackend:
        """As DeepSpeed's, whose own method asks torch for the op."""

        shm_comm_op = its_own_op

        def inference_all_reduce(self, tensor: Any, op: Any, group: Any = None) -> None:
            calls.append(("DeepSpeed", tensor, op, group))

        def _reduce_op(self, op: Any) -> Any:
            return f"torch's {op}"

    monkeypatch.setattr(registry, "current", lambda: "a plugin's accelerator")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: ranks)
    monkeypatch.setattr(comm, "all_reduce", lambda *arguments: calls.append(("the SDK", *arguments)))
    collectives.replace(SimpleNamespace(TorchBackend=TorchBackend))  # type: ignore[arg-type]  # has what is read of DeepSpeed's module
    TorchBackend().inference_all_reduce("a tensor", "SUM", "a group")
    reduction = "torch's SUM" if asked == "the SDK" else "SUM"
    assert calls == ([] if asked == "nobody" else [(asked, "a tensor", reduction, "a group")])


@pytest.mark.deepspeed
def test_deepspeed_calls_the_sdk(python) -> None:  # type: ignore[no-untyped-def]  # a fixture of conftest.py
    done = python(
        "from deepspeed.comm.torch import TorchBackend as b\nprint(b.inference_all_reduce.__code__.co_filename)"
    )
    assert done.stdout.splitlines()[-1] == collectives.__file__
