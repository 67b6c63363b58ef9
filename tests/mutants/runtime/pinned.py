"""Defects of page-locked host memory."""

from __future__ import annotations

from typing import Any

import torch

from mutants.mutant import SIMULATED
from mutants.runtime.support import always, member, original

member("pinned.empty", "R7.1", "`pin_memory` does not copy.", pin_memory=lambda self, t, **_: torch.zeros_like(t))
member("pinned.everything", "R7.2", "All memory counts as pinned.", is_pinned=always(True))
member("pinned.aliases", "R7.3", "`pin_memory` gives the tensor.", target=SIMULATED, pin_memory=lambda self, t, **_: t)
member("pinned.aliases_fresh", "R7.4", "`make_copy=False` gives the tensor.", pin_memory=lambda self, t, **_: t)
member(
    "pinned.shape_kept",
    "R7.5",
    "`match_shape` is ignored.",
    pin_memory=lambda self, tensor, make_copy=True, match_shape=True: torch.empty_like(tensor),
)
member(
    "pinned.any_device",
    "R7.6",
    "`pin_empty` takes any device.",
    pin_empty=lambda self, *size, dtype, device="cpu": original(self).pin_empty(*size, dtype=dtype),
)
member(
    "pinned.no_unpin", "R7.7", "`unpin_memory` wants another argument.", unpin_memory=lambda self, tensor, size: None
)
_STAGING: list[torch.Tensor] = []


def _one_buffer(self: Any, tensor: torch.Tensor, **_: Any) -> torch.Tensor:
    if not _STAGING:
        _STAGING.append(original(self).pin_memory(tensor))
    return _STAGING[0].copy_(tensor)


member("pinned.one_buffer", "R7.8", "All pinned tensors share a buffer.", target=SIMULATED, pin_memory=_one_buffer)
member(
    "pinned.odd_alignment",
    "R7.9",
    "`pin_memory_alignment()` is 3.",
    pin_memory_alignment=always(3),
    register_host_memory=always(False),
)


def _memory_alone(self: Any, tensor: torch.Tensor, **options: Any) -> Any:
    """As a driver copies that is given an address and a number of bytes."""
    if options:
        return original(self).pin_memory(tensor, **options)
    begin = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    pinned = original(self).pin_memory(begin)
    return pinned[tensor.storage_offset() :][: tensor.numel()].view(tensor.shape)


def _some_bytes(self: Any, tensor: torch.Tensor, **options: Any) -> Any:
    if tensor.numel() == 0:
        raise RuntimeError("cannot lock 0 bytes")
    return original(self).pin_memory(tensor, **options)


member("pinned.memory_alone", "R7.1", "Strides are forgotten.", target=SIMULATED, pin_memory=_memory_alone)
member("pinned.some_bytes", "R7.1", "A tensor without elements is an error.", target=SIMULATED, pin_memory=_some_bytes)
member(
    "pinned.beginnings",
    "R7.2",
    "Memory counts as pinned from its first byte on alone.",
    target=SIMULATED,
    is_pinned=lambda self, tensor: tensor.storage_offset() == 0 and original(self).is_pinned(tensor),
)
