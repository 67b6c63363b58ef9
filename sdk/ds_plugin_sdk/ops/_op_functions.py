"""Ops as functions of the CPU kernels' libraries, which other libraries call past torch's dispatcher:
``ds_kernels/op_functions.h``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

from ds_plugin_sdk.ops._cpu_kernels import CPUKernels, registrations

# In the order of the struct OpFunctions.
_OPS = (
    *("linear", "layer_norm", "rms_norm", "activation_and_mul", "rotary_"),
    *("cached_attention", "cached_attention_int8", "residual_add_bias_"),
)


class _Function(NamedTuple):
    """That of an op, and the kernels that the op had when the function's library was loaded."""

    of: Callable[[bytes], int | None]
    kernels: CPUKernels


# By an op's place: that of the library that was loaded last.
_found: dict[int, _Function] = {}
_handles: set[int] = set()


def take_library(library: ctypes.CDLL) -> None:
    """Take what functions a library of CPU kernels has, which was loaded just now: its kernels are the ops'."""
    if library._handle in _handles:
        return
    _handles.add(library._handle)
    for place, op in enumerate(_OPS):
        function = getattr(library, f"ds_kernels_function_{op}", None)
        if function is not None:
            function.restype = ctypes.c_void_p
            _found[place] = _Function(function, CPUKernels(op))


class OpFunctions:
    """The functions that loaded libraries have for ops, in memory as another library reads them.

    Args:
        headers: which of torch's headers that library was compiled with: those who have others take other tensors.
    """

    def __init__(self, headers: bytes) -> None:
        self._headers = headers
        self._addresses = (ctypes.c_void_p * len(_OPS))()
        self._taken: dict[int, _Function] = {}
        self._lock = threading.Lock()
        self._counts: tuple[int, ...] = ()

    def address(self, look: bool = True) -> int:
        """Of the functions; 0 where calls are for the ops: autocast, modes, profilers and torch.func look for these.

        Args:
            look: ask which kernels the ops have, which takes some 10 us an op where caches are cold; otherwise only if
                libraries, modules, or what Python registered, are more or fewer than when that was asked last.
        """
        if (
            torch._C._is_any_autocast_enabled()
            or torch._C._len_torch_dispatch_stack()
            or torch._C._autograd._profiler_enabled()
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return 0
        counts = (*registrations(), len(_handles))
        if counts == self._counts and not look:
            return ctypes.addressof(self._addresses)
        with self._lock:
            self._counts = counts
            for place, function in list(_found.items()):
                if not function.kernels.hold():
                    self._addresses[place] = None
                elif self._taken.get(place) is not function:
                    self._taken[place] = function
                    self._addresses[place] = function.of(self._headers)
        return ctypes.addressof(self._addresses)


__all__ = ["OpFunctions", "take_library"]
