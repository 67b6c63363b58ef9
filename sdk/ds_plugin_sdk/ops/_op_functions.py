"""Ops as functions of the CPU kernels' libraries, which other libraries call past torch's dispatcher:
``ds_kernels/op_functions.h``.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable

import torch

# Loaded libraries, and kernels that Python registered.
_LIBRARIES, _IMPLEMENTATIONS = torch.ops.loaded_libraries, torch.library._impls

# In the order of the struct OpFunctions.
_OPS = (
    *("linear", "layer_norm", "rms_norm", "activation_and_mul", "rotary_"),
    *("cached_attention", "cached_attention_int8", "residual_add_bias_"),
)

# What torch's dispatcher may call for tensors in host memory. Kernels of other devices may come and go.
_KEYS = (
    *("CPU", "AutogradCPU", "AutocastCPU", "Autograd", "ADInplaceOrView", "BackendSelect", "Functionalize", "Tracer"),
    *("Python", "PythonTLSSnapshot", "PythonDispatcher"),
)


class _Function:
    """That of an op, and the kernels that the op had when the function's library was loaded."""

    def __init__(self, op: str, of: Callable[[bytes], int | None]) -> None:
        self.of = of
        self._op = f"ds_plugin::{op}"
        self._text = torch._C._dispatch_dump(self._op)
        self._kernels = _kernels_in(self._text)
        self._holds = True

    def holds(self) -> bool:
        """Whether they are the op's still; once others were, never again."""
        text = torch._C._dispatch_dump(self._op)  # some us: who registers a kernel may have told nobody
        if text != self._text:
            self._text = text
            self._holds = self._holds and _kernels_in(text) == self._kernels
        return self._holds


def _kernels_in(text: str) -> list[str]:
    """The lines of a dump that tensors in host memory depend on."""
    return [line for line in text.splitlines() if line.partition(":")[0].removesuffix("[alias]") in _KEYS]


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
            _found[place] = _Function(op, function)


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
        counts = (len(_LIBRARIES), len(_IMPLEMENTATIONS), len(sys.modules), len(_handles))
        if counts == self._counts and not look:
            return ctypes.addressof(self._addresses)
        with self._lock:
            self._counts = counts
            for place, function in list(_found.items()):
                if not function.holds():
                    self._addresses[place] = None
                elif self._taken.get(place) is not function:
                    self._taken[place] = function
                    self._addresses[place] = function.of(self._headers)
        return ctypes.addressof(self._addresses)


__all__ = ["OpFunctions", "take_library"]
