"""Sums over the ranks of a machine: ``ds_plugin::all_reduce_``, through memory that they share.

There is no reference implementation: no operation on tensors lets processes wait for each other. `ds_plugin_sdk.comm`
calls it.
"""

from __future__ import annotations

import ctypes
from typing import Any, NoReturn

from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._c_function import CFunction

# At the beginning of `shared`, for each rank: how many pieces it has posted (int64), and what the kernel keeps there.
# The rest are two slots for each rank.
STATE_BYTES = 128


class _Memory(ctypes.Structure):
    """``SharedMemory`` of kernels/cpu/all_reduce_binding.cpp."""

    _fields_ = (
        ("base", ctypes.c_void_p),
        ("size", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("ranks", ctypes.c_int64),
        ("patience", ctypes.c_double),
    )


c_function = CFunction("all_reduce")


class SharedSum:
    """The op for one memory, rank and patience.

    Args:
        shared: the memory, as the op has it.
        rank, ranks: this process, and how many there are.
        patience: seconds until a rank that waits comes back.
    """

    def __init__(self, shared: Tensor, rank: int, ranks: int, patience: float) -> None:
        self._others = (shared, rank, ranks, patience)
        self._memory = _Memory(shared.data_ptr(), shared.nbytes, rank, ranks, patience)
        self._address = ctypes.addressof(self._memory)

    def __call__(self, tensor: Tensor, start: int) -> int:
        """Add up a contiguous tensor from element `start` on. Gives the element where it stopped, if a rank is late.

        Raises:
            InvalidTensorError: the ranks' tensors differ in size or dtype.
        """
        function = c_function.usable()
        done = -1 if function is None else function(tensor, self._address, start)
        if done < 0:
            shared, rank, ranks, patience = self._others
            done = _library.call("all_reduce_", tensor, shared, rank, ranks, start, patience)
        return done


def _no_reference(*args: Any) -> NoReturn:
    raise NotImplementedError("ds_plugin::all_reduce_ has no kernel here, and no reference implementation")


_library.register(
    "all_reduce_(Tensor(a!) self, Tensor(b!) shared, int rank, int ranks, int start, float patience) -> int",
    _no_reference,
    fake=lambda self, *others: self.numel(),
    family="all_reduce",
)
