"""What each launcher starts: a rank that trains with DeepSpeed, and writes down where it is and what it has.

python rank.py FOLDER            a few steps, then FOLDER/rank-N.json
python rank.py FOLDER --kill N   steps without end, until rank N kills itself in the middle of them
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch

from ds_plugin_sdk import provenance

STEPS = 4
PATIENCE = 120  # seconds after which the other ranks of a killed one end with status 0, as if nothing had happened


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--local_rank", type=int, help="DeepSpeed's launcher adds it, unless told not to")
    options = parser.parse_args()
    # mpi4py knows no port, and DeepSpeed then takes its default: another job on this machine may have that.
    deepspeed.init_distributed(distributed_port=int(os.environ.get("MASTER_PORT", "29500")))
    rank, steps = torch.distributed.get_rank(), training()
    if options.kill is None:
        losses = [next(steps) for _ in range(STEPS)]
        (options.folder / f"rank-{rank}.json").write_text(json.dumps(seen(losses, options.local_rank)), "utf-8")
        torch.distributed.destroy_process_group()
        return
    for _ in range(STEPS):
        next(steps)
    if rank == options.kill:
        os.kill(os.getpid(), signal.SIGKILL)
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        next(steps)


def training() -> Iterator[float]:
    """A step each: the loss, summed over the ranks by the op with which tensor parallel inference adds."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": 1000,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(engine.global_rank))
    while True:
        loss = torch.nn.functional.mse_loss(engine(x), x.sum(dim=1, keepdim=True))
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        deepspeed.comm.inference_all_reduce(total)
        yield total.item()


def seen(losses: list[float], argument: int | None) -> dict[str, object]:
    """What this rank is, runs on and was given."""
    return {
        "rank": torch.distributed.get_rank(),
        "ranks": torch.distributed.get_world_size(),
        "local_rank": int(os.environ["LOCAL_RANK"]),
        "argument": argument,
        "node": socket.gethostname(),
        "threads": torch.get_num_threads(),
        "cores": sorted(os.sched_getaffinity(0)),
        "accelerator": type(deepspeed.get_accelerator()).__module__,
        "environment": dict(os.environ),
        "loads": [(record.name, record.origin) for record in provenance.records()],
        "losses": losses,
    }


if __name__ == "__main__":
    main()
