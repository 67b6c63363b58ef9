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
