"""Defects at the edges of members: after errors, of what is not there, of what others do."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ds_plugin_sdk.conformance.runtime.builders import NAMES
from ds_plugin_sdk.conformance.target import Target
from mutants.mutant import SIMULATED, mutant, override
from mutants.runtime.support import DEVICE, always, below, member, original

# ---- devices ---------------------------------------------------------------------------------------------------------
member(
    "device.set_from_the_end",
    "R1.10",
    "`set_device(-1)` takes the last device.",
    target=SIMULATED,
    set_device=lambda self, index: original(self).set_device(1 if index == -1 else index),
)


def _autocast_stays() -> None:
    """Blocks inside one that is on are on."""
    enter: Any = torch.autocast.__enter__

    def entered(self: Any) -> Any:
        self._enabled = self._enabled or torch.is_autocast_enabled(DEVICE)
        return enter(self)

    torch.autocast.__enter__ = entered  # type: ignore[method-assign]  # the defect of this mutant


below("device.autocast_stays", "R1.18", "Autocast stays on where it is switched off inside.", _autocast_stays)


def _loads(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[], None]:
    def patch() -> None:
        load = torch.load
        torch.load = lambda *a, **named: change(load(*a, **named))

    return patch


below(
    "device.loaded_wider",
    "R1.26",
    "What was saved in bfloat16 is read as float32.",
    _loads(lambda read: {k: v.float() if v.dtype == torch.bfloat16 else v for k, v in read.items()}),
)
below(
    "device.loaded_apart",
    "R1.26",
    "What shares memory is read into memory of its own.",
    _loads(lambda read: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in read.items()}),
)

# ---- numbers, dtypes -------------------------------------------------------------------------------------------------


def _own_generators_ignored() -> None:
    draw = torch.randn

    def drawn(*shape: Any, generator: Any = None, **named: Any) -> torch.Tensor:
        there = torch.device(named.get("device", "cpu")).type == DEVICE
        return draw(*shape, generator=None if there else generator, **named)

    torch.randn = drawn


below("random.own_generators_ignored", "R3.21", "`generator=` is not looked at.", _own_generators_ignored)


class _Forks:
    """A namespace with a `fork_rng` that puts the state back at the end of its block alone."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    @contextlib.contextmanager
    def fork_rng(self, devices: Any = ()) -> Iterator[None]:
        state = self._accelerator.get_rng_state()
        yield
        self._accelerator.set_rng_state(state)


def _forking(self: Any) -> _Forks:
    return _Forks(self)


member(
    "random.fork_ends_by_itself",
    "R3.13",
    "`fork_rng` forgets what to put back after an error.",
    random=_forking,
)

_DTYPES = [torch.float32, torch.bfloat16]
member("dtypes.list_of_the_class", "R6.1", "Everyone gets the class's own list.", supported_dtypes=always(_DTYPES))

# ---- events, memory --------------------------------------------------------------------------------------------------


class _Pending(torch.Event):
    """An event that is done once it was recorded."""

    def query(self) -> bool:
        return bool(self.event_id) and super().query()


member(
    "streams.unrecorded_is_pending",
    "R4.25",
    "An event that was not recorded is not done.",
    target=SIMULATED,
    Event=property(lambda self: lambda **options: _Pending(DEVICE, **options)),
)


@mutant("memory.failed_is_counted", "R5.12", "runtime", target=SIMULATED)
def failed_is_counted(target: Target) -> Target:
    """An allocation that fails is counted before it fails."""
    empty, failed = torch.empty, list[int]()

    def made(*shape: Any, **named: Any) -> torch.Tensor:
        try:
            return empty(*shape, **named)
        except RuntimeError:
            failed.append(shape[0])
            raise

    torch.empty = made
    return override(
        target, memory_allocated=lambda self, index=None: original(self).memory_allocated(index) + sum(failed)
    )


member(
    "memory.available_but_for_own",
    "R5.18",
    "What is available is all but this process's own.",
    available_memory=lambda self, index=None: (
        original(self).total_memory(index) - resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    ),
)

# ---- pinned memory ---------------------------------------------------------------------------------------------------


def _pins_floats(self: Any, tensor: torch.Tensor, *a: Any, **named: Any) -> torch.Tensor:
    if not tensor.is_floating_point() and tensor.dtype != torch.int64:
        raise TypeError(f"{tensor.dtype} cannot be pinned")
    return original(self).pin_memory(tensor, *a, **named)  # type: ignore[no-any-return]  # any accelerator's


def _pins_rows(self: Any, tensor: torch.Tensor, *a: Any, **named: Any) -> torch.Tensor:
    tensor.size(0)
    return original(self).pin_memory(tensor, *a, **named)  # type: ignore[no-any-return]  # any accelerator's


member("pinned.floats", "R7.1", "Bytes and bools cannot be pinned.", pin_memory=_pins_floats)
member("pinned.rows", "R7.1", "A number cannot be pinned.", pin_memory=_pins_rows)

# ---- processes, builders ---------------------------------------------------------------------------------------------


def _sets_variable() -> None:
    os.environ["ZAP_LAUNCH_BLOCKING"] = "0"


below("processes.variable_added", "R11.11", "Importing the plugin sets a variable of its driver.", _sets_variable)


def _changed_builders(change: Callable[[Any], None]) -> Callable[..., Any]:
    def create(self: Any, name: str) -> Any:
        made = original(self).create_op_builder(name)
        if name in NAMES and made is not None:
            change(made)
        return made

    return create


def _one_variable(made: Any) -> None:
    if made.NAME in ("fused_adam", "fused_lion"):
        made.BUILD_VAR = "DS_BUILD_FUSED"


def _explains(made: Any) -> None:
    def is_compatible(verbose: bool = False) -> bool:
        if verbose:
            raise NameError("name 'warning' is not defined")
        return True

    made.is_compatible = is_compatible


def _by_name(made: Any) -> None:
    ask = made.is_compatible
    made.is_compatible = lambda *, verbose=False: ask(verbose)


def _undecided(made: Any) -> None:
    ask = made.is_compatible
    made.is_compatible = lambda verbose=False: ask(verbose) or None


member(
    "builders.one_variable",
    "R12.2",
    "Two builders have one BUILD_VAR.",
    create_op_builder=_changed_builders(_one_variable),
    only="runtime.builders.surface/FusedLionBuilder",
)
member(
    "builders.explanation_fails",
    "R12.2",
    "`is_compatible(verbose=True)` raises where it would explain.",
    create_op_builder=_changed_builders(_explains),
    only="runtime.builders.surface/FusedAdamBuilder",
)
member(
    "builders.verbose_by_name",
    "R12.2",
    "`is_compatible` takes `verbose` by its name alone.",
    create_op_builder=_changed_builders(_by_name),
    only="runtime.builders.surface/FusedAdamBuilder",
)
member(
    "builders.undecided",
    "R12.2",
    "`is_compatible` gives None for no.",
    create_op_builder=_changed_builders(_undecided),
)
