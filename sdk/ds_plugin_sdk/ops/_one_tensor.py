"""An optimizer's step of one tensor in host memory, by a C function of the CPU kernels.

DeepSpeed's optimizers on the host call for each parameter, and torch's dispatcher takes several times as long as the
update of a small one.
"""

from __future__ import annotations

import ctypes
import struct

from torch import Tensor
from torch.autograd.graph import increment_version

from ds_plugin_sdk.ops._c_function import CFunction

_POINTER = ctypes.c_void_p


class OneTensor(CFunction):
    """``ds_kernels_<family>_update``.

    Args:
        family: module of `ds_plugin_sdk.ops`, whose op is ``<family>_``.
    """

    def __init__(self, family: str) -> None:
        arguments = [_POINTER, _POINTER, _POINTER, _POINTER, ctypes.c_int64, _POINTER]
        super().__init__(family, "update", ctypes.c_int32, arguments)
        # The numbers of the call before, and their bytes; one object, for there may be several threads.
        self._packed: tuple[tuple[float, ...], bytes] = ((), b"")

    def update(
        self,
        step: int,
        numbers: tuple[float, ...],
        param: Tensor,
        grad: Tensor,
        first: Tensor,
        second: Tensor | None = None,
    ) -> bool:
        """Update a tensor, and have autograd notice; False if that is for the op, and nothing was modified.

        Args:
            step: the step's number, from 1; of an optimizer without one, any.
            numbers: the op's other arguments in the order of its schema.
            param, grad, first, second: the parameter, its gradient and its states.
        """
        function = self.usable()
        if function is None or not type(param) is type(grad) is type(first) is Tensor:
            return False
        known, packed = self._packed
        if known != numbers:
            packed = self._pack(numbers)
        written: tuple[Tensor, ...]
        if second is None:
            done = function(param._cdata, grad._cdata, first._cdata, None, int(step), packed)
            written = (param, first)
        elif type(second) is Tensor:
            done = function(param._cdata, grad._cdata, first._cdata, second._cdata, int(step), packed)
            written = (param, first, second)
        else:
            return False
        if done:
            increment_version(written)
        return bool(done)

    def _pack(self, numbers: tuple[float, ...]) -> bytes:
        form = f"{len(numbers)}d"
        packed = struct.pack(form, *numbers)
        # Plain numbers: a tensor among them may change. The same objects are compared fastest.
        plain = all(type(number) in (float, int, bool) for number in numbers)
        self._packed = numbers if plain else struct.unpack(form, packed), packed
        return packed


__all__ = ["OneTensor"]
