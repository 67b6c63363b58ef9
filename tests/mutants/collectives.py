"""Collectives that are wrong of many elements, or of more than two ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mutants.distributed import _function
from mutants.kernels import Kernel

# torch's stubs lack half of what is there.
dist: Any = torch.distributed


# ---- collectives -----------------------------------------------------------------------------------------------------
def _piece_lost(original: Kernel, output: Tensor, *rest: Any, **options: Any) -> Any:
    """A piece beyond the transport's buffer of 4 MiB is not brought."""
    work = original(output, *rest, **options)
    if output.numel() * output.itemsize > 8 << 20:
        output.view(-1)[(4 << 20) // output.itemsize : (4 << 20) // output.itemsize + 64] = 0
    return work


for _name in ("all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single"):
    _function(
        f"piece_of_{_name}",
        "D1.10",
        f"A piece of a large `{_name}` is lost.",
        _name,
        _piece_lost,
        only=_name,
    )


def _against_the_ring(original: Kernel, output: Tensor, source: Tensor, *rest: Any, **options: Any) -> Any:
    """The parts of a ring come against its direction: of two ranks, that is the same."""
    size, rank = dist.get_world_size(), dist.get_rank()
    work = original(output, source, *rest, **options)
    parts = output.view(size, -1)
    parts.copy_(parts.clone()[[(2 * rank - i) % size for i in range(size)]])
    return work


def _side_by_side(original: Kernel, output: Tensor, source: Tensor, **options: Any) -> Any:
    work = original(output, source, **options)
    if source.dim() > 1:
        parts = output.view(dist.get_world_size(), *source.shape)
        output.copy_(torch.cat([part.clone() for part in parts], 1).view(output.shape))
    return work


_function(
    "side_by_side",
    "D3.2",
    "Matrices are gathered one beside the other.",
    "all_gather_into_tensor",
    _side_by_side,
)
_function(
    "against_the_ring",
    "D6.9",
    "A ring is gone round the other way, which of two ranks is the same.",
    "all_gather_into_tensor",
    _against_the_ring,
)
