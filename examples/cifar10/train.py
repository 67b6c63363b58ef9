"""Train a small convolutional net on CIFAR-10's kind of images with DeepSpeed, with a mixture of experts if asked.

    deepspeed --num_accelerators 2 examples/cifar10/train.py
    deepspeed --num_accelerators 2 examples/cifar10/train.py --moe --ep-world-size 2

This is a plain DeepSpeed script: it runs on whatever accelerator DeepSpeed finds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import deepspeed
import images
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from images import Images
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

HERE = Path(__file__).resolve().parent


class Net(nn.Module):
    """Two convolutions, and two linear layers; with experts, each image goes through one of several in between."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.hidden = nn.Linear(32 * 8 * 8, 84)
        self.experts = None
        if args.moe:
            self.experts = MoE(
                hidden_size=84,
                expert=nn.Sequential(nn.Linear(84, 168), nn.ReLU(), nn.Linear(168, 84)),
                num_experts=args.num_experts,
                ep_size=args.ep_world_size,
                k=args.top_k,
                min_capacity=4,
                use_residual=False,
                noisy_gate_policy=None,
            )
        self.classes = nn.Linear(84, 10)

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [batch, 10] for `pictures` [batch, 3, 32, 32], and how unevenly the experts are used."""
        hidden = functional.relu(self.hidden(self.features(pictures)))
        uneven = hidden.new_zeros(())
        if self.experts is not None:
            mixed, uneven, _ = self.experts(hidden)
            hidden = hidden + mixed
        return self.classes(hidden), uneven


def main() -> None:
    args = parse_arguments()
    started = time.perf_counter()
    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    torch.manual_seed(args.seed)
    train_set, held_out = images.load(args.data, args.images, args.images // 8)
    net = Net(args)
    parameters: Any = net.parameters()
    if args.moe:
        # Experts are averaged over the ranks that have the same ones, all else over all ranks.
        parameters = split_params_into_different_moe_groups_for_optimizer({"params": list(parameters), "name": "all"})
    engine, *_ = deepspeed.initialize(args=args, model=net, model_parameters=parameters)
    say(
        f"{sum(p.numel() for p in net.parameters()) / 1e3:.0f} k parameters on each of {dist.get_world_size()} ranks "
        f"of {type(get_accelerator()).__name__}, {torch.get_num_threads()} thread(s) each"
    )
    run = train(engine, train_set, held_out, args)
    run |= {
        "seconds": time.perf_counter() - started,
        "ranks": dist.get_world_size(),
        "accelerator": f"{type(get_accelerator()).__module__}.{type(get_accelerator()).__name__}",
    }
    if dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "metrics.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        draw(run, args.out / "accuracy.png")
    dist.barrier()
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="(%(default)s)")
    parser.add_argument("--eval-every", type=int, default=25, help="steps between evaluations (%(default)s)")
    parser.add_argument("--images", type=int, default=16000, help="to draw for training (%(default)s)")
    parser.add_argument("--data", type=Path, help="CIFAR-10's folder cifar-10-batches-bin, instead of drawn images")
    parser.add_argument("--moe", action="store_true", help="with experts")
    parser.add_argument("--ep-world-size", type=int, default=1, help="ranks that share the experts (%(default)s)")
    parser.add_argument("--num-experts", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--top-k", type=int, default=1, choices=[1, 2], help="experts for each image (%(default)s)")
    parser.add_argument("--seed", type=int, default=1234, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/cifar10"), help="folder for the results (%(default)s)")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(HERE / "ds_config.json"))
    return parser.parse_args()


def train(
    engine: deepspeed.DeepSpeedEngine, train_set: Images, held_out: Images, args: argparse.Namespace
) -> dict[str, Any]:
    """Run the steps; gives the mean loss of the ranks at each, and the accuracy on held-out images at some."""
    draws = torch.Generator().manual_seed(args.seed)
    losses: list[list[float]] = []
    accuracy = [[0, evaluate(engine, held_out)]]
    for step in range(1, args.steps + 1):
        count = engine.train_micro_batch_size_per_gpu() * dist.get_world_size()
        rows = share(torch.randint(len(train_set.classes), (count,), generator=draws))
        logits, uneven = engine(train_set.pictures[rows].to(engine.device))
        loss = functional.cross_entropy(logits, train_set.classes[rows].to(engine.device)) + 0.01 * uneven
        engine.backward(loss)
        engine.step()
        losses.append([step, mean_of_ranks(loss.detach())])
        if step % args.eval_every == 0 or step == args.steps:
            accuracy.append([step, evaluate(engine, held_out)])
            say(f"step {step:4}/{args.steps}   loss {losses[-1][1]:.4f}   accuracy {accuracy[-1][1]:6.1%}")
    return {"curves": {"loss": losses, "accuracy": accuracy}}


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, held_out: Images, batch: int = 250) -> float:
    """The share of held-out images whose class is the likeliest. Each rank looks at its part."""
    engine.eval()
    pictures, classes = share(held_out.pictures), share(held_out.classes)
    right = torch.zeros((), device=engine.device)
    for some, expected in zip(pictures.split(batch), classes.split(batch), strict=True):
        logits, _ = engine(some.to(engine.device))
        right += (logits.argmax(dim=1) == expected.to(engine.device)).sum()
    engine.train()
    return mean_of_ranks(right / len(classes))


def share(rows: Tensor) -> Tensor:
    """This rank's part of `rows`. All parts are of one length: ranks that share experts call them equally often."""
    return rows[: len(rows) // dist.get_world_size() * dist.get_world_size()][dist.get_rank() :: dist.get_world_size()]


def mean_of_ranks(value: Tensor) -> float:
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def draw(run: dict[str, Any], file: Path) -> None:
    """Accuracy against steps."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*run["curves"]["accuracy"], strict=True), "o-", color="#c2452d")
    axes.axhline(0.1, color="gray", linestyle="--", linewidth=1)
    axes.set(xlabel="step", ylabel="accuracy on held-out images (dashed: a guess)", ylim=(0, 1))
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=100)


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
