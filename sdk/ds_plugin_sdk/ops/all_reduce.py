"""Sums over the ranks of a machine: ``ds_plugin::all_reduce_``, through memory that they share.

There is no reference implementation: no operation on tensors lets processes wait for each other. `ds_plugin_sdk.comm`
calls it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ds_plugin_sdk.ops import _library

# At the beginning of `shared`, for each rank: how many pieces it has posted (int64), and what the kernel keeps there.
# The rest are two slots for each rank.
STATE_BYTES = 128


def _no_reference(*args: Any) -> NoReturn:
    raise NotImplementedError("ds_plugin::all_reduce_ has no kernel here, and no reference implementation")


_library.register(
    "all_reduce_(Tensor(a!) self, Tensor(b!) shared, int rank, int ranks, int start, float patience) -> int",
    _no_reference,
    fake=lambda self, *others: self.numel(),
    family="all_reduce",
)
