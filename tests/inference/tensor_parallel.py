"""A program, one process of each rank: models divided by DeepSpeed between ranks 0 and 1, and again between 2 and 3.

GPT-2 and OPT by its kernel injection; LLaMA, which that does not fit, by its automatic tensor parallelism, whose layers
call ``inference_all_reduce``. Each pair of ranks has inputs of its own.

Writes what came of it as JSON to ``<the file it is given>.<rank>``. It needs the transformers that DeepSpeed's layers
are written for, so the tests have those in its path.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed import comm
from kernel_injection import NEW_TOKENS, SMALL, batch, models

from counted_calls import CountedCalls

INJECTED = ("gpt2", "opt")


@dataclass
class Pair:
    """What DeepSpeed asks for its group where the ranks have more than one model."""

    group: Any

    def get_model_parallel_group(self) -> Any:
        return self.group


def tensor_parallel() -> dict[str, Any]:
    """DeepSpeed's configuration: this rank and its partner."""
    if comm.get_world_size() == 2:
        return {"tp_size": 2}
    groups = [comm.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    own = groups[comm.get_rank() // 2]
    return {"tp_size": 2, "tp_group": own, "mpu": Pair(own)}


def llama() -> Any:
    usual = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **usual))


def tokens(model: Any, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    return model.generate(**inputs, **options).tolist()


class CountedSums:
    """Stands for ``inference_all_reduce`` and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0
        self._own = comm.inference_all_reduce
        comm.inference_all_reduce = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._own(*args, **kwargs)


@torch.no_grad()
def main(out: str) -> None:
    transformers.logging.set_verbosity_error()
    deepspeed.init_distributed("gloo", distributed_port=int(os.environ["MASTER_PORT"]), verbose=False)
    rank, config, sums = comm.get_rank(), tensor_parallel(), CountedSums()
    whole = {name: model for name, model in models().items() if name in INJECTED} | {"llama": llama()}
    torch.manual_seed(1 + rank // 2)
    inputs = batch()
    result: dict[str, Any] = {}
    for name, model in whole.items():
        model.eval()
        engine = deepspeed.init_inference(
            copy.deepcopy(model),
            dtype=torch.float32,
            tensor_parallel=config,
            replace_with_kernel_inject=name in INJECTED,
        )
        sums.calls = 0
        with (counted := CountedCalls()):
            ours = tokens(engine, inputs)
        # What this rank holds of the products: nothing is divided if a rank holds it all.
        held = sum(p.numel() for p in engine.module.parameters() if p.dim() > 1)
        full = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        result[name] = {
            "tokens": ours,
            "expected_tokens": tokens(model, inputs),
            "calls": counted.calls,
            "inference_all_reduce": sums.calls,
            "held": held / full,
        }
    Path(f"{out}.{rank}").write_text(json.dumps(result), encoding="utf-8")
    comm.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[-1])  # DeepSpeed's launcher puts --local_rank before it
