"""Defects of the behaviour flags."""

from __future__ import annotations

from typing import Any

import torch

from mutants.mutant import SIMULATED
from mutants.runtime.support import always, below, member, nothing

member("flags.number", "R2.1", "`use_host_timers()` is 1.", use_host_timers=always(1))
member(
    "flags.asynchronous_without_streams",
    "R2.2",
    "It is not synchronized, and Stream is None.",
    is_synchronized_device=always(False),
    _check_flags=nothing,
)
member(
    "flags.unordered_without_streams",
    "R2.3",
    "It does not resolve dependencies, and Stream is None.",
    resolves_data_dependency=always(False),
    _check_flags=nothing,
)
member(
    "flags.backpressure_without_events",
    "R2.4",
    "It does not handle backpressure, and Event is None.",
    handles_memory_backpressure=always(False),
    _check_flags=nothing,
)
member(
    "flags.device_timers_without_events",
    "R2.5",
    "It does not use host timers, and Event is None.",
    use_host_timers=always(False),
    _check_flags=nothing,
)
member("flags.falsely_synchronized", "R2.6", "It is asynchronous and denies it.", target=SIMULATED, synchronous=True)
member(
    "flags.falsely_resolving",
    "R2.7",
    "It claims to order streams by itself.",
    target=SIMULATED,
    resolves_data_dependency=always(True),
)


def _host_waits() -> None:
    original = torch.Tensor.fill_

    def fill_(self: torch.Tensor, value: Any) -> torch.Tensor:
        result = original(self, value)
        torch.accelerator.synchronize()
        return result

    torch.Tensor.fill_ = fill_  # type: ignore[method-assign, assignment]  # the defect of this mutant


below("flags.host_waits", "R2.8", "The host waits for each piece of work.", _host_waits)
