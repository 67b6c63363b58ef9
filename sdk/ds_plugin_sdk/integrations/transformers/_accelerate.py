"""`accelerate`: finds the layers of a model that the SDK's ops can run, and gives them another ``forward``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.pytorch_utils import Conv1D

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.transformers import decoder
from ds_plugin_sdk.integrations.transformers.decoder import Decoder, Norm, ops_for
from ds_plugin_sdk.integrations.transformers.kv_cache import growing_layer
from ds_plugin_sdk.integrations.transformers.weights import Matrix, Packer, Source, Weights
from ds_plugin_sdk.ops.linear import Activation
from ds_plugin_sdk.registry import load_kernels

ATTENTION = "ds_plugin"

_FAMILIES_OF_OPS = ("linear", "attention", "norm", "rotary")

# transformers' names of activations -> ours.
_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}

# Norms whose formula is ours; others of that name multiply by 1 + weight, for example.
_RMS_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")


class Accelerated:
    """A model that runs on the SDK's ops until `remove` is called, or the ``with`` block ends."""

    def __init__(self, undo: list[Callable[[], None]]) -> None:
        self._undo = undo

    def remove(self) -> None:
        """Give the model back as it was. Again is no error."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Accelerated:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def accelerate(model: transformers.PreTrainedModel, weights: Weights = None) -> Accelerated:
    """Run a model's inference on the SDK's ops: native kernels, or reference implementations where there are none.

    Where gradients are recorded the model's own code runs, so wrap your own loops in ``torch.no_grad()``; ``generate``
    does so itself. Greedy tokens in float32 are those of the plain model; 16-bit results differ in rounding.

    Args:
        model: on its device, in float32, bfloat16 or float16, in eval mode.
        weights: ``"int8"`` to read linear layers' weights in 8 bits with a scale for each 128 of a row, or fewer. The
            model's own parameters stay as they are, so that `Accelerated.remove` can bring them back: memory grows by
            half (bfloat16). None keeps their dtype; parameters are moved into one block of memory.

    Returns:
        A handle to undo it.

    Raises:
        SdkError: the model is accelerated already, or `weights` is something else.
    """
    if weights not in (None, "int8"):
        raise SdkError(
            f"weights is {weights!r}", why="weights are kept as they are, or quantized", hint='None or "int8"'
        )
    if getattr(model.config, "_attn_implementation", None) == ATTENTION and _is_replaced(model):
        raise SdkError("the model is accelerated already", why="accelerate() was called on it", hint="call remove()")
    for family in _FAMILIES_OF_OPS:
        load_kernels(family, model.device.type)
    register_attention()
    packer = Packer(weights)
    replacements = list(_replacements(model, packer))
    undo = packer.pack()
    undo += [_replace_forward(module, forward) for module, forward in replacements]
    undo.append(_use_attention(model))
    return Accelerated(undo)


def register_attention() -> None:
    """Make ``ds_plugin`` known to transformers as a way to attend."""
    AttentionInterface.register(ATTENTION, attention_forward)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for attention, with the keys and values of its cache.

    Shapes as in `ds_plugin_sdk.ops.attention.cached_attention`; the result is ``[batch, tokens, heads, head_dim]``.
    What that op does not do (dropout, gradients, position biases, queries of other positions) is left to torch's.
    """
    causal = attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    unusual = dropout or kwargs.get("position_bias") is not None or kwargs.get("cache") is not None
    if torch.is_grad_enabled() or unusual or query.shape[2] > key.shape[2]:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
        return result
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = _attend(query, key[:, :, :0], value[:, :, :0], key, value, key.shape[2], scale, attention_mask, causal)
    return attended.transpose(1, 2), None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    past: int,
    scale: float,
    mask: Tensor | None,
    causal: bool,
) -> Tensor:
    ops = ops_for(query.dtype)
    result: Tensor = ops.cached_attention.default(
        query, key, value, keys, values, past, scale, mask, None, 0, causal and mask is None
    )
    return result


# ---------------------------------------------------------------------- single layers
def _replacements(model: nn.Module, packer: Packer) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Modules, and what their forward shall be."""
    done: set[nn.Module] = set()
    for module in model.modules():
        describe = FAMILIES.get(type(module).__name__)
        layer = None if describe is None else describe(module, packer)
        if layer is not None:
            done.update(module.modules())
            yield module, _decoder_forward(module, layer)
        elif module not in done:
            forward = _single_forward(module, packer)
            if forward is not None:
                yield module, forward


def _single_forward(module: nn.Module, packer: Packer) -> Callable[..., Any] | None:
    if type(module) is nn.Linear or type(module) is Conv1D:
        return functools.partial(_linear_forward, module.forward, packer.add(_source(module)))
    norm = _norm(module)
    return None if norm is None else functools.partial(_norm_forward, module.forward, norm)


def _linear_forward(own: Callable[[Tensor], Tensor], matrix: Matrix, input: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return own(input)
    return decoder.linear(ops_for(input.dtype), matrix, input)


def _norm_forward(own: Callable[[Tensor], Tensor], norm: Norm, input: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return own(input)
    return decoder.norm(ops_for(input.dtype), norm, input)


def _source(module: nn.Module) -> Source:
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, nn.Parameter)
    return Source(weight, bias, transposed=type(module) is Conv1D)


def _norm(module: nn.Module) -> Norm | None:
    """A norm of a module that is one of ours, else None."""
    if type(module) is nn.LayerNorm and module.bias is not None and len(module.normalized_shape) == 1:
        return Norm(module.weight, module.bias, module.eps)
    if type(module).__name__ in _RMS_NORMS:
        return Norm(module.weight, None, float(module.variance_epsilon))  # type: ignore[arg-type]  # a module's parameter
    return None


# ---------------------------------------------------------------------- decoder layers
def _decoder_forward(module: nn.Module, layer: Decoder) -> Callable[..., Any]:
    own = module.forward
    index = int(getattr(module, "attn", getattr(module, "self_attn", None)).layer_idx)  # type: ignore[union-attr]  # FAMILIES
    by_position = ("past_key_values", "attention_mask", "encoder_hidden_states")  # GPT-2 passes these without names

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        named = {**dict(zip(by_position, args, strict=False)), **kwargs}
        if torch.is_grad_enabled() or named.get("encoder_hidden_states") is not None:
            result: Tensor = own(hidden_states, *args, **kwargs)
            return result
        cache, mask = named.get("past_key_values"), named.get("attention_mask")
        angles = _angles(named.get("position_embeddings"))

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            room = growing_layer(cache, index)
            if room is not None:
                keys, values, past = room.make_room(key, value)
                attended = _attend(query, key, value, keys, values, past, layer.scale, mask, True)
                room.advance(key.shape[2])
                return attended
            if cache is not None:
                key, value = cache.update(key, value, index)
            attended, _ = attention_forward(module, query, key, value, mask, scaling=layer.scale, is_causal=True)
            return attended.transpose(1, 2)

        return decoder.run(ops_for(hidden_states.dtype), layer, hidden_states, angles, attend)

    return forward


_last_angles: tuple[Any, tuple[Tensor, Tensor]] | None = None


def _angles(embeddings: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine as our op takes them, of those that a model computed once for all of its layers."""
    global _last_angles
    if embeddings is None:
        return None
    if _last_angles is None or _last_angles[0] is not embeddings:
        working = torch.promote_types(embeddings[0].dtype, torch.float32)
        cos, sin = (part[..., : part.shape[-1] // 2].to(working).contiguous() for part in embeddings)
        _last_angles = (embeddings, (cos, sin))
    return _last_angles[1]


def _gpt2(block: Any, packer: Packer) -> Decoder | None:
    activation = _ACTIVATIONS.get(block.attn.config.activation_function)
    norms = _norm(block.ln_1), _norm(block.ln_2)
    if activation is None or norms[0] is None or norms[1] is None or block.attn.reorder_and_upcast_attn:
        return None
    return Decoder(
        norms[0],
        norms[1],
        qkv=packer.add(_source(block.attn.c_attn)),
        output=packer.add(_source(block.attn.c_proj)),
        mlp_in=packer.add(_source(block.mlp.c_fc)),
        mlp_out=packer.add(_source(block.mlp.c_proj)),
        heads=block.attn.num_heads,
        kv_heads=block.attn.num_heads,
        head_dim=block.attn.head_dim,
        scale=block.attn.scaling,
        activation=activation,
    )


def _opt(layer: Any, packer: Packer) -> Decoder | None:
    attn = layer.self_attn
    activation = _ACTIVATIONS.get(attn.config.activation_function)
    norms = _norm(layer.self_attn_layer_norm), _norm(layer.final_layer_norm)
    if activation is None or norms[0] is None or norms[1] is None:
        return None
    return Decoder(
        norms[0],
        norms[1],
        qkv=packer.add(_source(attn.q_proj), _source(attn.k_proj), _source(attn.v_proj)),
        output=packer.add(_source(attn.out_proj)),
        mlp_in=packer.add(_source(layer.fc1)),
        mlp_out=packer.add(_source(layer.fc2)),
        heads=attn.num_heads,
        kv_heads=attn.num_heads,
        head_dim=attn.head_dim,
        scale=attn.scaling,
        activation=activation,
        norm_first=layer.do_layer_norm_before,
    )


def _llama(layer: Any, packer: Packer) -> Decoder | None:
    """LLaMA and what has its parts by its names: Mistral, Qwen 2, Qwen 3."""
    attn, mlp = layer.self_attn, layer.mlp
    activation = _ACTIVATIONS.get(attn.config.hidden_act)
    norms = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
    if activation is None or norms[0] is None or norms[1] is None:
        return None
    head_dim = attn.head_dim
    return Decoder(
        norms[0],
        norms[1],
        qkv=packer.add(_source(attn.q_proj), _source(attn.k_proj), _source(attn.v_proj)),
        output=packer.add(_source(attn.o_proj)),
        # The op multiplies the first half by the activation of the second.
        mlp_in=packer.add(_source(mlp.up_proj), _source(mlp.gate_proj)),
        mlp_out=packer.add(_source(mlp.down_proj)),
        heads=attn.q_proj.out_features // head_dim,
        kv_heads=attn.k_proj.out_features // head_dim,
        head_dim=head_dim,
        scale=attn.scaling,
        activation=activation,
        gated=True,
        query_norm=_norm(attn.q_norm) if hasattr(attn, "q_norm") else None,
        key_norm=_norm(attn.k_norm) if hasattr(attn, "k_norm") else None,
    )


# Names of decoder layers -> what describes them, or gives None where a configuration asks for what our ops have not.
FAMILIES: dict[str, Callable[[Any, Packer], Decoder | None]] = {
    "GPT2Block": _gpt2,
    "OPTDecoderLayer": _opt,
    "LlamaDecoderLayer": _llama,
    "MistralDecoderLayer": _llama,
    "Qwen2DecoderLayer": _llama,
    "Qwen3DecoderLayer": _llama,
}


# ---------------------------------------------------------------------- on and off
def _is_replaced(model: nn.Module) -> bool:
    return any("forward" in vars(module) for module in model.modules())


def _replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    before = vars(module).get("forward")
    module.forward = forward  # on the instance: its class stays

    def undo() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    return undo


def _use_attention(model: transformers.PreTrainedModel) -> Callable[[], None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(ATTENTION)
    return lambda: model.set_attn_implementation(before)


__all__ = ["ATTENTION", "FAMILIES", "Accelerated", "accelerate", "attention_forward", "register_attention"]
