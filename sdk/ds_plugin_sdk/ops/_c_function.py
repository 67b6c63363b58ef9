"""C functions of the CPU kernels' libraries, beside ops for whose smallest calls torch's dispatcher takes longest.

What is not plain is for the op: tensors of other classes, modes, kernels of others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

# Loaded libraries and kernels that Python registered: who has another kernel for the op is among them.
_LIBRARIES, _IMPLEMENTATIONS = torch.ops.loaded_libraries, torch.library._impls
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


class CFunction:
    """``ds_kernels_<family>_<name>`` of ``kernels/cpu/<family>_binding.cpp``, once that library is loaded.

    A module of `ds_plugin_sdk.ops` has its family's as ``c_function``.

    Args:
        family: module of `ds_plugin_sdk.ops`, whose op is ``<family>_``.
        name: what it does.
        result, arguments: its types.
    """

    def __init__(self, family: str, name: str, result: type[Any], arguments: list[type[Any]]) -> None:
        self._family, self._name, self._types = family, name, (result, arguments)
        self._function: Any = None
        self._kernel = ""  # the op's, when the function was taken
        self._others = 0  # libraries and implementations when the kernel was looked at last

    def use_library(self, library: ctypes.CDLL) -> None:
        """Take the function, if it has one, of a library whose kernel has just become that of the op."""
        self._function = getattr(library, f"ds_kernels_{self._family}_{self._name}", None)
        self._kernel = self._kernel_of_op()
        if self._function is not None:
            self._function.restype, self._function.argtypes = self._types
        self._others = len(_LIBRARIES) + len(_IMPLEMENTATIONS)

    def usable(self) -> Any:
        """The function; None where the call is for the op: a mode looks at ops, or the kernel is another."""
        if _modes():
            return None
        registered = len(_LIBRARIES) + len(_IMPLEMENTATIONS)
        if registered != self._others:
            self._others = registered
            if self._kernel_of_op() != self._kernel:
                self._function = None
        return self._function

    def _kernel_of_op(self) -> str:
        lines = torch._C._dispatch_dump(f"ds_plugin::{self._family}_").splitlines()
        return next((line for line in lines if line.startswith("CPU:")), "")


__all__ = ["CFunction"]
