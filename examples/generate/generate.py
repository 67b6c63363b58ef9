"""Generate text with an OPT: by transformers alone, and by what makes it faster or divides it among ranks.

    python examples/generate/generate.py --by sdk
    python examples/generate/generate.py --by injection                              # with transformers 4.43.4
    deepspeed --num_accelerators 2 examples/generate/generate.py --by injection      # each rank has half of each layer
    deepspeed --num_accelerators 2 examples/generate/generate.py --by autotp

The way `sdk` imports this project's integration of transformers; all others are plain DeepSpeed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, OPTConfig

RUNS = 3


def main() -> None:
    args = parse_arguments()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        deepspeed.init_distributed(get_accelerator().communication_backend_name())
    tokenizer, model = load(args)
    device = get_accelerator().current_device_name()
    inputs = tokenizer(args.prompt, add_special_tokens=False, return_tensors="pt").to(device)
    plain, plain_rate = generate(model.to(device), inputs, args)
    fast, rate = generate(prepare(copy.deepcopy(model), ranks, args), inputs, args)
    if int(os.environ.get("RANK", "0")) == 0:
        report(
            tokenizer.decode(fast, skip_special_tokens=True), torch.equal(plain, fast), plain_rate, rate, ranks, args
        )
    if comm.is_initialized():
        comm.barrier()
        comm.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by", choices=["injection", "autotp", "sdk"], required=True)
    parser.add_argument("--model", type=Path, help="folder of an OPT, such as what opt_sft made (random weights)")
    parser.add_argument("--prompt", default="Q: What does json.dumps do?\nA: ")
    parser.add_argument("--tokens", type=int, default=64, help="to generate (%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="(%(default)s)")
    parser.add_argument("--width", type=int, default=512, help="of the OPT with random weights (%(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="of the same (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder for metrics.json (none)")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return parser.parse_args()


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    dtype = getattr(torch, args.dtype)
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
        return tokenizer, AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True).to(dtype).eval()
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    size = {"hidden_size": args.width, "word_embed_proj_dim": args.width, "ffn_dim": 4 * args.width}
    heads = {"num_hidden_layers": args.layers, "num_attention_heads": args.width // 64, "init_std": 0.1}
    # No token without a byte: random weights choose any.
    config = OPTConfig(vocab_size=len(tokenizer), pad_token_id=0, max_position_embeddings=256, **size, **heads)
    return tokenizer, AutoModelForCausalLM.from_config(config).to(dtype).eval()


def prepare(model: Any, ranks: int, args: argparse.Namespace) -> Any:
    """The model as it generates: with other kernels, or with each layer divided among the ranks."""
    if args.by != "sdk" or ranks > 1:
        engine = deepspeed.init_inference(
            model,
            dtype=getattr(torch, args.dtype),
            tensor_parallel={"tp_size": ranks},
            replace_with_kernel_inject=args.by == "injection",
        )
        model = engine.module
    if args.by == "sdk":
        from ds_plugin_sdk.integrations.transformers import accelerate

        accelerate(model)
    return model


def generate(model: Any, inputs: dict[str, Tensor], args: argparse.Namespace) -> tuple[Tensor, float]:
    """The likeliest tokens, int64 [prompt + new], and how many new ones in a second; the first run warms up."""
    seconds = []
    for _ in range(1 + RUNS):
        started = time.perf_counter()
        tokens = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=args.tokens,
            do_sample=False,
            eos_token_id=None,  # so that all ways generate equally many
            pad_token_id=0,
        )
        seconds.append(time.perf_counter() - started)
    return tokens[0], args.tokens / statistics.median(seconds[1:])


def report(text: str, same: bool, plain: float, rate: float, ranks: int, args: argparse.Namespace) -> None:
    print(text)
    print(
        f"--- {args.by} on {ranks} rank(s) of {type(get_accelerator()).__name__}, {torch.get_num_threads()} thread(s): "
        f"{rate:.1f} tokens/s; transformers alone {plain:.1f} tokens/s; {'the same' if same else 'OTHER'} tokens"
    )
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        run = {"by": args.by, "ranks": ranks, "tokens_per_second": rate, "plain_tokens_per_second": plain, "same": same}
        (args.out / "metrics.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
