"""Functions of the CPU kernels' libraries, beside ops for whose calls torch's dispatcher takes longest: small tensors,
or many.

What is not plain is for the op: tensors of other classes, modes, kernels of others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

# Loaded libraries and kernels that Python registered: who has another kernel for the op is among them.
_LIBRARIES, _IMPLEMENTATIONS = torch.ops.loaded_libraries, torch.library._impls
_GIVES_FUNCTION = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# That of torch.autograd.graph, which first looks at what it is given.
increment_version: Callable[[Iterable[Tensor]], None] = torch._C._increment_version


class CFunction:
    """``<family>_function`` of ``kernels/cpu/<family>_binding.cpp``, once that library is loaded.

    A module of `ds_plugin_sdk.ops` has its family's as ``c_function``. It gives -1 where it did nothing and the call is
    for the op.

    Args:
        family: module of `ds_plugin_sdk.ops`, whose op is ``<family>_``.
    """

    def __init__(self, family: str) -> None:
        self._family = family
        self._function: Callable[..., int] | None = None
        self._handle = 0  # of the library it is from
        self._kernel = ""  # the op's, when the function was taken
        self._others = 0  # libraries and implementations when the kernel was looked at last

    def use_library(self, library: ctypes.CDLL) -> None:
        """Take the function, if it has one, of a library that was loaded just now: its kernel is the op's.

        If it was taken before, others may have registered a kernel since.
        """
        if library._handle == self._handle:
            return
        self._function, self._handle = None, library._handle
        self._kernel = self._kernel_of_op()
        self._others = len(_LIBRARIES) + len(_IMPLEMENTATIONS)
        name = f"ds_kernels_{self._family}_function"
        if hasattr(library, name):
            self._function = _GIVES_FUNCTION((name, library))((Tensor, nn.Parameter, list))

    def usable(self) -> Callable[..., int] | None:
        """The function; None where the call is for the op: a mode looks at ops, or the kernel is another."""
        if _modes():
            return None
        registered = len(_LIBRARIES) + len(_IMPLEMENTATIONS)
        if registered != self._others:
            self._others = registered
            if self._kernel_of_op() != self._kernel:
                self._function = None
        return self._function

    def update(self, lists: Sequence[Sequence[Tensor]], *numbers: float) -> bool:
        """An optimizer's update of all tensors of lists; False where nothing was done and the call is for the op."""
        # Compilers, profilers and torch.func look for the op.
        if (
            torch.compiler.is_compiling()
            or torch._C._autograd._profiler_enabled()
            or torch._C._functorch.peek_interpreter_stack() is not None
        ):
            return False
        function = self.usable()
        # In lists of our own no other thread takes a tensor's place while this one computes.
        return function is not None and function(*map(list, lists), *numbers) >= 0

    def _kernel_of_op(self) -> str:
        lines = torch._C._dispatch_dump(f"ds_plugin::{self._family}_").splitlines()
        return next((line for line in lines if line.startswith("CPU:")), "")


__all__ = ["CFunction", "increment_version"]
