"""Ops as functions of the CPU kernels' libraries, which other libraries call past torch's dispatcher:
``ds_kernels/op_functions.h``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch

from ds_plugin_sdk.ops._kernel_watch import KernelWatch

# In the order of the struct OpFunctions.
_OPS = (
    *("linear", "layer_norm", "rms_norm", "activation_and_mul", "rotary_"),
    *("cached_attention", "cached_attention_int8", "residual_add_bias_"),
)


class _Function(NamedTuple):
    """That of an op, `_OPS[place]`, and the kernels that the op had when the library was loaded."""

    place: int
    of: Callable[[bytes], int | None]
    kernels: KernelWatch


_found: list[_Function] = []
_handles: set[int] = set()


def take_library(library: ctypes.CDLL) -> None:
    """Take what functions a library of CPU kernels has, which was loaded just now: its kernels are the ops'."""
    if library._handle in _handles:
        return
    _handles.add(library._handle)
    for index, op in enumerate(_OPS):
        function = getattr(library, f"ds_kernels_function_{op}", None)
        if function is not None:
            function.restype = ctypes.c_void_p
            _found.append(_Function(index, function, KernelWatch([op])))


class OpFunctions:
    """The functions that loaded libraries have for ops, in memory as another library reads them.

    Args:
        headers: which of torch's headers that library was compiled with: those who have others take other tensors.
    """

    def __init__(self, headers: bytes) -> None:
        self._headers = headers
        self._addresses = (ctypes.c_void_p * len(_OPS))()
        self._taken: list[_Function] = []

    def address(self) -> int:
        """Of the functions; 0 where all calls are for the ops: modes, profilers and torch.func look for those."""
        if (
            torch._C._len_torch_dispatch_stack()
            or torch._C._autograd._profiler_enabled()
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return 0
        for function in _found[len(self._taken) :]:
            self._taken.append(function)
            self._addresses[function.place] = function.of(self._headers)
        for function in self._taken:
            if not function.kernels.holds():
                self._addresses[function.place] = None
        return ctypes.addressof(self._addresses)


__all__ = ["OpFunctions", "take_library"]
