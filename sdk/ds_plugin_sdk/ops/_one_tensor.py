"""An optimizer's step of one tensor in host memory, by a C function of the CPU kernels.

DeepSpeed's optimizers on the host call for each parameter, and torch's dispatcher takes several times as long as the
update of a small one. What is not plain is for the op: tensors of other classes, modes, kernels of others.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version


class OneTensor:
    """``ds_kernels_<family>_update`` of ``kernels/cpu/<family>_binding.cpp``, once that library is loaded.

    Args:
        family: module of `ds_plugin_sdk.ops`, whose op is ``<family>_``.
    """

    def __init__(self, family: str) -> None:
        self._family = family
        self._function: Any = None
        self._kernel = ""  # the op's, when the function was taken
        self._others = 0  # `_registered` when the kernel was looked at last
        # The numbers of the call before, and their bytes; one object, for there may be several threads.
        self._packed: tuple[tuple[float, ...], bytes] = ((), b"")

    def use_library(self, library: ctypes.CDLL) -> None:
        """Take the function, if it has one, of a library whose kernel has just become that of the op."""
        self._function, self._kernel = getattr(library, f"ds_kernels_{self._family}_update", None), self._kernel_of_op()
        if self._function is not None:
            self._function.restype, self._function.argtypes = ctypes.c_int32, [ctypes.c_void_p] * 5
        self._others = _registered()

    def update(
        self, numbers: tuple[float, ...], param: Tensor, grad: Tensor, first: Tensor, second: Tensor | None = None
    ) -> bool:
        """Update a tensor, and have autograd notice; False if that is for the op, and nothing was modified.

        Args:
            numbers: the step's number, and the op's other arguments in the order of its schema.
            param, grad, first, second: the parameter, its gradient and its states.
        """
        if not type(param) is type(grad) is type(first) is Tensor or (
            second is not None and type(second) is not Tensor
        ):
            return False
        if self._function is None or torch._C._len_torch_dispatch_stack():
            return False
        if _registered() != self._others and not self._still():
            return False
        known, packed = self._packed
        if known != numbers:
            form = f"{len(numbers)}d"
            packed = struct.pack(form, *numbers)
            self._packed = struct.unpack(form, packed), packed  # plain numbers: a tensor among them may change
        if second is None:
            done = self._function(param._cdata, grad._cdata, first._cdata, None, packed)
            written = [param, first]
        else:
            done = self._function(param._cdata, grad._cdata, first._cdata, second._cdata, packed)
            written = [param, first, second]
        if done:
            increment_version(written)
        return bool(done)

    def _still(self) -> bool:
        """Whether nobody has replaced the op's kernel since."""
        self._others = _registered()
        if self._kernel_of_op() != self._kernel:
            self._function = None
        return self._function is not None

    def _kernel_of_op(self) -> str:
        lines = torch._C._dispatch_dump(f"ds_plugin::{self._family}_").splitlines()
        return next((line for line in lines if line.startswith("CPU:")), "")


def _registered() -> int:
    """Loaded libraries and kernels that Python registered: who has another kernel for the op is among them."""
    return len(torch.ops.loaded_libraries) + len(torch.library._impls)


__all__ = ["OneTensor"]
