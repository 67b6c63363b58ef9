"""One of two ranks: every collective that DeepSpeed uses, on tensors of the device. Started by torchrun."""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from ds_plugin_sdk import simulator

simulator.install("zap", memory_mb=512)
DEVICE = torch.device("zap", int(os.environ["LOCAL_RANK"]))
dist.init_process_group("zapccl", device_id=DEVICE)  # as scripts do where each rank has its device
RANK, SIZE = dist.get_rank(), dist.get_world_size()
torch.zap.set_device(RANK)


def on_device(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


def mine() -> torch.Tensor:
    """1 on rank 0, 2 on rank 1."""
    return on_device(RANK + 1.0)


def reductions() -> None:
    expected = {"SUM": 3, "AVG": 1.5, "MAX": 2, "MIN": 1, "PRODUCT": 2}
    for name, value in expected.items():
        tensor = mine()
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        assert tensor.tolist() == [value], (name, tensor)
    tensor = mine()
    dist.reduce(tensor, 0)
    assert RANK == 1 or tensor.tolist() == [3]
    tensor = mine()
    assert dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.tolist() == [3]
    half = mine().bfloat16()
    dist.all_reduce(half, op=dist.ReduceOp.AVG)
    assert half.tolist() == [1.5]
    host = torch.ones(2)
    dist.all_reduce(host)
    assert host.tolist() == [2, 2]


def broadcasts_gathers_scatters() -> None:
    tensor = mine()
    dist.broadcast(tensor, 1)
    assert tensor.tolist() == [2]
    gathered = [on_device(0), on_device(0)]
    dist.all_gather(gathered, mine())
    assert [part.item() for part in gathered] == [1, 2]
    dist.gather(mine(), gathered if RANK == 0 else None, 0)
    assert [part.item() for part in gathered] == [1, 2]
    out = on_device(0)
    dist.scatter(out, [on_device(5), on_device(6)] if RANK == 0 else None, 0)
    assert out.tolist() == [5 + RANK]
    dist.reduce_scatter(out, [on_device(1), on_device(2)])
    assert out.tolist() == [2 + 2 * RANK]
    objects = [None, None]
    dist.all_gather_object(objects, {"rank": RANK})
    assert objects == [{"rank": 0}, {"rank": 1}]
    named = ["one" if RANK == 0 else None]
    dist.broadcast_object_list(named, 0)
    assert named == ["one"]


def into_one_tensor() -> None:
    """Under their names of before torch 2.13 and since, where torch has both."""
    for name in ("all_gather_into_tensor", "all_gather_single"):
        if hasattr(dist, name):
            out = on_device(0, 0)
            getattr(dist, name)(out, mine())
            assert out.tolist() == [1, 2]
            flat = on_device(0, 0)
            flat[RANK] = RANK + 1.0  # as ZeRO gathers: the input is a part of the output
            getattr(dist, name)(flat, flat.narrow(0, RANK, 1))
            assert flat.tolist() == [1, 2]
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        if hasattr(dist, name):
            out = on_device(0)
            getattr(dist, name)(out, on_device(RANK, RANK + 1.0), op=dist.ReduceOp.AVG)
            assert out.tolist() == [0.5 + RANK]
    out = on_device(0, 0)
    dist.all_to_all_single(out, on_device(2 * RANK, 2 * RANK + 1))
    assert out.tolist() == [RANK, RANK + 2]
    uneven = on_device(0, 0, 0) if RANK == 0 else on_device(0)
    dist.all_to_all_single(
        uneven,
        on_device(1, 2) if RANK == 0 else on_device(3, 4),
        [1, 2] if RANK == 0 else [1, 0],
        [1, 1] if RANK == 0 else [2, 0],
    )
    assert uneven.tolist() == ([1, 3, 4] if RANK == 0 else [2])
    parts = [on_device(0), on_device(0)]
    dist.all_to_all(parts, [on_device(2 * RANK), on_device(2 * RANK + 1)])
    assert [part.item() for part in parts] == [RANK, RANK + 2]


def coalesced() -> None:
    first, second = on_device(1), on_device(2)
    with dist._coalescing_manager(device=DEVICE):
        dist.all_reduce(first)
        dist.all_reduce(second)
    assert (first.item(), second.item()) == (2, 4)
    outs = [on_device(0, 0), on_device(0, 0)]
    with dist._coalescing_manager(device=DEVICE, async_ops=True) as manager:
        for index, out in enumerate(outs):
            dist.all_gather_into_tensor(out, on_device(RANK + index))
    manager.wait()
    assert [out.tolist() for out in outs] == [[0, 1], [1, 2]]


def point_to_point() -> None:
    if RANK == 0:
        dist.send(on_device(7), 1)
        dist.isend(on_device(8), 1).wait()
        dist.send(on_device(9), 1)
    else:
        got = on_device(0)
        dist.recv(got, 0)
        assert got.item() == 7
        work = dist.irecv(got, 0)
        work.wait()
        work.wait()
        assert got.item() == 8
        assert dist.recv(got) == 0
        assert got.item() == 9


def both_receive_first() -> None:
    got = on_device(0)
    receive, send = dist.irecv(got, 1 - RANK), dist.isend(on_device(20 + RANK), 1 - RANK)
    send.wait()
    receive.wait()
    assert got.item() == 21 - RANK


def groups() -> None:
    for ranks in ([0, 1], [1]):
        group = dist.new_group(ranks)
        if RANK in ranks:
            tensor = on_device(1)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == len(ranks)
    dist.barrier()
    assert dist.get_backend() == "zapccl"
    assert dist.Backend.default_device_backend_map["zap"] == "zapccl"


def distributed_data_parallel() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 3), nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    parallel = nn.parallel.DistributedDataParallel(model.to(DEVICE), device_ids=[RANK])
    x = torch.arange(8.0).view(2, 4) / 8
    parallel(x[RANK : RANK + 1].to(DEVICE)).square().mean().backward()
    twin(x).square().mean().backward()
    assert torch.allclose(model.weight.grad.cpu(), twin.weight.grad, rtol=1e-5, atol=1e-6)


def fully_sharded() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 3), nn.Linear(4, 3)
    twin.load_state_dict(model.state_dict())
    sharded = fully_shard(model.to(DEVICE))
    sharded.set_allocate_memory_from_process_group_for_comm(True)
    x = torch.arange(8.0).view(2, 4) / 8
    sharded(x[RANK : RANK + 1].to(DEVICE)).square().mean().backward()
    twin(x).square().mean().backward()
    assert torch.allclose(model.weight.grad.full_tensor().cpu(), twin.weight.grad, rtol=1e-5, atol=1e-6)


def checkpoints() -> None:
    """Saved while the program goes on, and given to all ranks by one."""
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder, 0)
    state = {"x": torch.arange(4.0, device=DEVICE)}
    checkpoint.async_save(state, checkpoint_id=folder[0]).result()
    found = {"x": torch.zeros(4, device=DEVICE)}
    checkpoint.load(found, checkpoint_id=folder[0])
    assert found["x"].tolist() == [0, 1, 2, 3]
    model = fully_shard(nn.Linear(4, 4).to(DEVICE))
    ones = {"weight": torch.ones(4, 4), "bias": torch.ones(4)} if RANK == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, ones, options=options)
    assert model.weight.full_tensor().sum().item() == 16


for check in (
    reductions,
    broadcasts_gathers_scatters,
    into_one_tensor,
    coalesced,
    point_to_point,
    groups,
    distributed_data_parallel,
    fully_sharded,
    checkpoints,
):
    check()
    sys.stdout.write(f"rank {RANK}: {check.__name__} holds\n")
