"""A decoder layer's ops, called one after the other in C++: ``ds_plugin_calls::decoder_layer``.

It is no op with a computation of its own, and no device implements it: it calls ``ds_plugin``'s norms, linear layers,
rotary embedding and attention, with what any device has for them. From Python their calls take longer than they do
themselves in a step of one token of a small model. `ds_plugin_sdk.integrations.transformers.decoder` calls the same
ops from Python where there is no library.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_NAMESPACE = "ds_plugin_calls"
_library: Any = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch does not say
_library.define(
    "decoder_layer(Tensor hidden, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor(c!)? key_scales, "
    "Tensor(d!)? value_scales, int past, Tensor? mask, Tensor? cos, Tensor? sin, Tensor attention_norm, "
    "Tensor? attention_norm_bias, float attention_norm_eps, Tensor mlp_norm, Tensor? mlp_norm_bias, "
    "float mlp_norm_eps, Tensor? query_norm, Tensor? key_norm, float head_norm_eps, "
    "Tensor qkv, Tensor? qkv_bias, Tensor? qkv_scales, Tensor? qkv_offsets, "
    "Tensor output, Tensor? output_bias, Tensor? output_scales, Tensor? output_offsets, "
    "Tensor mlp_in, Tensor? mlp_in_bias, Tensor? mlp_in_scales, Tensor? mlp_in_offsets, "
    "Tensor mlp_out, Tensor? mlp_out_bias, Tensor? mlp_out_scales, Tensor? mlp_out_offsets, "
    "int heads, float scale, int activation, bool gated, bool norm_first) -> Tensor"
)

# The op as torch's function in C, once its library is loaded.
call: Any = None


def use_library(library: ctypes.CDLL) -> None:
    """Let layers be called as a whole: the library, ``kernels/host/decoder_layer.cpp``, has registered the op."""
    global call
    call = getattr(torch.ops, _NAMESPACE).decoder_layer.default._op


__all__ = ["call", "use_library"]
