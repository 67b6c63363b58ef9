"""Train a GPT-2 with transformers' Trainer and DeepSpeed, on the documentation that Python brings along.

    cd examples/gpt2_trainer
    deepspeed --num_accelerators 2 train.py --deepspeed zero2.json --out out
    deepspeed --num_accelerators 2 train.py --deepspeed zero2.json --out out-resumed --resume out/checkpoint-40

Plain transformers and DeepSpeed: it runs on whatever accelerator DeepSpeed finds.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
from deepspeed.accelerator import get_accelerator
from torch.utils.data import Dataset
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Windows(Dataset):
    """The language's reference as bytes, in pieces of `length` tokens: `held_out` of one in ten, or all others."""

    def __init__(self, tokenizer: ByT5Tokenizer, length: int, *, held_out: int = 0) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        tokens = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        pieces = tokens[: len(tokens) // length * length].view(-1, length)
        last = torch.arange(len(pieces)) % 10 == 9
        self.pieces = pieces[last][:held_out] if held_out else pieces[~last]

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


def main() -> None:
    args = parse_arguments()
    started = time.perf_counter()
    set_seed(args.seed)
    training = TrainingArguments(
        output_dir=str(args.out),
        deepspeed=str(args.deepspeed),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=1e-3,
        warmup_steps=10,
        logging_steps=1,
        save_steps=args.steps // 2,
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=get_accelerator().device_name() == "cpu",
        seed=args.seed,
    )
    tokenizer = ByT5Tokenizer(extra_ids=0)  # a token is a byte: no vocabulary to fetch
    model = load_model(args, tokenizer)
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=Windows(tokenizer, args.length),
        eval_dataset=Windows(tokenizer, args.length, held_out=args.held_out),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=None if args.resume is None else str(args.resume))
    trainer.save_model(str(args.out / "model"))
    held_out = trainer.evaluate()["eval_loss"]
    losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    run = {
        "curves": {"loss": sorted(losses.items())},
        "held_out_loss": held_out,
        "seconds": time.perf_counter() - started,
        "ranks": training.world_size,
        "accelerator": f"{type(get_accelerator()).__module__}.{type(get_accelerator()).__name__}",
    }
    if trainer.is_world_process_zero():
        print(f"loss of held-out text: {held_out:.4f} nats per byte")
        (args.out / "metrics.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")
        if args.resume is not None:
            compare(losses, args.resume)
    torch.distributed.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed", type=Path, required=True, help="DeepSpeed's configuration")
    parser.add_argument("--model", type=Path, help="folder of a GPT-2 to start from (a tiny one with random weights)")
    parser.add_argument("--steps", type=int, default=80, help="with a checkpoint half way (%(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a piece of text (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="pieces of each rank in a step (%(default)s)")
    parser.add_argument("--held-out", type=int, default=64, help="pieces to evaluate on at the end (%(default)s)")
    parser.add_argument("--resume", type=Path, help="checkpoint of an earlier run, whose later losses are compared")
    parser.add_argument("--seed", type=int, default=1234, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/gpt2_trainer"), help="folder for results (%(default)s)")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return parser.parse_args()


def load_model(args: argparse.Namespace, tokenizer: ByT5Tokenizer) -> GPT2LMHeadModel:
    if args.model is not None:
        return GPT2LMHeadModel.from_pretrained(args.model, local_files_only=True)
    end = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return GPT2LMHeadModel(GPT2Config(vocab_size=264, n_positions=256, n_embd=128, n_layer=4, n_head=4, **end))


def compare(losses: dict[int, float], checkpoint: Path) -> None:
    """Say how far a resumed run's losses are from those of the run that wrote its checkpoint and went on."""
    earlier = dict(json.loads((checkpoint.parent / "metrics.json").read_text(encoding="utf-8"))["curves"]["loss"])
    begun = int(checkpoint.name.rpartition("-")[2])
    differences = [abs(losses[step] - earlier[step]) for step in losses if step > begun]
    apart = max(differences) if all(map(math.isfinite, differences)) else math.inf  # max alone can miss a NaN
    print(
        f"steps {begun + 1} to {max(losses)}, resumed and uninterrupted: the largest difference of a loss is {apart:g}"
    )


if __name__ == "__main__":
    main()
