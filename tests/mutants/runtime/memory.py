"""Defects of what is counted, and memory that aliases."""

from __future__ import annotations

import gc
from typing import Any

import torch

from mutants.mutant import SIMULATED
from mutants.runtime.support import DEVICE, always, below, member, nothing, original

member("memory.none", "R5.1", "`memory_allocated()` is None.", memory_allocated=nothing)
member(
    "memory.kib",
    "R5.2",
    "`memory_allocated()` is in KiB.",
    memory_allocated=lambda self, index=None: original(self).memory_allocated(index) // 1024,
)
member("memory.nothing_reserved", "R5.3", "`memory_reserved()` is 0.", memory_reserved=always(0))
member(
    "memory.peak_is_current",
    "R5.4",
    "The peak is the current value.",
    max_memory_allocated=lambda self, index=None: self.memory_allocated(index),
)
member(
    "memory.peak_not_reset",
    "R5.5",
    "`reset_peak_memory_stats` does nothing.",
    target=SIMULATED,
    reset_peak_memory_stats=nothing,
)
member("memory.cached_is_another", "R5.6", "`memory_cached()` is 0.", memory_cached=always(0))
member("memory.no_stats", "R5.7", "`memory_stats()` is None.", memory_stats=nothing)
member(
    "memory.total_in_mib",
    "R5.8",
    "`total_memory()` is in MiB.",
    total_memory=lambda self, index=None: original(self).total_memory(index) >> 20,
)
member(
    "memory.all_available",
    "R5.9",
    "`available_memory()` is the whole.",
    available_memory=lambda self, index=None: self.total_memory(index),
)
member(
    "memory.index_ignored",
    "R5.10",
    "`memory_stats(i)` is the current device's.",
    target=SIMULATED,
    memory_stats=lambda self, index=None: original(self).memory_stats(),
)
member(
    "memory.all_reset",
    "R5.11",
    "`reset_peak_memory_stats(i)` resets all devices.",
    target=SIMULATED,
    reset_peak_memory_stats=lambda self, index=None: [original(self).reset_peak_memory_stats(i) for i in (0, 1)],
)


def _never_exhausted() -> None:
    original = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        try:
            return original(*size, **options)
        except RuntimeError:
            return original(0, **options)

    torch.empty = empty


below("memory.never_exhausted", "R5.12", "An allocation that fails gives an empty tensor.", _never_exhausted)


def _clear_all(self: Any) -> None:
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.device.type == DEVICE:
            thing.zero_()


member("memory.cache_takes_all", "R5.13", "`empty_cache()` empties tensors.", target=SIMULATED, empty_cache=_clear_all)


def _shared() -> None:
    original: Any = torch.full
    made: list[torch.Tensor] = []

    def full(*arguments: Any, **options: Any) -> torch.Tensor:
        if torch.device(options.get("device", "cpu")) == torch.device(DEVICE, 1) and made:
            return made[0]
        made.append(original(*arguments, **options))
        return made[-1]

    torch.full = full


below("memory.shared", "R5.14", "Two devices have one memory.", _shared)
member(
    "memory.available_of_current",
    "R5.16",
    "`available_memory(i)` is the current device's.",
    target=SIMULATED,
    available_memory=lambda self, index=None: original(self).available_memory(),
)
