"""The ops of decoder layers, called one after the other in C++: ``ds_plugin_calls::decoder_layers``.

It is no op with a computation of its own, and no device implements it: it calls ``ds_plugin``'s norms, linear layers,
rotary embedding and attention, with what any device has for them: the functions of the CPU kernels' libraries for
tensors in host memory, torch's dispatcher otherwise. From Python their calls take longer than they do themselves in a
step of one token of a small model. `ds_plugin_sdk.integrations.transformers.decoder` calls the same
ops from Python where there is no library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from ds_plugin_sdk.ops._op_functions import OpFunctions

_NAMESPACE = "ds_plugin_calls"
_library: Any = torch.library.Library(_NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]  # torch gives it no type
# A layer has two caches, or four, its part of `tensors`, `integers` and `numbers`, and an output among the results.
# Three numbers of `which` are a layer's: how many positions its caches hold, and where in `given` its mask is, and its
# cosines, which its sines come after; -1 if it has none.
_library.define(
    "decoder_layers(Tensor hidden, Tensor(a!)[] caches, Tensor[] given, int[] which, int functions, Tensor[] tensors, "
    "int[] integers, float[] numbers) -> Tensor[]"
)

# The op as torch's function in C, once its library is loaded.
call: Any = None

# What layers ask of Python's objects before they are called, by one call: ``kernels/host/as_found.h``.
as_found: Callable[..., int] | None = None
places: Callable[[list[torch.Tensor]], bytes | None] | None = None
samples: Callable[[list[torch.Tensor], int], bytes | None] | None = None

_functions: OpFunctions | None = None
_GIVES_FUNCTION = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)


def use_library(library: ctypes.CDLL) -> None:
    """Let layers be called as a whole: the library, ``kernels/host/decoder_layer.cpp``, has registered the op."""
    global call, as_found, places, samples, _functions
    library.ds_kernels_headers_of_torch.restype = ctypes.c_char_p
    _functions = OpFunctions(library.ds_kernels_headers_of_torch())
    names = (f"ds_kernels_{name}" for name in ("as_found", "places", "samples"))
    as_found, places, samples = (_GIVES_FUNCTION((name, library))(None) for name in names)
    call = getattr(torch.ops, _NAMESPACE).decoder_layers.default._op


def functions(look: bool = True) -> int:
    """The op's argument of this name: what it calls for tensors in host memory; `look` as of `OpFunctions.address`."""
    return 0 if _functions is None else _functions.address(look)


__all__ = ["as_found", "call", "functions", "places", "samples", "use_library"]
