"""Functions of the CPU kernels' libraries, beside ops for whose calls torch's dispatcher takes longest: small tensors,
or many.

What is not plain is for the op: tensors of other classes, modes, kernels of others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from ds_plugin_sdk.ops._cpu_kernels import CPUKernels, registrations

_GIVES_FUNCTION = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
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
        self._kernels: CPUKernels | None = None  # the op's, when the function was taken
        self._registrations: tuple[int, ...] = ()  # when the kernels were looked at last

    def use_library(self, library: ctypes.CDLL) -> None:
        """Take the function, if it has one, of a library that was loaded just now: its kernel is the op's.

        If it was taken before, others may have registered a kernel since.
        """
        if library._handle == self._handle:
            return
        self._function, self._handle = None, library._handle
        self._kernels, self._registrations = CPUKernels(f"{self._family}_"), registrations()
        name = f"ds_kernels_{self._family}_function"
        if hasattr(library, name):
            self._function = _GIVES_FUNCTION((name, library))((Tensor, nn.Parameter, list))

    def usable(self) -> Callable[..., int] | None:
        """The function; None where the call is for the op: a mode or a profiler looks, or the kernel is not ours."""
        if _modes() or _profiled():
            return None
        registered = registrations()
        if registered != self._registrations:
            self._registrations = registered
            if self._kernels is not None and not self._kernels.hold():
                self._function = None
        return self._function

    def update(self, lists: Sequence[Sequence[Tensor]], *numbers: float) -> bool:
        """An optimizer's update of all tensors of lists; False where nothing was done and the call is for the op."""
        # Compilers and torch.func look for the op.
        if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
            return False
        function = self.usable()
        # In lists of our own no other thread takes a tensor's place while this one computes.
        return function is not None and function(*map(list, lists), *numbers) >= 0


__all__ = ["CFunction", "increment_version"]
