"""A program, one process of each rank: models divided among all ranks by DeepSpeed, with its kernel injection.

Writes the tokens of each model, and transformers' own, as JSON to ``<the file it is given>.<rank>``. It needs the
transformers that DeepSpeed's layers are written for, so the tests have those in its path.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from kernel_injection import NEW_TOKENS, CountedCalls, batch, models

MODELS = ("gpt2", "opt")


def tokens(model: Any, inputs: dict[str, torch.Tensor]) -> list[list[int]]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    return model.generate(**inputs, **options).tolist()


@torch.no_grad()
def main(out: str) -> None:
    transformers.logging.set_verbosity_error()
    deepspeed.init_distributed("gloo", verbose=False)
    rank, size = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    result: dict[str, Any] = {}
    whole = {name: model.eval() for name, model in models().items() if name in MODELS}
    torch.manual_seed(1)
    inputs = batch()
    for name, model in whole.items():
        engine = deepspeed.init_inference(
            copy.deepcopy(model),
            dtype=torch.float32,
            tensor_parallel={"tp_size": size},
            replace_with_kernel_inject=True,
        )
        with (counted := CountedCalls()):
            ours = tokens(engine, inputs)
        # What this rank holds of the products: nothing is divided if a rank holds it all.
        held = sum(p.numel() for p in engine.module.parameters() if p.dim() > 1)
        full = sum(p.numel() for p in model.parameters() if p.dim() > 1)
        result[name] = {
            "tokens": ours,
            "expected_tokens": tokens(model, inputs),
            "calls": counted.calls,
            "held": held / full,
        }
    Path(f"{out}.{rank}").write_text(json.dumps(result), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
