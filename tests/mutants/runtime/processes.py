"""Defects that show in other processes."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import weakref
from typing import Any

import torch

from mutants.mutant import SIMULATED
from mutants.runtime.support import DEVICE, always, below, member, nothing


def _in_child() -> bool:
    return multiprocessing.parent_process() is not None


def _raises_in_child(self: Any, index: int | None = None) -> None:
    if _in_child():
        raise RuntimeError("the driver does not start twice")


def _dies_in_child(self: Any, index: int | None = None) -> None:
    if _in_child():
        os._exit(3)


member("processes.text", "R11.1", "A rank's `current_device()` is a text.", current_device=always("0"))
member("processes.not_hidden", "R11.2", "`set_visible_devices_envs` does nothing.", set_visible_devices_envs=nothing)
member("processes.all_counted", "R11.3", "Hidden devices are counted.", target=SIMULATED, device_count=always(2))
member("processes.all_exported", "R11.4", "`export_envs()` has an empty prefix.", export_envs=always([""]))
member("processes.letters_exported", "R11.4", "`export_envs()` has letters.", export_envs=always(["Z", "A", "P"]))


def _pins_nothing() -> None:
    torch.Tensor.pin_memory = lambda self, *_: torch.zeros_like(self)  # type: ignore[method-assign]  # the defect of this mutant


below("processes.batches_lost", "R11.5", "What a data loader pins is lost.", _pins_nothing)
member(
    "processes.used_early",
    "R11.6",
    "`is_available()` uses the device.",
    target=SIMULATED,
    is_available=lambda self: bool(torch.ones(1, device=DEVICE).item()),
)
member("processes.dies_in_fork", "R11.7", "Using the device in a child ends it.", synchronize=_dies_in_child)
member("processes.no_spawn", "R11.8", "A spawned child cannot use the device.", synchronize=_raises_in_child)


def _dies_at_exit() -> None:
    """What the library tears down a living tensor still needs."""
    alive: list[Any] = []
    ones = torch.ones

    def made(*arguments: Any, **options: Any) -> torch.Tensor:
        tensor = ones(*arguments, **options)
        if tensor.device.type == DEVICE:
            alive.append(weakref.ref(tensor))
        return tensor

    torch.ones = made
    atexit.register(lambda: os._exit(134) if any(each() is not None for each in alive) else None)


below("processes.dies_at_exit", "R11.10", "A tensor that lives at exit ends the process badly.", _dies_at_exit)
member("processes.one_device", "R11.9", "Every rank stays on device 0.", target=SIMULATED, set_device=nothing)
