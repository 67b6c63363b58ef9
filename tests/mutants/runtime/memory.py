"""Defects of what is counted, and memory that aliases."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch

from ds_plugin_sdk.conformance.target import Target
from mutants.mutant import SIMULATED, mutant, override
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


def _largest_seen(self: Any, index: int | None = None) -> int:
    self.__dict__["seen"] = max(self.__dict__.get("seen", 0), self.memory_allocated(index))
    return int(self.__dict__["seen"])


member(
    "memory.peak_of_what_was_seen",
    "R5.4",
    "The peak is the largest value that there was when it was asked for.",
    only="/allocated",
    max_memory_allocated=_largest_seen,
    reset_peak_memory_stats=lambda self, index=None: self.__dict__.update(seen=0),
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

_cached: list[torch.Tensor] = []
_freed: list[torch.Tensor] = []


@mutant("memory.freed_at_once", "R5.13", "runtime", target=SIMULATED)
def freed_at_once(target: Target) -> Target:
    """`empty_cache()` gives memory back to a driver that does not wait for the work of the device."""
    full: Any = torch.full

    def reused(size: Any, number: float, *, device: Any = None, **options: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != DEVICE:
            made: torch.Tensor = full(size, number, device=device, **options)
            return made
        at = next((i for i, each in enumerate(_freed) if tuple(each.shape) == tuple(size)), None)
        memory = full(size, number, device=device, **options) if at is None else _freed.pop(at)
        given: torch.Tensor = memory.view(memory.shape)
        weakref.finalize(given, _cached.append, memory)
        return given.fill_(number)

    def empty_cache(self: Any) -> None:
        _freed.extend(_cached)
        _cached.clear()

    torch.full = reused  # type: ignore[assignment]  # the defect of this mutant
    return override(target, empty_cache=empty_cache)


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
    "memory.available_of_the_first",
    "R5.16",
    "`available_memory()` is device 0's, whichever is current.",
    target=SIMULATED,
    available_memory=lambda self, index=0: original(self).available_memory(index),
)
member(
    "memory.reset_of_the_first",
    "R5.15",
    "`reset_peak_memory_stats()` resets device 0, whichever is current.",
    target=SIMULATED,
    reset_peak_memory_stats=lambda self, index=0: original(self).reset_peak_memory_stats(index),
)
member(
    "memory.available_of_current",
    "R5.16",
    "`available_memory(i)` is the current device's.",
    target=SIMULATED,
    available_memory=lambda self, index=None: original(self).available_memory(),
)
