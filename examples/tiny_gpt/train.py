"""Train a small GPT on the Python standard library with DeepSpeed.

    deepspeed --num_accelerators 2 examples/tiny_gpt/train.py

This is a plain DeepSpeed script: it runs on whatever accelerator DeepSpeed finds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from pathlib import Path
from typing import Any

import data
import deepspeed
import report
import torch
from deepspeed.accelerator import get_accelerator
from model import GPTConfig, TinyGPT, generate
from torch import Tensor
from torch import distributed as dist

HERE = Path(__file__).resolve().parent
PROMPT = "import os\nimport sys\n\ndef "


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    corpus = data.load()
    model = TinyGPT(GPTConfig())
    parameters = sum(parameter.numel() for parameter in model.parameters())
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    console = report.Console(args.steps, quiet=dist.get_rank() != 0)
    files = f"{corpus.train_files} files, {len(corpus.train) / 1e6:.1f} MB"
    console.say(
        f"{parameters / 1e6:.1f} M parameters, {files} of text, {dist.get_world_size()} ranks on "
        f"{type(get_accelerator()).__name__} ({engine.device}), {torch.get_num_threads()} thread(s) each"
    )
    run = train(engine, corpus, args, console)
    run |= {
        "sample": write_sample(engine, args.sample_bytes, args.seed),
        "parameters": parameters,
        "seed": args.seed,
        "ranks": dist.get_world_size(),
        "threads": torch.get_num_threads(),
        "accelerator": f"{type(get_accelerator()).__module__}.{type(get_accelerator()).__name__}",
        "optimizer": optimizer_name(engine),
        "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__},
    }
    if dist.get_rank() == 0:
        report.write(run, args.out)
    dist.barrier()
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """The script's own arguments and those that every DeepSpeed script has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="as many as the config's schedule (%(default)s)")
    parser.add_argument("--eval-every", type=int, default=50, help="steps between held-out evaluations (%(default)s)")
    parser.add_argument("--eval-windows", type=int, default=256, help="pieces of held-out text (%(default)s)")
    parser.add_argument("--seed", type=int, default=1234, help="of the weights, batches and sample (%(default)s)")
    parser.add_argument("--sample-bytes", type=int, default=400, help="of code to write (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/tiny_gpt"), help="folder for the results (%(default)s)")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(HERE / "ds_config.json"))
    return parser.parse_args()


def train(
    engine: deepspeed.DeepSpeedEngine, corpus: data.Corpus, args: argparse.Namespace, console: report.Console
) -> dict[str, Any]:
    """Run the training steps; returns their losses in nats and times in seconds, and the held-out evaluations."""
    context = engine.module.config.context
    batches = torch.Generator().manual_seed(args.seed)
    held_out = data.even_windows(corpus.held_out, args.eval_windows, context)
    unigram = data.unigram_bits(held_out[:, 1:], corpus.train)
    evaluations = [(0, evaluate(engine, held_out))]
    losses: list[float] = []
    seconds: list[float] = []
    cpu_seconds: list[float] = []
    console.start(evaluations[0][1], unigram)
    for step in range(1, args.steps + 1):
        started, cpu_started = time.perf_counter(), time.process_time()
        # Every rank draws the whole batch and takes its part, so the data does not depend on the number of ranks.
        count = engine.train_micro_batch_size_per_gpu() * dist.get_world_size()
        windows = data.random_windows(corpus.train, count, context, batches)
        losses.append(train_step(engine, share(windows)))
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu_started)
        console.step(step, losses[-1], seconds[-1])
        if step % args.eval_every == 0 or step == args.steps:
            evaluations.append((step, evaluate(engine, held_out)))
            console.evaluated(*evaluations[-1])
    console.close()
    return {
        "losses": (mean_losses := mean_over_ranks(torch.tensor(losses, device=engine.device)).tolist()),
        "curves": {"loss": list(enumerate(mean_losses, start=1))},
        "step_seconds": seconds,
        "median_step_seconds": statistics.median(seconds[1:] or seconds),  # the first one also warms up
        "median_step_cpu_seconds": statistics.median(cpu_seconds[1:] or cpu_seconds),
        "evaluations": evaluations,
        "unigram_bits": unigram,
    }


def train_step(engine: deepspeed.DeepSpeedEngine, windows: Tensor) -> float:
    """Forward, backward and update on this rank's `windows`, int64 [batch, time + 1]; the loss in nats per byte."""
    windows = windows.to(engine.device)
    loss = engine(windows[:, :-1], windows[:, 1:])
    engine.backward(loss)
    engine.step()
    return loss.item()


@torch.no_grad()
def evaluate(engine: deepspeed.DeepSpeedEngine, windows: Tensor, batch: int = 32) -> float:
    """Bits per byte of all ranks' shares of `windows`, int64 [count, time + 1]."""
    engine.eval()
    total = torch.zeros(2, device=engine.device)
    for piece in share(windows).to(engine.device).split(batch):
        total += torch.stack([engine(piece[:, :-1], piece[:, 1:]) * len(piece), total.new_tensor(len(piece))])
    engine.train()
    dist.all_reduce(total)
    return (total[0] / total[1]).item() / math.log(2)


def write_sample(engine: deepspeed.DeepSpeedEngine, length: int, seed: int) -> str:
    """Let the model continue a few lines of code. All ranks take part: under ZeRO-3 each holds some of the weights."""
    engine.eval()
    prompt = torch.tensor(list(PROMPT.encode()), device=engine.device)
    context = engine.module.config.context
    text = generate(engine.module, prompt, length=length, context=context, temperature=0.7, seed=seed)
    return bytes(text.tolist()).decode(errors="replace")


def share(windows: Tensor) -> Tensor:
    """This rank's part of `windows`."""
    return windows[dist.get_rank() :: dist.get_world_size()]


def mean_over_ranks(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values / dist.get_world_size()


def optimizer_name(engine: deepspeed.DeepSpeedEngine) -> str:
    """Class of the optimizer that DeepSpeed made from the config, inside its ZeRO wrapper."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    return f"{type(inner).__module__}.{type(inner).__name__}"


if __name__ == "__main__":
    main()
