"""Small causal language models of transformers, with random weights, and what their tests ask of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers

_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "initializer_range": 0.2}
CONFIGS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=96, initializer_range=0.2, bos_token_id=1, eos_token_id=2
    ),
    "llama": lambda: transformers.LlamaConfig(**LLAMA),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA),
    "phi3": lambda: transformers.Phi3Config(**LLAMA, **_SPECIAL),
    "glm": lambda: transformers.GlmConfig(**LLAMA, head_dim=8, attention_bias=True, **_SPECIAL),
    "glm4": lambda: transformers.Glm4Config(**LLAMA, head_dim=8, attention_bias=True, **_SPECIAL),
    "granite": lambda: transformers.GraniteConfig(
        **LLAMA, residual_multiplier=0.6, attention_multiplier=0.3, attention_bias=True, mlp_bias=True, **_SPECIAL
    ),
    "olmo2": lambda: transformers.Olmo2Config(**LLAMA, attention_bias=True, **_SPECIAL),
    "olmo3": lambda: transformers.Olmo3Config(
        **LLAMA, sliding_window=4, layer_types=["sliding_attention", "full_attention"], **_SPECIAL
    ),
    "exaone4": lambda: transformers.Exaone4Config(
        **LLAMA, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"], **_SPECIAL
    ),
    "phi": lambda: transformers.PhiConfig(**LLAMA, resid_pdrop=0.5, qk_layernorm=True, **_SPECIAL),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        **_SIZES, intermediate_size=48, initializer_range=0.2, hidden_dropout=0.5, **_SPECIAL
    ),
    "stablelm": lambda: transformers.StableLmConfig(
        **LLAMA, use_parallel_residual=True, hidden_dropout=0.5, use_qkv_bias=True, **_SPECIAL
    ),
    "ernie4_5": lambda: transformers.Ernie4_5Config(**LLAMA, head_dim=8, use_bias=True),
    "seed_oss": lambda: transformers.SeedOssConfig(**LLAMA, head_dim=8, residual_dropout=0.5, **_SPECIAL),
    "smollm3": lambda: transformers.SmolLM3Config(**LLAMA, no_rope_layers=[0, 1], attention_bias=True, **_SPECIAL),
    "starcoder2": lambda: transformers.Starcoder2Config(**LLAMA, residual_dropout=0.5, **_SPECIAL),
    "opt": lambda: transformers.OPTConfig(**_SIZES, ffn_dim=64, init_std=0.2, word_embed_proj_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(
        **LLAMA, head_dim=8, attn_logit_softcapping=2.0, query_pre_attn_scalar=8, sliding_window=4
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **LLAMA, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**LLAMA, "num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=4,
        first_k_dense_replace=2,
    ),
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for parameter in model.parameters():  # sinks and biases are zero at first
        if not parameter.any():
            nn.init.normal_(parameter)
    model.generation_config.eos_token_id = None
    return model


def tokens(rows: int = 2, count: int = 9) -> torch.Tensor:
    return torch.randint(3, 96, (rows, count), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any, **options: Any) -> torch.Tensor:
    result: torch.Tensor = model(tokens(), **options).logits
    return result


def assert_as_plain(model: Any, ours: torch.Tensor | None = None) -> None:
    """That an accelerated model has the logits of one with the same parameters and modules that is not."""
    ours = logits(model) if ours is None else ours
    torch.testing.assert_close(ours, logits(copy.deepcopy(model)), rtol=1e-3, atol=1e-3)


def prompt_and_step(model: Any, cache: Any) -> torch.Tensor:
    first = logits(model, past_key_values=cache)
    with torch.no_grad():
        second = model(tokens(count=1), past_key_values=cache).logits
    return torch.cat([first, second], 1)


def steps(model: Any, change: Callable[[Any], None] | None, layer: int = 1) -> torch.Tensor:
    """The logits of a prompt's third token, before which a layer was changed."""
    cache = transformers.DynamicCache()
    logits(model, past_key_values=cache)
    with torch.no_grad():
        for _ in range(2):
            model(tokens(count=1), past_key_values=cache)
        if change is not None:
            torch.manual_seed(1)
            change(model.model.layers[layer].self_attn)
        result: torch.Tensor = model(tokens(count=1), past_key_values=cache).logits
    return result


def halved(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose result is half of another one's: of several, the first."""

    def half(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return (result[0] / 2, *result[1:]) if isinstance(result, tuple) else result / 2

    return half
