"""Collectives among the ranks of a machine, through memory that they share: ``ds_plugin::all_reduce_``,
``all_gather_`` and ``reduce_scatter_``.

There is no reference implementation: no operation on tensors lets processes wait for each other. `ds_plugin_sdk.comm`
calls them.
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
_FOR_THE_OP, _SAY_WHAT_IS_WRONG = -1, -2  # as kernels/cpu/all_reduce_binding.cpp has them


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


class SharedRanks:
    """The ops for one memory, rank and patience.

    Each takes contiguous tensors, and `start`, the element of a rank's part to begin with; it gives the element where
    it stopped, which is not the last if a rank is late. They raise InvalidTensorError where ranks do different things,
    or with tensors of different sizes or dtypes.

    Args:
        shared: the memory, as the ops have it.
        rank, ranks: this process, and how many there are.
        patience: seconds until a rank that waits comes back.
    """

    def __init__(self, shared: Tensor, rank: int, ranks: int, patience: float) -> None:
        self._shared, self._rank, self._ranks, self._patience = shared, rank, ranks, patience
        self._memory = _Memory(shared.data_ptr(), shared.nbytes, rank, ranks, patience)
        self._address = ctypes.addressof(self._memory)

    def all_reduce(self, tensor: Tensor, start: int) -> int:
        """Add up a tensor."""
        function = c_function.usable()
        done = _FOR_THE_OP if function is None else function(tensor, self._address, start)
        if done >= 0:
            return done
        # What the function has found out about the others is not asked a second time: they may not be there any more.
        return self._call("all_reduce_", tensor, start=start if done == _FOR_THE_OP else _SAY_WHAT_IS_WRONG)

    def all_gather(self, output: Tensor, input: Tensor, start: int) -> int:
        """Put the ranks' inputs, of bytes, one after the other into `output`, in which this rank's may already lie."""
        return self._call("all_gather_", output, input, start=start)

    def reduce_scatter(self, output: Tensor, input: Tensor, start: int) -> int:
        """Add up this rank's part of the ranks' inputs into `output`, which may be that part."""
        return self._call("reduce_scatter_", output, input, start=start)

    def _call(self, op: str, *tensors: Tensor, start: int) -> int:
        return int(_library.call(op, *tensors, self._shared, self._rank, self._ranks, start, self._patience))


def _no_reference(*args: Any) -> NoReturn:
    raise NotImplementedError("the ops of ds_plugin_sdk.ops.all_reduce have no reference implementation")


_SHARED = "Tensor(b!) shared, int rank, int ranks, int start, float patience) -> int"
_library.register(
    f"all_reduce_(Tensor(a!) self, {_SHARED}",
    _no_reference,
    fake=lambda self, *others: self.numel(),
    family="all_reduce",
    unrecorded=True,  # as torch's collectives
)
_library.register(
    f"all_gather_(Tensor(a!) output, Tensor input, {_SHARED}",
    _no_reference,
    fake=lambda output, input, *others: input.numel(),
    family="all_reduce",
    unrecorded=True,  # as torch's collectives
)
_library.register(
    f"reduce_scatter_(Tensor(a!) output, Tensor input, {_SHARED}",
    _no_reference,
    fake=lambda output, *others: output.numel(),
    family="all_reduce",
    unrecorded=True,  # as torch's collectives
)
