"""Trains a small model by ZeRO-3 under unmodified DeepSpeed, its states in memory or on NVMe, and prints the losses.

    nvme_worker.py DEVICE OFFLOAD FOLDER STEPS [checkpoint] [resume] [completed] [killed]

Completed: what DeepSpeed does not read of a checkpoint is read here. Killed: the process ends itself by SIGKILL in its
last step, while parameters or states are on their way to the disk.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

import torch
from torch import nn

device, offload, folder, steps, *words = sys.argv[1:]

if device == "zap":
    from ds_plugin_sdk import TorchAccelerator, set_accelerator, simulator

    simulator.install("zap", memory_mb=1024)

    class ZAP_Accelerator(TorchAccelerator):
        device_type = "zap"
        communication_backend = "zapccl"
        compile_backend = "aot_eager"

    set_accelerator(ZAP_Accelerator())

import deepspeed  # noqa: E402  # after the accelerator, as a plugin's user has it

from ds_plugin_sdk import provenance  # noqa: E402  # after the accelerator, too
from ds_plugin_sdk.integrations.deepspeed.modules.async_io import aio_handle  # noqa: E402  # after the accelerator, too

WIDTH, LAYERS = 512, 4  # DeepSpeed leaves tensors of less than a MiB in memory
moved = {"async_pread": 0, "async_pwrite": 0}
kill = False


def counted(name: str) -> None:
    """Count the bytes that a function of the handle moves; and be killed after it has begun, when it is time."""
    original = getattr(aio_handle, name)

    def call(self: aio_handle, buffer: torch.Tensor, *rest: object) -> int:
        moved[name] += buffer.nbytes
        result = original(self, buffer, *rest)
        if kill and name == "async_pwrite":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(aio_handle, name, call)


def config() -> dict[str, object]:
    where = {"device": offload, "nvme_path": folder, "pin_memory": False}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**where, "buffer_count": LAYERS + 2, "buffer_size": 2 * WIDTH * WIDTH},
            "offload_optimizer": {**where, "buffer_count": 4},
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": WIDTH * WIDTH,
            "stage3_prefetch_bucket_size": WIDTH * WIDTH,
            "reduce_bucket_size": WIDTH * WIDTH,
            "sub_group_size": WIDTH * WIDTH,
        },
        "aio": {"block_size": 1 << 18, "queue_depth": 8, "intra_op_parallelism": 2, "overlap_events": True},
        "steps_per_print": 1000,
    }


def complete() -> None:
    """Read Adam's steps and moments, and tensors of less than a MiB, from the checkpoint, which has them all."""
    (file,) = checkpoints.glob("*/*_optim_states.pt")
    saved = torch.load(file, weights_only=False)["optimizer_state_dict"]
    zero = engine.optimizer
    for index, weights in enumerate(zero.fp32_partitioned_groups_flat):
        state = zero.optimizer.state[weights] = saved["optimizer_state_dict"]["state"][index]
        if zero._swappable_optimizer_subgroup(index):
            # DeepSpeed has copied their files to where it will look for the moments of this optimizer, if it has any.
            for moment in ("exp_avg", "exp_avg_sq"):
                state[moment] = torch.empty(zero.fp16_partitioned_groups_flat_numel[index])
        else:
            weights.data.copy_(saved["fp32_flat_groups"][index])
            zero._reassign_or_swap_out_partitioned_parameters(index)


for function in moved:
    counted(function)
torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=config()):
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers)
engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config())[0]
checkpoints = Path(f"{folder}-checkpoints")
done = 0
if "resume" in words:
    _, state = engine.load_checkpoint(str(checkpoints))
    done = state["done"]
if "completed" in words:
    complete()
losses = []
for step in range(done, int(steps)):
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(4, WIDTH, generator=generator).to(engine.device) for _ in range(2))
    loss = nn.functional.mse_loss(engine(x), y)
    engine.backward(loss)
    kill = "killed" in words and step == int(steps) - 1
    engine.step()
    losses.append(loss.item())
    if "checkpoint" in words and step == 1:
        engine.save_checkpoint(str(checkpoints), client_state={"done": step + 1})
origins = {record.name: record.origin for record in provenance.records()}
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
found = {"losses": losses, "moved": moved, "origin": origins.get("async_io"), "peak_mib": peak}
print(json.dumps(found), file=sys.stdout)  # noqa: T201  # the answer to the test
