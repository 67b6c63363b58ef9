"""Decoder layers of the models that run whole: by the code that they run, not by their names."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.models.ernie4_5 import modeling_ernie4_5 as ernie4_5
from transformers.models.exaone4 import modeling_exaone4 as exaone4
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.glm import modeling_glm as glm
from transformers.models.glm4 import modeling_glm4 as glm4
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox
from transformers.models.granite import modeling_granite as granite
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.olmo2 import modeling_olmo2 as olmo2
from transformers.models.olmo3 import modeling_olmo3 as olmo3
from transformers.models.opt import modeling_opt as opt
from transformers.models.phi import modeling_phi as phi
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.seed_oss import modeling_seed_oss as seed_oss
from transformers.models.smollm3 import modeling_smollm3 as smollm3
from transformers.models.stablelm import modeling_stablelm as stablelm
from transformers.models.starcoder2 import modeling_starcoder2 as starcoder2

from ds_plugin_sdk.integrations.transformers.decoder import Decoder, Turn
from ds_plugin_sdk.integrations.transformers.understood import (
    Norm,
    NotUnderstoodError,
    activation_of,
    check_code,
    has_code,
    norm_of,
    same_code,
)
from ds_plugin_sdk.integrations.transformers.weights import Matrix

# Makes a matrix of one linear layer, or of several with the same input.
MatrixOf = Callable[..., Matrix]

# Classes of decoder layers -> what describes layers with their code, and where their attention is.
FAMILIES: dict[type[nn.Module], tuple[Callable[[Any, MatrixOf], Decoder], str]] = {}


def attention_of(layer: nn.Module) -> nn.Module | None:
    """The attention of a layer whose own code is that of a known decoder layer; None for all other modules."""
    found = _find(layer)
    return None if found is None else getattr(layer, found[1], None)


def describe(layer: nn.Module, matrix_of: MatrixOf) -> Decoder:
    """What a decoder layer consists of; `matrix_of` makes its matrices.

    Raises:
        NotUnderstoodError: a part of it is not known.
    """
    found = _find(layer)
    if found is None:
        raise NotUnderstoodError("it is no decoder layer that is known")
    # Releases of transformers differ, and the installed one's code is what layers were compared with.
    if "output_attentions" in inspect.signature(type(layer).forward).parameters:
        raise NotUnderstoodError("it takes output_attentions, so that it puts out a tuple")
    try:
        described = found[0](layer, matrix_of)
    except AttributeError as why:
        raise NotUnderstoodError(f"it is not as in the releases of transformers that are known: {why}") from why
    _check_norms(described)
    return described


def _check_norms(layer: Decoder) -> None:
    """Raise `NotUnderstoodError` unless each has a number for every element; torch would repeat a single one."""
    hidden, head = layer.mlp_out.rows[0], layer.head_dim
    of_heads = (layer.query_norm, layer.heads), (layer.key_norm, layer.kv_heads)
    fit = all(norm is None or norm.columns in (head, heads * head) for norm, heads in of_heads)
    of_tokens = layer.attention_norm, layer.attention_post_norm, layer.mlp_norm, layer.mlp_post_norm
    if not fit or any(norm is not None and norm.columns != hidden for norm in of_tokens):
        raise NotUnderstoodError("a norm's weight is of another size than what it norms")


def families_of_ops(model: nn.Module) -> list[str]:
    """Modules of `ds_plugin_sdk.ops` that a model's decoder layers need beside those that all need.

    They are for a gate that is before up, and to add what was normed or multiplied to the residual.
    """
    needed = {
        phi3.Phi3MLP: "transformer",
        gemma3.Gemma3DecoderLayer: "residual",
        glm4.Glm4DecoderLayer: "residual",
        granite.GraniteDecoderLayer: "residual",
        olmo2.Olmo2DecoderLayer: "residual",
    }
    found = {getattr(type(module), "forward", None) for module in model.modules()}
    return [ops for kind, ops in needed.items() if any(same_code(each, kind.forward) for each in found)]


def _find(layer: nn.Module) -> tuple[Callable[[Any, MatrixOf], Decoder], str] | None:
    code = getattr(type(layer), "forward", None)
    return next((found for kind, found in FAMILIES.items() if same_code(code, kind.forward)), None)


def _gpt2(block: Any, matrix_of: MatrixOf) -> Decoder:
    attn, mlp = block.attn, block.mlp
    check_code(attn, gpt2.GPT2Attention)
    check_code(mlp, gpt2.GPT2MLP)
    check_code(attn.resid_dropout, nn.Dropout)
    check_code(mlp.dropout, nn.Dropout)
    return Decoder(
        norm_of(block.ln_1),
        norm_of(block.ln_2),
        qkv=matrix_of(attn.c_attn),
        output=matrix_of(attn.c_proj),
        mlp_in=matrix_of(mlp.c_fc),
        mlp_out=matrix_of(mlp.c_proj),
        heads=attn.num_heads,
        kv_heads=attn.num_heads,
        head_dim=attn.head_dim,
        scale=attn.scaling,
        activation=activation_of(mlp.act),
    )


def _opt(layer: Any, matrix_of: MatrixOf) -> Decoder:
    attn = layer.self_attn
    check_code(attn, opt.OPTAttention)
    return Decoder(
        norm_of(layer.self_attn_layer_norm),
        norm_of(layer.final_layer_norm),
        qkv=matrix_of(attn.q_proj, attn.k_proj, attn.v_proj),
        output=matrix_of(attn.out_proj),
        mlp_in=matrix_of(layer.fc1),
        mlp_out=matrix_of(layer.fc2),
        heads=attn.num_heads,
        kv_heads=attn.num_heads,
        head_dim=attn.head_dim,
        scale=attn.scaling,
        activation=activation_of(layer.activation_fn),
        norm_first=layer.do_layer_norm_before,
    )


def _llama(layer: Any, matrix_of: MatrixOf) -> Decoder:
    """LLaMA, and what has its parts' code: Mistral, Qwen 2, Gemma and others."""
    check_code(layer.self_attn, *_LLAMAS_ATTENTIONS)
    norms = norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)
    return _of_llamas_parts(layer, matrix_of, *norms)


def _granite(layer: Any, matrix_of: MatrixOf) -> Decoder:
    """Granite: LLaMA that multiplies what is added to the residual."""
    return dataclasses.replace(_llama(layer, matrix_of), multiplier=float(layer.residual_multiplier))


# Qwen 3 norms each head. In training SeedOss and Starcoder 2 drop some of what attention puts out.
_LLAMAS_ATTENTIONS = (
    *(llama.LlamaAttention, mistral.MistralAttention, qwen2.Qwen2Attention, qwen3.Qwen3Attention),
    *(ernie4_5.Ernie4_5Attention, seed_oss.SeedOssAttention, smollm3.SmolLM3Attention, starcoder2.Starcoder2Attention),
    glm.GlmAttention,
)


def _turn_of(attn: Any) -> Turn:
    if has_code(attn, smollm3.SmolLM3Attention) and not attn.use_rope:
        return Turn.NONE
    if has_code(attn, exaone4.Exaone4Attention) and attn.sliding_window is not None and not attn.is_sliding:
        return Turn.NONE
    # Ernie's angles are float32, GLM's of the model's dtype: the op takes float32 in any case.
    return Turn.PAIRS if has_code(attn, ernie4_5.Ernie4_5Attention, glm.GlmAttention) else Turn.HALVES


def _gemma3(layer: Any, matrix_of: MatrixOf) -> Decoder:
    """Gemma 3: the same with a norm of each head, and norms of what is added to the residual."""
    check_code(layer.self_attn, gemma3.Gemma3Attention)
    post_norms = norm_of(layer.post_attention_layernorm), norm_of(layer.post_feedforward_layernorm)
    norms = norm_of(layer.input_layernorm), norm_of(layer.pre_feedforward_layernorm)
    return _of_llamas_parts(layer, matrix_of, *norms, *post_norms)


_NORMS_HEADS = (
    *(qwen3.Qwen3Attention, gemma3.Gemma3Attention),
    *(exaone4.Exaone4Attention, olmo2.Olmo2Attention, olmo3.Olmo3Attention),
)


def _olmo2(layer: Any, matrix_of: MatrixOf) -> Decoder:
    """OLMo 2 and 3, and Exaone 4: what is added to the residual is normed, and nothing before."""
    check_code(layer.self_attn, olmo2.Olmo2Attention, olmo3.Olmo3Attention, exaone4.Exaone4Attention)
    post_norms = norm_of(layer.post_attention_layernorm), norm_of(layer.post_feedforward_layernorm)
    return _of_llamas_parts(layer, matrix_of, None, None, *post_norms)


def _of_llamas_parts(
    layer: Any,
    matrix_of: MatrixOf,
    attention_norm: Norm | None,
    mlp_norm: Norm | None,
    attention_post_norm: Norm | None = None,
    mlp_post_norm: Norm | None = None,
) -> Decoder:
    attn, mlp = layer.self_attn, layer.mlp
    check_code(mlp, *_MLPS)
    norms_heads = has_code(attn, *_NORMS_HEADS)
    head_dim, qkv = attn.head_dim, matrix_of(attn.q_proj, attn.k_proj, attn.v_proj)
    return Decoder(
        attention_norm,
        mlp_norm,
        qkv=qkv,
        output=matrix_of(attn.o_proj),
        heads=qkv.rows[0] // head_dim,
        kv_heads=qkv.rows[1] // head_dim,
        head_dim=head_dim,
        scale=attn.scaling,
        rotary=True,
        rotary_in_part=has_code(attn, glm.GlmAttention, stablelm.StableLmAttention),
        turn=_turn_of(attn),
        query_norm=norm_of(attn.q_norm) if norms_heads else None,
        key_norm=norm_of(attn.k_norm) if norms_heads else None,
        attention_post_norm=attention_post_norm,
        mlp_post_norm=mlp_post_norm,
        **_mlp(mlp, matrix_of),
    )


_MLPS = (llama.LlamaMLP, seed_oss.SeedOssMLP, starcoder2.Starcoder2MLP, phi3.Phi3MLP)


def _mlp(mlp: Any, matrix_of: MatrixOf) -> dict[str, Any]:
    """Of the code of one of the above."""
    if has_code(mlp, starcoder2.Starcoder2MLP):
        products = {"mlp_in": matrix_of(mlp.c_fc), "mlp_out": matrix_of(mlp.c_proj)}
        return {**products, "activation": activation_of(mlp.act)}
    if has_code(mlp, phi3.Phi3MLP):
        products = {"mlp_in": matrix_of(mlp.gate_up_proj), "mlp_out": matrix_of(mlp.down_proj)}
        return {**products, "activation": activation_of(mlp.activation_fn), "gated": True, "gate_first": True}
    # The op multiplies the first half by the activation of the second.
    products = {"mlp_in": matrix_of(mlp.up_proj, mlp.gate_proj), "mlp_out": matrix_of(mlp.down_proj)}
    return {**products, "activation": activation_of(mlp.act_fn), "gated": True}


def _glm4(layer: Any, matrix_of: MatrixOf) -> Decoder:
    """GLM 4: norms of what is added to the residual, too."""
    check_code(layer.self_attn, glm.GlmAttention)
    post_norms = norm_of(layer.post_self_attn_layernorm), norm_of(layer.post_mlp_layernorm)
    norms = norm_of(layer.input_layernorm), norm_of(layer.post_attention_layernorm)
    return _of_llamas_parts(layer, matrix_of, *norms, *post_norms)


def _phi3(layer: Any, matrix_of: MatrixOf) -> Decoder:
    """Phi 3 and 4: LLaMA with one product each for queries, keys and values, and for gate and up."""
    attn = layer.self_attn
    check_code(attn, phi3.Phi3Attention)
    check_code(layer.mlp, phi3.Phi3MLP)
    check_code(layer.resid_attn_dropout, nn.Dropout)
    check_code(layer.resid_mlp_dropout, nn.Dropout)
    return Decoder(
        norm_of(layer.input_layernorm),
        norm_of(layer.post_attention_layernorm),
        qkv=matrix_of(attn.qkv_proj),
        output=matrix_of(attn.o_proj),
        heads=attn.config.num_attention_heads,
        kv_heads=attn.num_key_value_heads,
        head_dim=attn.head_dim,
        scale=attn.scaling,
        rotary=True,
        rotary_in_part=True,
        **_mlp(layer.mlp, matrix_of),
    )


def _phi(layer: Any, matrix_of: MatrixOf) -> Decoder:
    """Phi 1 and 2: one norm for attention and MLP, side by side."""
    attn, mlp = layer.self_attn, layer.mlp
    check_code(attn, phi.PhiAttention)
    check_code(mlp, phi.PhiMLP)
    check_code(layer.resid_dropout, nn.Dropout)
    qkv = matrix_of(attn.q_proj, attn.k_proj, attn.v_proj)
    return Decoder(
        norm_of(layer.input_layernorm),
        None,
        qkv=qkv,
        output=matrix_of(attn.dense),
        mlp_in=matrix_of(mlp.fc1),
        mlp_out=matrix_of(mlp.fc2),
        heads=qkv.rows[0] // attn.head_dim,
        kv_heads=qkv.rows[1] // attn.head_dim,
        head_dim=attn.head_dim,
        scale=attn.scaling,
        activation=activation_of(mlp.activation_fn),
        rotary=True,
        rotary_in_part=True,
        query_norm=norm_of(attn.q_layernorm) if attn.qk_layernorm else None,
        key_norm=norm_of(attn.k_layernorm) if attn.qk_layernorm else None,
        parallel=True,
    )


def _gpt_neox(layer: Any, matrix_of: MatrixOf) -> Decoder:
    """GPT-NeoX: attention and MLP side by side, if it is told so, with a norm each."""
    attn, mlp = layer.attention, layer.mlp
    check_code(attn, gpt_neox.GPTNeoXAttention)
    check_code(mlp, gpt_neox.GPTNeoXMLP)
    check_code(layer.post_attention_dropout, nn.Dropout)
    check_code(layer.post_mlp_dropout, nn.Dropout)
    qkv = matrix_of(attn.query_key_value)
    heads = qkv.rows[0] // (3 * attn.head_size)
    return Decoder(
        norm_of(layer.input_layernorm),
        norm_of(layer.post_attention_layernorm),
        qkv=qkv,
        output=matrix_of(attn.dense),
        mlp_in=matrix_of(mlp.dense_h_to_4h),
        mlp_out=matrix_of(mlp.dense_4h_to_h),
        heads=heads,
        kv_heads=heads,
        head_dim=attn.head_size,
        scale=attn.scaling,
        activation=activation_of(mlp.act),
        rotary=True,
        rotary_in_part=True,
        qkv_by_head=True,
        parallel=layer.use_parallel_residual,
    )


def _stablelm(layer: Any, matrix_of: MatrixOf) -> Decoder:
    """StableLM: LLaMA's parts between layer norms, one after the other or, with one norm, side by side."""
    check_code(layer.self_attn, stablelm.StableLmAttention)
    check_code(layer.dropout, nn.Dropout)
    if layer.self_attn.qk_layernorm:
        raise NotUnderstoodError("its heads have norms of their own, each another one")
    parallel = layer.use_parallel_residual
    mlp_norm = None if parallel else norm_of(layer.post_attention_layernorm)
    found = _of_llamas_parts(layer, matrix_of, norm_of(layer.input_layernorm), mlp_norm)
    return dataclasses.replace(found, parallel=parallel)


FAMILIES.update(
    {
        gpt2.GPT2Block: (_gpt2, "attn"),
        opt.OPTDecoderLayer: (_opt, "self_attn"),
        llama.LlamaDecoderLayer: (_llama, "self_attn"),
        mistral.MistralDecoderLayer: (_llama, "self_attn"),
        qwen2.Qwen2DecoderLayer: (_llama, "self_attn"),
        qwen3.Qwen3DecoderLayer: (_llama, "self_attn"),
        phi3.Phi3DecoderLayer: (_phi3, "self_attn"),
        gemma3.Gemma3DecoderLayer: (_gemma3, "self_attn"),
        glm4.Glm4DecoderLayer: (_glm4, "self_attn"),
        granite.GraniteDecoderLayer: (_granite, "self_attn"),
        olmo2.Olmo2DecoderLayer: (_olmo2, "self_attn"),
        phi.PhiDecoderLayer: (_phi, "self_attn"),
        gpt_neox.GPTNeoXLayer: (_gpt_neox, "attention"),
        stablelm.StableLmDecoderLayer: (_stablelm, "self_attn"),
    }
)

__all__ = ["FAMILIES", "MatrixOf", "attention_of", "describe", "families_of_ops"]
