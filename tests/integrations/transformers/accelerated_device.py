"""A program: models on a simulated device, plain and on our ops, which have no kernels there; prints what came of it.

It is a process of its own, because torch takes one name for a device in each.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers

from counted_calls import CountedCalls
from ds_plugin_sdk import simulator
from ds_plugin_sdk.integrations.transformers import accelerate

DEVICE = "zap"
STEPS = 12
PADDED = (5, 0, 1)  # of the rows of a batch, on the left

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 160}
_LLAMA = {**_SIZES, "intermediate_size": 112, "num_key_value_heads": 2, "initializer_range": 0.2}
MODELS: dict[str, transformers.PreTrainedConfig] = {
    "gpt2": transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=160, initializer_range=0.2, bos_token_id=1, eos_token_id=2
    ),
    "opt": transformers.OPTConfig(**_SIZES, ffn_dim=128, word_embed_proj_dim=64, init_std=0.2),
    "llama": transformers.LlamaConfig(**_LLAMA),
    "qwen3": transformers.Qwen3Config(**_LLAMA, head_dim=16),
}


def generate(model: transformers.PreTrainedModel) -> Any:
    """Greedy: a prompt of rows of different lengths, and some steps."""
    ids = torch.randint(3, 160, (len(PADDED), 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, count in enumerate(PADDED):
        mask[row, :count] = 0
    return model.generate(
        ids.to(model.device),
        attention_mask=mask.to(model.device),
        max_new_tokens=STEPS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )


def layout(model: transformers.PreTrainedModel) -> dict[str, tuple[Any, ...]]:
    """All that a model consists of, to be compared."""
    parameters = {
        name: (value.device.type, value.stride(), value.detach().cpu().flatten().tolist())
        for name, value in model.named_parameters()
    }
    replaced = [name for name, module in model.named_modules() if "forward" in vars(module)]
    return {**parameters, "else": (replaced, model.config._attn_implementation)}


def run(config: transformers.PreTrainedConfig) -> dict[str, Any]:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    on_the_cpu = generate(model)
    model.to(DEVICE)
    before = layout(model)
    handle = accelerate(model)
    with (counted := CountedCalls()):
        ours = generate(model)
    devices = sorted({parameter.device.type for parameter in model.parameters()})
    handle.remove()
    restored = layout(model) == before
    with (none := CountedCalls()):
        after = generate(model)
    with accelerate(model, weights="int8"):
        quantized = generate(model)
    with accelerate(model, cache="int8"), CountedCalls() as counted_int8:
        int8_cache = generate(model)
    return {
        "expected": on_the_cpu.sequences.tolist(),
        "ours": ours.sequences.tolist(),
        "after": after.sequences.tolist(),
        "calls": counted.calls,
        "calls_after": none.calls,
        "devices": devices,
        "devices_of_calls": sorted(counted.devices),
        "restored": restored,
        "int8_error": float((quantized.logits[0].cpu() - on_the_cpu.logits[0]).abs().mean()),
        "int8_cache_error": float((int8_cache.logits[0].cpu() - on_the_cpu.logits[0]).abs().mean()),
        "int8_cache_calls": counted_int8.calls,
    }


def main() -> None:
    simulator.install(DEVICE, memory_mb=64)
    sys.stdout.write(json.dumps({name: run(config) for name, config in MODELS.items()}) + "\n")


if __name__ == "__main__":
    main()
