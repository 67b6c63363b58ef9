"""Fine-tune an OPT with DeepSpeed: on text, on questions with answers, or by LoRA.

    deepspeed --num_accelerators 2 examples/opt_sft/train.py --config examples/opt_sft/zero3.json --data text

This is a plain DeepSpeed script: it runs on whatever accelerator DeepSpeed finds. Without --model it starts from a tiny
OPT with random weights, whose tokens are bytes; with it, from a folder that transformers can read.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data
import deepspeed
import lora
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch import distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, OPTConfig
from transformers.integrations import HfDeepSpeedConfig

WARM_UP = 2  # steps that the throughput leaves out


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    deepspeed.init_distributed(get_accelerator().communication_backend_name())
    config = read_config(args)
    # While this lives, transformers makes and reads models in parts, as ZeRO-3 holds them: none is whole anywhere.
    partition = HfDeepSpeedConfig(config)
    tokenizer, model = load_model(args)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()  # frozen embeddings give no gradient, and checkpoints want one
    if args.lora:
        lora.add(model, args.lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
    del partition
    say(
        f"{sizes(model.parameters())} parameters, {sizes(trained)} of them trained, on {dist.get_world_size()} ranks "
        f"of {type(get_accelerator()).__name__}, {torch.get_num_threads()} thread(s) each; {optimizer_name(engine)}"
    )
    run = train(engine, data.encode(data.load(args.data), tokenizer, args.length), args)
    say(f"throughput: {run['samples_per_second']:.2f} samples/s")
    save(engine, tokenizer, run, args)
    dist.barrier()
    dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="DeepSpeed's configuration")
    parser.add_argument("--data", choices=["text", "answers", "names"], default="text", help="(%(default)s)")
    parser.add_argument(
        "--model", type=Path, help="folder of a model to go on from, such as a copy of facebook/opt-350m"
    )
    parser.add_argument("--steps", type=int, default=60, help="(%(default)s)")
    parser.add_argument("--length", type=int, default=128, help="tokens of an example (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="examples of each rank in a step (%(default)s)")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train LoRA of this rank alone (off)")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="compute activations twice, keep few")
    parser.add_argument("--nvme", type=Path, help="folder for what the configuration offloads to NVMe (OUT/nvme)")
    parser.add_argument("--seed", type=int, default=1234, help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/opt_sft"), help="folder for the results (%(default)s)")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return parser.parse_args()


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    config = json.loads(args.config.read_text(encoding="utf-8"))
    config["train_micro_batch_size_per_gpu"] = args.batch
    for part in ("offload_optimizer", "offload_param"):
        offload = config["zero_optimization"].get(part, {})
        if offload.get("device") == "nvme":
            offload["nvme_path"] = str(args.nvme or args.out / "nvme")
            Path(offload["nvme_path"]).mkdir(parents=True, exist_ok=True)
    return config


def load_model(args: argparse.Namespace) -> tuple[Any, Any]:
    if args.model:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
        return tokenizer, AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True, dtype=torch.float32)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    size = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 512, "num_hidden_layers": 4}
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = OPTConfig(vocab_size=264, num_attention_heads=4, max_position_embeddings=256, **size, **tokens)
    return tokenizer, AutoModelForCausalLM.from_config(config)


def train(engine: deepspeed.DeepSpeedEngine, examples: dict[str, Tensor], args: argparse.Namespace) -> dict[str, Any]:
    """Run the steps; gives their losses, the mean of all ranks, and the samples a second of all ranks."""
    losses: list[Tensor] = []
    started = time.perf_counter()
    for step, batch in enumerate(batches(examples, args), start=1):
        loss = engine(**{name: part.to(engine.device) for name, part in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        dist.all_reduce(losses[-1])
        losses[-1] /= dist.get_world_size()
        if step == WARM_UP:
            started = time.perf_counter()
        if step % 10 == 0 or step in (1, args.steps):
            say(f"step {step:4}/{args.steps}   loss {losses[-1].item():.4f}")
    seconds = time.perf_counter() - started
    return {
        "curves": {"loss": [[step, loss.item()] for step, loss in enumerate(losses, start=1)]},
        "samples_per_second": (len(losses) - WARM_UP) * args.batch * dist.get_world_size() / seconds,
        "ranks": dist.get_world_size(),
        "accelerator": f"{type(get_accelerator()).__module__}.{type(get_accelerator()).__name__}",
        "optimizer": optimizer_name(engine),
    }


def batches(examples: dict[str, Tensor], args: argparse.Namespace) -> Iterator[dict[str, Tensor]]:
    """This rank's part of each step's examples: every rank draws the whole step and takes its own."""
    draws = torch.Generator().manual_seed(args.seed)
    count = len(examples["input_ids"])
    for _ in range(args.steps):
        rows = torch.randint(count, (args.batch * dist.get_world_size(),), generator=draws)
        own = rows[dist.get_rank() :: dist.get_world_size()]
        yield {name: column[own] for name, column in examples.items()}


def save(engine: deepspeed.DeepSpeedEngine, tokenizer: Any, run: dict[str, Any], args: argparse.Namespace) -> None:
    """The figures, and the model for the next stage or for `generate`; of LoRA what was trained."""
    if args.lora:
        own = {name: parameter for name, parameter in engine.module.named_parameters() if "lora_" in name}
        with deepspeed.zero.GatheredParameters(list(own.values())):
            whole = {name: parameter.detach().clone() for name, parameter in own.items()}
    else:
        engine.save_16bit_model(str(args.out), "pytorch_model.bin")  # all ranks gather it, in the dtype of training
    if dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        if args.lora:
            torch.save(whole, args.out / "lora.pt")
        else:
            engine.module.config.save_pretrained(args.out)
            tokenizer.save_pretrained(args.out)
        (args.out / "metrics.json").write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def optimizer_name(engine: deepspeed.DeepSpeedEngine) -> str:
    """Class of the optimizer that DeepSpeed made from the config, inside its ZeRO wrapper."""
    return type(getattr(engine.optimizer, "optimizer", engine.optimizer)).__name__


def sizes(parameters: Any) -> str:
    """How many numbers there are, in millions. Of a parameter that ZeRO-3 has divided this rank has a part only."""
    return f"{sum(getattr(parameter, 'ds_numel', parameter.numel()) for parameter in parameters) / 1e6:.2f} M"


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


if __name__ == "__main__":
    main()
