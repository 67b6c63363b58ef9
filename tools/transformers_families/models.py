"""Every language model of the installed transformers, tiny and with random weights, made without a network."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # its dependencies warn of each other's releases
    import transformers
    from transformers.models.auto import modeling_auto

VOCABULARY = 128
MOST_PARAMETERS = 4_000_000

Kind = Literal["causal", "encoder-decoder", "encoder"]

# A field's name -> its size. The first whose part is in the name counts.
_SIZES: tuple[tuple[tuple[str, ...], int], ...] = (
    (("vocab_size", "vocabulary_size"), VOCABULARY),
    (("num_key_value_heads", "num_kv_heads", "kv_heads", "n_head_kv", "num_key_value_groups"), 2),
    (("experts_per_tok", "moe_topk", "moe_top_k", "num_selected_experts", "topk_group", "top_k_experts", "moe_k"), 1),
    (("n_group", "num_expert_group"), 1),
    (("first_k_dense_replace", "first_num_dense_layers", "num_dense_layers", "n_shared_experts"), 1),
    (("expert_dim", "moe_intermediate", "expert_intermediate", "expert_hidden", "shared_expert"), 32),
    (("num_experts", "n_routed_experts", "num_local_experts", "n_experts"), 4),
    (("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    (("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "linear_num"), 8),
    (("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 8),
    (("state_size", "d_state"), 8),
    (("num_heads", "attention_heads", "n_head", "num_attention_head", "encoder_attention_heads", "heads"), 4),
    (("global_head_dim", "head_dim", "d_kv", "kv_channels", "head_size"), 8),
    (("qk_rope", "qk_nope", "rotary_dim", "index_head_dim"), 8),
    (("v_head",), 4),
    (("index_topk", "index_n_heads"), 4),
    (("lora_rank", "rank"), 16),
    (("num_layers", "hidden_layers", "n_layer", "encoder_layers", "decoder_layers", "num_blocks"), 2),
    (("intermediate", "ffn", "d_ff", "n_inner", "ff_dim", "mlp_dim", "inner_dim", "feed_forward", "d_inner"), 64),
    (("sliding_window", "attention_window", "local_window", "window_size", "attention_chunk_size"), 5),
    (("embedding_size", "hidden_size", "d_model", "n_embd", "embed_dim", "emb_dim", "model_dim", "lru_width"), 32),
    (("max_position", "n_positions", "max_seq", "n_ctx"), 128),
)

# What else a family needs to be small or to be made at all.
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "ctrl": {"dff": 64},
    "codegen": {"rotary_dim": 4},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gptj": {"rotary_dim": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 5},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "distilbert": {"dim": 32, "hidden_dim": 64},
    "esm": {"vocab_size": 128, "pad_token_id": 0, "mask_token_id": 1},
    "led": {"attention_window": 4},
    "longformer": {"attention_window": 4},
    "reformer": {"axial_pos_embds": False},
}


_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _small(name: str, value: int) -> int:
    for parts, size in _SIZES:
        if any(part in name for part in parts):
            return min(value, size)
    return value


def shrunken(kind: type[transformers.PreTrainedConfig], family: str) -> transformers.PreTrainedConfig:
    """A tiny configuration: the default one, with its sizes made small by their names."""
    return kind(**{**_fields(kind(), kind), **_SPECIAL.get(family, {})})


def _fields(default: transformers.PreTrainedConfig, kind: type[transformers.PreTrainedConfig]) -> dict[str, Any]:
    given = set(getattr(kind, "__annotations__", {})) | set(kind.__init__.__code__.co_varnames)
    for base in kind.__mro__:
        given |= set(getattr(base, "__annotations__", {}))
    fields: dict[str, Any] = {}
    # One layer of each type.
    types = {name: list(dict.fromkeys(value)) for name, value in vars(default).items() if _are_types(name, value)}
    layers = max([2, *map(len, types.values())])
    for name, value in vars(default).items():
        if isinstance(value, transformers.PreTrainedConfig):
            fields[name] = type(value)(**_fields(value, type(value)))
        elif isinstance(value, bool) or name not in given or name.startswith("_"):
            continue
        elif name in types:
            fields[name] = (types[name] * layers)[:layers]
        elif name == "head_dim" and value is None:
            fields[name] = 8
        elif isinstance(value, int) and name.endswith("token_id"):
            fields[name] = min(value, 3)
        elif isinstance(value, int):
            small = min(value, layers) if name in _LAYERS else _small(name, value)
            if small != value:
                fields[name] = small
        elif isinstance(value, float) and any(part in name for part in ("dropout", "pdrop", "layerdrop")):
            fields[name] = 0.0
    if "kv_lora_rank" in given and "num_key_value_heads" in given:  # multi-head latent attention
        fields["num_key_value_heads"] = 4
    return fields


def _are_types(name: str, value: object) -> bool:
    return name.endswith("layer_types") and isinstance(value, list) and all(isinstance(each, str) for each in value)


@dataclass(frozen=True)
class Family:
    """A model type of transformers' automatic classes."""

    name: str
    kind: Kind
    model: str


def families() -> list[Family]:
    """All of them, a causal model's sort first where it has several."""
    found: dict[str, Family] = {}
    sources: tuple[tuple[Kind, Any], ...] = (
        ("causal", modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        ("encoder-decoder", modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES),
        ("encoder", modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES),
    )
    for kind, names in sources:
        for name, model in names.items():
            found.setdefault(f"{kind} {name}", Family(name, kind, model))
    # Encoder-decoders are among the causal ones by their decoders, and among the masked ones as themselves.
    both = {family.name for family in found.values() if family.kind == "encoder-decoder"}
    return [family for family in found.values() if family.kind != "encoder" or family.name not in both]


def make(family: Family, seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model with random weights that are so large that all parts matter.

    Raises:
        Exception: whatever the family raises that cannot be made so.
    """
    config = shrunken(transformers.CONFIG_MAPPING[family.name], family.name)
    if family.kind == "causal" and hasattr(config, "is_decoder"):
        config.is_decoder = True
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in _class(family)(config).parameters())
    if count > MOST_PARAMETERS:
        raise ValueError(f"{count / 1e6:.0f} million parameters")
    torch.manual_seed(seed)
    model = _class(family)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point():
                continue
            if parameter.dim() > 1:
                parameter.normal_(0, 0.7 / math.sqrt(max(parameter.shape[-1], 16)))
            elif not parameter.any():
                parameter.normal_(0, 0.2)
            elif (parameter == 1).all():
                parameter.add_(0.1 * torch.randn_like(parameter))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the other has no float64
    if family.kind == "encoder-decoder":
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 1
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        model.generation_config.forced_bos_token_id = model.generation_config.forced_eos_token_id = None
    return model.to(dtype)


def _class(family: Family) -> Any:
    return getattr(transformers, family.model)
