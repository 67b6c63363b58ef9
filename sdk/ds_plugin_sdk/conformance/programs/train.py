"""Unmodified DeepSpeed on the target: one of some ranks.

A training script as a user writes it, by DeepSpeed's public interface alone. Its argument is a list, in JSON, of tasks
with their parameters: ``[["losses", {"stage": 1}], ...]``. It gives ``{"done": ...}`` after each; or the ``failure``,
and ends.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch

from ds_plugin_sdk.accelerator import DeepSpeedAccelerator
from ds_plugin_sdk.conformance.programs import give, small_model
from ds_plugin_sdk.conformance.target import Target

# Small buckets, so that there are several of them.
_BUCKET = 300


def _config(
    *,
    stage: int,
    dtype: str = "float32",
    offload: str = "",
    accumulation: int = 1,
    clip: bool = False,
    overlap: bool = False,
    timers: bool = False,
    first_scale_power: int = 8,
) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": overlap,
        "reduce_bucket_size": _BUCKET,
        "allgather_bucket_size": _BUCKET,
        "stage3_prefetch_bucket_size": _BUCKET,
        "stage3_param_persistence_threshold": 16,
    }
    for what in filter(None, offload.split("+")):
        zero[f"offload_{what}"] = {"device": "cpu", "pin_memory": True}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": small_model.CLIP if clip else 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": small_model.LEARNING_RATE, "weight_decay": small_model.WEIGHT_DECAY},
        },
        "zero_optimization": zero,
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16", "initial_scale_power": first_scale_power, "hysteresis": 1},
        "wall_clock_breakdown": timers,
        "steps_per_print": 1 << 30,
    }


def _engine(**options: Any) -> Any:
    import deepspeed

    model = small_model.make()
    return deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        lr_scheduler=small_model.schedule,
        config=_config(**options),
    )[0]


def _train(engine: Any, steps: int = small_model.STEPS) -> list[float]:
    """The losses of this rank's first micro steps."""
    accumulation = engine.gradient_accumulation_steps()
    dtype = next(engine.module.parameters()).dtype
    losses = []
    for _ in range(steps):
        for micro_step in range(accumulation):
            x, classes = (part.to(engine.device) for part in small_model.batch(engine.global_rank, micro_step))
            loss = small_model.loss_of(engine(x.to(dtype)), classes)
            engine.backward(loss)
            engine.step()
            if micro_step == 0:
                losses.append(loss.item())
    return losses


def losses(target: Target, **options: Any) -> list[float]:
    """Train, and tell the losses."""
    engine = _engine(**options)
    if engine.device.type != target.device_type:
        raise RuntimeError(f"the engine trains on {engine.device}, not on {target.device_type}")
    return _train(engine)


def compiled(target: Target, **options: Any) -> list[float]:
    """The same with the model compiled by the accelerator's backend."""
    engine = _engine(**options)
    engine.compile()
    return _train(engine)


def scale(target: Target, **options: Any) -> dict[str, Any]:
    """Start with a loss scale that overflows: which steps were skipped, and where the scale ended."""
    engine = _engine(first_scale_power=40, **options)
    told = _train(engine, 40)
    return {"skipped": engine.skipped_steps, "scale": float(engine.optimizer.loss_scale), "losses": told}


def resumed(target: Target, **options: Any) -> dict[str, list[float]]:
    """Losses after a checkpoint: by the engine that wrote it, by another that read it, and by the first, gone back."""
    import torch.distributed as dist

    folder: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, 0)
    first = _engine(**options)
    _train(first, 3)
    first.save_checkpoint(folder[0], tag="here", client_state={"note": "kept"})
    second = _engine(**options)
    path, state = second.load_checkpoint(folder[0], tag="here")
    if path is None or state.get("note") != "kept":
        raise RuntimeError(f"load_checkpoint gave {path!r} and {state!r}")
    told = {"went on": _train(first, 3), "resumed": _train(second, 3)}
    first.load_checkpoint(folder[0], tag="here")
    return {**told, "gone back": _train(first, 3)}


def recomputed(target: Target) -> dict[str, list[float]]:
    """Gradients of a block with dropout, without and with DeepSpeed's activation checkpointing."""
    import deepspeed

    deepspeed.checkpointing.configure(None, partition_activations=False)
    block = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 16))
    block.to(target.device)
    host = torch.randn(8, 16)
    found: dict[str, list[float]] = {}
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "plain": block,
        "recomputed": lambda x: deepspeed.checkpointing.checkpoint(block, x),
    }
    for name, call in calls.items():
        target.accelerator.manual_seed(7)
        x = host.to(target.device, copy=True).requires_grad_()
        torch.autograd.backward(call(x).square().sum())
        assert x.grad is not None
        found[name] = x.grad.flatten().tolist()
    return found


_TASKS: dict[str, Callable[..., Any]] = {task.__name__: task for task in (losses, compiled, scale, resumed, recomputed)}


def main() -> None:
    target, tasks = Target.find(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    import deepspeed

    if not isinstance(target.accelerator, DeepSpeedAccelerator):  # one of DeepSpeed's own
        deepspeed.accelerator.set_accelerator(target.accelerator)
    deepspeed.init_distributed()
    for name, parameters in tasks:
        try:
            give({"done": _TASKS[name](target, **parameters)})
        except Exception as error:
            traceback.print_exc()
            give({"failure": f"{type(error).__name__}: {error}"})
            sys.stdout.flush()
            os._exit(1)  # threads of the backend may wait for another rank for ever
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
