"""Sums over the ranks of a machine: ``ds_plugin::all_reduce_``, through memory that they share.

No reference: tensors have no operation by which processes wait for each other. `ds_plugin_sdk.comm` is its face.
"""

from __future__ import annotations

from torch import Tensor

from ds_plugin_sdk.ops import _library

# At the beginning of `shared`, for each rank: how many pieces it has posted (int64), and what the kernel keeps there.
# The rest are two slots for each rank.
STATE_BYTES = 128


def _fake(self: Tensor, shared: Tensor, rank: int, ranks: int, start: int, patience: float) -> int:
    return self.numel()


_library.define(
    "all_reduce_(Tensor(a!) self, Tensor(b!) shared, int rank, int ranks, int start, float patience) -> int",
    reference=None,
    fake=_fake,
)
