"""A program, one process of each of two ranks: models that DeepSpeed's AutoTP divides, plain and accelerated.

Writes what came of it as JSON to ``<the file it is given>.<rank>``.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from deepspeed import comm

from counted_calls import CountedCalls
from ds_plugin_sdk.integrations.transformers import accelerate

STEPS = 6
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 160}
_LLAMA = {**_SIZES, "intermediate_size": 128, "num_key_value_heads": 2, "initializer_range": 0.2}
MODELS: dict[str, transformers.PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**_LLAMA),
    "opt": transformers.OPTConfig(
        **_SIZES, ffn_dim=128, word_embed_proj_dim=64, init_std=0.2, max_position_embeddings=32
    ),
}


def logits(model: Any) -> torch.Tensor:
    """Of a prompt with padding and greedy steps after it: ``[steps, rows, vocabulary]``."""
    ids = torch.randint(3, 160, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    options = {"max_new_tokens": STEPS, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return torch.stack(model.generate(ids, attention_mask=mask, pad_token_id=0, eos_token_id=None, **options).logits)


def divided(model: Any) -> Any:
    """What a rank has of the model."""
    return deepspeed.init_inference(model, dtype=torch.float32, tensor_parallel={"tp_size": 2}).module


def run(config: transformers.PreTrainedConfig) -> dict[str, Any]:
    torch.manual_seed(0)
    whole = transformers.AutoModelForCausalLM.from_config(config).eval()
    expected, parameters = logits(whole), sum(parameter.numel() for parameter in whole.parameters())
    model = divided(copy.deepcopy(whole))
    plain = logits(model)
    with accelerate(model) as handle, CountedCalls() as counted:
        ours = logits(model)
    accelerate(whole)
    before = logits(divided(whole))
    return {
        "plain": float((plain - expected).abs().max()),
        "accelerated after": float((ours - expected).abs().max()),
        "accelerated before": float((before - expected).abs().max()),
        "calls": counted.calls,
        "layers": handle.layers,
        "left": sorted(set(handle.left.values())),
        "held": sum(parameter.numel() for parameter in model.parameters()) / parameters,
    }


def main(out: str) -> None:
    transformers.logging.set_verbosity_error()
    deepspeed.init_distributed("gloo", distributed_port=int(os.environ["MASTER_PORT"]), verbose=False)
    found = {name: run(config) for name, config in MODELS.items()}
    Path(f"{out}.{comm.get_rank()}").write_text(json.dumps(found), encoding="utf-8")
    comm.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[-1])
