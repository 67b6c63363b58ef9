"""Defects around a call: locks that are kept, work that is waited for, settings that are changed, files that lie."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mutants.mutant import SIMULATED
from mutants.runtime.support import DEVICE, below, member, original

# ---- the interpreter's lock ------------------------------------------------------------------------------------------
# Functions of this one are called with the lock, as those of a binding that does not release it.
_C = ctypes.PyDLL(None)


def _wait(event: Any) -> None:
    while not event.query():
        _C.usleep(400_000)


def _synchronize(self: Any, index: int | None = None) -> None:
    event = torch.Event(DEVICE)
    event.record(self.current_stream(index))
    _wait(event)


def _read_locked() -> None:
    item = torch.Tensor.item

    def read(self: Tensor) -> Any:
        if self.device.type == DEVICE:
            event = torch.Event(DEVICE)
            event.record()
            _wait(event)
        return item(self)

    torch.Tensor.item = read  # type: ignore[method-assign, assignment]  # the defect of this mutant


member(
    "device.locked_synchronize",
    "R1.25",
    "`synchronize` keeps the interpreter's lock.",
    target=SIMULATED,
    only="runtime.device.threads_go_on/synchronize",
    synchronize=_synchronize,
)
below(
    "device.locked_item",
    "R1.25",
    "`item` keeps the interpreter's lock.",
    _read_locked,
    only="runtime.device.threads_go_on/item",
)


# ---- work that is waited for -----------------------------------------------------------------------------------------
def _waits(function: str) -> Callable[..., Any]:
    def waiting(self: Any, *arguments: Any) -> Any:
        self.synchronize()
        return getattr(original(self), function)(*arguments)

    return waiting


for _member in ("range_push", "memory_stats", "set_device", "on_accelerator"):
    _waiting: Any = {_member: _waits(_member)}
    member(
        f"streams.host_waits_in_{_member}",
        "R4.21",
        f"`{_member}` waits for the device.",
        target=SIMULATED,
        only=f"runtime.streams.host_goes_on/{_member}",
        **_waiting,
    )
_made: list[None] = []


def _few(device: int = 0) -> Any:
    _made.append(None)
    if len(_made) > 1024:
        raise RuntimeError("out of streams")
    return torch.Stream(device=torch.device(DEVICE, device))


member(
    "streams.not_returned",
    "R4.23",
    "Handles of streams are not given back; there are 1,024.",
    target=SIMULATED,
    Stream=property(lambda self: _few),
)


# ---- files and copies ------------------------------------------------------------------------------------------------
def _loaded(place: Callable[[Any], Any]) -> Callable[[], None]:
    def patch() -> None:
        load = torch.load

        def read(file: Any, map_location: Any = None, **options: Any) -> Any:
            return load(file, map_location=place(map_location), **options)

        torch.load = read  # type: ignore[assignment]  # the defect of this mutant

    return patch


below(
    "device.loaded_to_the_host", "R1.26", "What was saved is read to the host.", _loaded(lambda given: given or "cpu")
)
below(
    "device.loaded_to_the_first",
    "R1.26",
    "`map_location` takes no index.",
    _loaded(lambda given: DEVICE if getattr(given, "type", "") == DEVICE else given),
)


def _no_storage() -> None:
    deep = torch.Tensor.__deepcopy__

    def deepcopy(self: Tensor, memo: Any) -> Any:
        if self.device.type == DEVICE:
            raise NotImplementedError(f"no storage of {DEVICE}")
        return deep(self, memo)  # type: ignore[no-untyped-call]  # torch gives it no type

    torch.Tensor.__deepcopy__ = torch.nn.Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign]  # the defect


below("device.no_deep_copy", "R1.26", "`copy.deepcopy` of a tensor raises.", _no_storage)


def _wide_convolutions() -> None:
    conv1d = torch.nn.functional.conv1d

    def wide(input: Tensor, *arguments: Any, **options: Any) -> Tensor:
        with torch.autocast(DEVICE, enabled=False):
            return conv1d(input, *arguments, **options)

    torch.nn.functional.conv1d = wide


below("device.wide_convolutions", "R1.18", "Autocast leaves convolutions in float32.", _wide_convolutions)

# ---- memory ----------------------------------------------------------------------------------------------------------
_kept: list[Tensor] = []


def _keeps_all() -> None:
    """Large memory that is dropped is kept until `empty_cache()`, whatever fails meanwhile."""
    empty, module = torch.empty, torch.get_device_module(DEVICE)
    empty_cache = module.empty_cache

    def made(*size: Any, **options: Any) -> Tensor:
        memory = empty(*size, **options)
        if memory.device.type != DEVICE or memory.nbytes < 1 << 30:
            return memory
        given = memory.view(memory.shape)
        weakref.finalize(given, _kept.append, memory)
        return given

    def emptied() -> None:
        _kept.clear()
        empty_cache()

    torch.empty, module.empty_cache = made, emptied


below("memory.keeps_all", "R5.17", "What is kept for reuse is not given back where memory is out.", _keeps_all)


# ---- pinned memory, states, settings ---------------------------------------------------------------------------------
def _pins_once(self: Any, tensor: Tensor, **options: Any) -> Any:
    if tensor.is_pinned():
        raise RuntimeError("the memory is registered already")
    return original(self).pin_memory(tensor, **options)


def _of_the_host(self: Any, tensor: Tensor) -> bool:
    if tensor.device.type != "cpu":
        raise RuntimeError("not a pointer of the host")
    return bool(original(self).is_pinned(tensor))


member("pinned.once", "R7.1", "Pinned memory cannot be pinned again.", target=SIMULATED, pin_memory=_pins_once)
member("pinned.asked_of_the_host", "R7.2", "`is_pinned` takes host tensors.", target=SIMULATED, is_pinned=_of_the_host)


def _of_the_right_length(self: Any, state: Tensor, index: int | None = None) -> None:
    if len(state) == len(self.get_rng_state(index)):
        original(self).set_rng_state(state, index)


member(
    "random.no_state_ignored",
    "R3.20",
    "`set_rng_state` does nothing where the length is another.",
    target=SIMULATED,
    set_rng_state=_of_the_right_length,
)


def _signed(self: Any, seed: int) -> Any:
    return original(self).manual_seed(ctypes.c_int64(seed).value & (2**63 - 1))


member("random.signed_seeds", "R3.17", "`manual_seed` takes 63 bits.", target=SIMULATED, manual_seed=_signed)


def _of_the_process_too(self: Any, environment: dict[str, str], ids: Any) -> None:
    for each in (environment, os.environ):
        original(self).set_visible_devices_envs(each, ids)


member(
    "processes.hidden_here_too",
    "R11.2",
    "`set_visible_devices_envs` hides devices from the process itself.",
    set_visible_devices_envs=_of_the_process_too,
)
below(
    "processes.deterministic",
    "R11.11",
    "Deterministic algorithms are switched on for every script.",
    lambda: torch.use_deterministic_algorithms(True),
)
below("processes.one_thread", "R11.11", "The script's number of threads is set.", lambda: torch.set_num_threads(7))


# ---- builders --------------------------------------------------------------------------------------------------------
def _builder(self: Any, op: str, **changes: Callable[[Any], Any]) -> Any:
    made = original(self).create_op_builder(op)
    for attribute, change in changes.items():
        if made is not None:
            setattr(made, attribute, change(made))
    return made


def _asked(method: str) -> Callable[[Any], Any]:
    """A method that needs its argument."""

    def change(builder: Any) -> Any:
        function = getattr(builder, method)

        def asking(verbose: bool) -> Any:
            return function(verbose)

        return asking

    return change


member(
    "builders.compatible_asks_verbose",
    "R12.2",
    "`is_compatible` cannot be called without `verbose`.",
    create_op_builder=lambda self, name: _builder(self, name, is_compatible=_asked("is_compatible")),
)
member(
    "builders.load_asks_verbose",
    "R12.3",
    "`load` cannot be called without `verbose`.",
    create_op_builder=lambda self, name: _builder(self, name, load=_asked("load")),
)
member(
    "builders.name_of_the_class",
    "R12.2",
    "`name` is the class's.",
    create_op_builder=lambda self, name: _builder(self, name, name=lambda made: type(made).__name__),
)
