"""Defects of indices: 0 that is taken for none, device 0 where the current one is meant, a query that changes it."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mutants.mutant import SIMULATED
from mutants.runtime.support import DEVICE, member, original


# ---- `if index:` where `if index is not None:` is meant --------------------------------------------------------------
def _zero_is_none(function: str) -> Callable[..., Any]:
    return lambda self, index=None: getattr(original(self), function)(index or None)


for _name, _clause, _member in (
    ("device.name_of_zero", "R1.3", "device_name"),
    ("device.device_zero", "R1.8", "device"),
    ("device.synchronize_zero", "R1.13", "synchronize"),
    ("streams.current_of_zero", "R4.4", "current_stream"),
    ("memory.allocated_of_zero", "R5.10", "memory_allocated"),
    ("memory.available_of_zero", "R5.16", "available_memory"),
):
    _members: Any = {_member: _zero_is_none(_member)}
    member(_name, _clause, f"`{_member}(0)` is `{_member}()`.", target=SIMULATED, **_members)
member(
    "random.state_of_zero",
    "R3.5",
    "`set_rng_state(state, 0)` is `set_rng_state(state)`.",
    target=SIMULATED,
    set_rng_state=lambda self, state, index=None: original(self).set_rng_state(state, index or None),
)
member(
    "random.generator_of_zero",
    "R3.7",
    "`default_generator(0)` is the current device's.",
    target=SIMULATED,
    default_generator=lambda self, index=None: original(self).default_generator(index or self.current_device()),
)
member(
    "streams.made_for_zero",
    "R4.4",
    "`Stream(device=0)` is of the current device.",
    target=SIMULATED,
    Stream=property(lambda self: lambda device=None: original(self).Stream(device or None)),
)

# ---- device 0, whichever is current: of every rank but the first it is another's -------------------------------------
member(
    "device.device_of_the_first",
    "R1.8",
    "`device()` is device 0, whichever is current.",
    target=SIMULATED,
    device=lambda self, index=0: original(self).device(index),
)
member(
    "random.fork_of_the_first",
    "R3.13",
    "`fork_rng` keeps the generator of device 0.",
    target=SIMULATED,
    random=lambda self: types.SimpleNamespace(fork_rng=lambda devices: original(self).random().fork_rng(devices=[0])),
)
member(
    "memory.cache_of_the_first",
    "R5.3",
    "`empty_cache()` empties that of device 0 alone.",
    target=SIMULATED,
    empty_cache=lambda self: original(self).empty_cache() if self.current_device() == 0 else None,
)
member(
    "memory.older_reset_of_the_first",
    "R5.5",
    "`reset_max_memory_allocated()` is device 0's, whichever is current.",
    target=SIMULATED,
    reset_max_memory_allocated=lambda self, index=0: self.reset_peak_memory_stats(index),
)
member(
    "dtypes.factories_of_the_first",
    "R6.5",
    "`FloatTensor` makes tensors on device 0, whichever is current.",
    target=SIMULATED,
    FloatTensor=property(lambda self: lambda numbers: torch.tensor(numbers, dtype=torch.float32, device=f"{DEVICE}:0")),
)

# ---- what DeepSpeed hands over ---------------------------------------------------------------------------------------
member(
    "device.no_text",
    "R1.3",
    "`device_name` takes no number as a text, which LOCAL_RANK is.",
    target=SIMULATED,
    device_name=lambda self, index=None: DEVICE if index is None else f"{DEVICE}:{index:d}",
)
member(
    "device.set_by_number",
    "R1.9",
    "`set_device` takes no torch.device.",
    target=SIMULATED,
    set_device=lambda self, index: original(self).set_device(index + 0),
)
member(
    "dtypes.no_bools",
    "R6.5",
    "`ByteTensor` takes no bools.",
    ByteTensor=property(lambda self: lambda numbers: torch.frombuffer(_bytes(numbers), dtype=torch.uint8)),
)


def _bytes(numbers: list[Any]) -> bytearray:
    if any(isinstance(number, bool) for number in numbers):
        raise TypeError("an integer is required")
    return bytearray(numbers)


@contextlib.contextmanager
def _left_current(self: Any, stream: Any) -> Iterator[None]:
    """Afterwards the former device is current, and on it its stream."""
    device, before = self.current_device(), self.current_stream()
    if stream is not None:
        torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        self.set_device(device)
        torch.accelerator.set_stream(before)


member(
    "streams.left_current",
    "R4.18",
    "A stream of another device is left that device's current one.",
    target=SIMULATED,
    stream=_left_current,
)


# ---- the device that a query leaves current --------------------------------------------------------------------------
def _moves(function: str) -> Callable[..., Any]:
    """The member makes the device current that it is asked of, as a driver has it that has no index in its calls."""

    def asked(self: Any, index: int | None = None) -> Any:
        if index is not None:
            original(self).set_device(index)
        return getattr(original(self), function)()

    return asked


for _member in ("memory_stats", "total_memory", "current_stream"):
    _moved: Any = {_member: _moves(_member)}
    member(f"device.moved_by_{_member}", "R1.24", f"`{_member}(i)` makes `i` current.", target=SIMULATED, **_moved)


def _seed_each(self: Any, seed: int) -> None:
    for index in range(self.device_count()):
        self.set_device(index)
        self.manual_seed(seed)


member("device.moved_by_seeds", "R1.24", "Seeds leave the last device.", target=SIMULATED, manual_seed_all=_seed_each)
