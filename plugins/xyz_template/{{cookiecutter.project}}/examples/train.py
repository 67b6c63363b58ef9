"""Train a small transformer with unmodified DeepSpeed, on whatever accelerator it finds.

    python examples/train.py
    deepspeed --num_accelerators 2 examples/train.py --zero 3
    torchrun --nproc-per-node 2 examples/train.py --bf16

The task: continue a line of digits that counts up. The losses depend on the seed alone, not on the device.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed, nn

CONTEXT, DIGITS, WIDTH = 16, 10, 64


class Model(nn.Module):
    """Two causal transformer layers; forward gives the loss of predicting each next digit."""

    def __init__(self) -> None:
        super().__init__()
        self.digit = nn.Embedding(DIGITS, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, digits: Tensor) -> Tensor:
        x = self.digit(digits[:, :-1]) + self.place
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device, dtype=x.dtype)
        logits = self.head(self.layers(x, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), digits[:, 1:].flatten())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--zero", type=int, choices=range(4), help="ZeRO stage, instead of the config's")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint at the end")
    parser.add_argument("--resume", type=Path, help="folder of a checkpoint to resume from")
    parser.add_argument("--losses", type=Path, help="file for the losses, as JSON")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return parser.parse_args()


def configuration(args: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(Path(__file__).with_name("ds_config.json").read_text(encoding="utf-8"))
    if args.zero is not None:
        config["zero_optimization"]["stage"] = args.zero
    config["bf16"]["enabled"] = args.bf16
    return config


def batch(step: int, size: int) -> Tensor:
    """The batch of a step: int64 [size, CONTEXT + 1]. It depends on nothing but the step."""
    draw = torch.Generator().manual_seed(step)
    start = torch.randint(DIGITS, (size, 1), generator=draw)
    stride = torch.randint(1, 4, (size, 1), generator=draw)
    return (start + stride * torch.arange(CONTEXT + 1)) % DIGITS


def be_the_only_rank() -> None:
    """Say what a launcher would have said; under a launcher this changes nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in alone.items():
        os.environ.setdefault(name, str(value))


def main() -> None:
    args = parse_arguments()
    be_the_only_rank()
    torch.manual_seed(0)
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=configuration(args))
    done = 0
    if args.resume is not None:
        _, state = engine.load_checkpoint(str(args.resume))
        done = state["step"]
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    if rank == 0:
        print(f"training on {engine.device}, {ranks} rank(s), {type(get_accelerator()).__name__}")
    losses = []
    for step in range(done, done + args.steps):
        digits = batch(step, 16)[rank::ranks].to(engine.device)
        loss = engine(digits)
        engine.backward(loss)
        engine.step()
        total = loss.detach().float()
        distributed.all_reduce(total)
        losses.append(total.item() / ranks)
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:4d}  loss {losses[-1]:.4f}")
    if args.save is not None:
        engine.save_checkpoint(str(args.save), client_state={"step": done + args.steps})
    if rank == 0 and args.losses is not None:
        args.losses.write_text(json.dumps(losses), encoding="utf-8")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
