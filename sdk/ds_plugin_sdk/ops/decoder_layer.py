"""The ops of decoder layers, called one after the other in C++: ``ds_plugin_calls::decoder_layers``.

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
_library: Any = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch gives it no type
# A layer has two caches, or four, its part of `tensors`, `integers` and `numbers`, and an output among the results.
_library.define(
    "decoder_layers(Tensor hidden, Tensor(a!)[] caches, int past, Tensor? mask, Tensor? cos, Tensor? sin, "
    "Tensor[] tensors, int[] integers, float[] numbers) -> Tensor[]"
)

# The op as torch's function in C, once its library is loaded.
call: Any = None


def use_library(library: ctypes.CDLL) -> None:
    """Let layers be called as a whole: the library, ``kernels/host/decoder_layer.cpp``, has registered the op."""
    global call
    call = getattr(torch.ops, _NAMESPACE).decoder_layers.default._op


__all__ = ["call", "use_library"]
