"""Trains a small model by unmodified DeepSpeed under every ZeRO stage, and by plain torch on the CPU beside it.

Started alone or by torchrun; rank 0 prints the largest relative difference of a loss for each stage.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from ds_plugin_sdk import TorchAccelerator, set_accelerator, simulator
from ds_plugin_sdk.losses import largest_difference

simulator.install("zap", memory_mb=1024)


class ZAP_Accelerator(TorchAccelerator):
    device_type = "zap"
    communication_backend = "zapccl"
    compile_backend = "aot_eager"


set_accelerator(ZAP_Accelerator())

import deepspeed  # noqa: E402  # after the accelerator, as a plugin's user has it
from deepspeed.accelerator import get_accelerator  # noqa: E402  # after the settings above

STEPS, RESUMED = 6, 2
BUCKET = 4096
CLIP = 0.5


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)


def plain_losses(size: int) -> list[float]:
    """Rank 0's losses, where all ranks' batches move the model."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        each = [nn.functional.mse_loss(model(x), y) for x, y in map(batch, range(size))]
        (sum(each) / size).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(each[0].item())
    return losses


def make_engine(stage: int) -> deepspeed.DeepSpeedEngine:
    model = make_model()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "reduce_bucket_size": BUCKET,
            "allgather_bucket_size": BUCKET,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_param_persistence_threshold": 16,
        },
        "gradient_clipping": CLIP,
        "steps_per_print": 1000,
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train(engine: deepspeed.DeepSpeedEngine, steps: int) -> list[float]:
    x, y = (tensor.to(engine.device) for tensor in batch(engine.global_rank))
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main(folder: Path) -> None:
    deepspeed.init_distributed()
    assert get_accelerator().device_name() == "zap"
    for stage in range(4):
        engine = make_engine(stage)
        assert engine.device.type == "zap"
        losses = train(engine, STEPS - RESUMED)
        engine.save_checkpoint(str(folder), tag=f"stage{stage}")
        losses += train(engine, RESUMED)
        again = make_engine(stage)
        again.load_checkpoint(str(folder), tag=f"stage{stage}")
        assert train(again, RESUMED) == losses[-RESUMED:], "a resumed run goes another way"
        if engine.global_rank == 0:
            expected = plain_losses(engine.world_size)
            assert losses[-1] < losses[0]
            worst = largest_difference(losses, expected, relative=True)
            sys.stdout.write(f"stage {stage}: {worst:.1e}\n")


if __name__ == "__main__":
    main(Path(sys.argv[-1]))  # DeepSpeed's launcher puts --local_rank before it
