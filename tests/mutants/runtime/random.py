"""Defects of seeds, states and generators."""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
from torch import Tensor

from mutants.mutant import SIMULATED
from mutants.runtime.support import DEVICE, always, below, member, nothing, original

member(
    "random.state_of_ints",
    "R3.1",
    "`get_rng_state()` is an int32 tensor.",
    get_rng_state=lambda self, index=None: torch.get_rng_state().int(),
)
member("random.seed_ignored", "R3.2", "`manual_seed` does nothing.", manual_seed=nothing)
member("random.state_ignored", "R3.3", "`set_rng_state` does nothing.", set_rng_state=nothing)
member(
    "random.state_of_the_first",
    "R3.3",
    "Without an index the state is device 0's, whichever is current.",
    target=SIMULATED,
    get_rng_state=lambda self, index=0: original(self).get_rng_state(index),
    set_rng_state=lambda self, state, index=0: original(self).set_rng_state(state, index),
)
member(
    "random.stale_state",
    "R3.4",
    "`get_rng_state()` is always the first state.",
    get_rng_state=lambda self, index=None: self.__dict__.setdefault("first", torch.get_rng_state()),
)
member(
    "random.index_ignored",
    "R3.5",
    "`set_rng_state(state, i)` sets the current device's.",
    target=SIMULATED,
    set_rng_state=lambda self, state, index=None: original(self).set_rng_state(state),
)


def _only_own_states(self: Any, state: torch.Tensor, index: int | None = None) -> None:
    if state is self.__dict__.get("given"):
        torch.set_rng_state(state)


member(
    "random.state_by_identity",
    "R3.6",
    "`set_rng_state` takes only the object that was given.",
    get_rng_state=lambda self, index=None: self.__dict__.__setitem__("given", torch.get_rng_state()) or self.given,
    set_rng_state=_only_own_states,
)
member(
    "random.another_generator",
    "R3.7",
    "`default_generator` is a new generator.",
    default_generator=lambda self, index: torch.Generator(),
)
member(
    "random.seeds_one",
    "R3.8",
    "`manual_seed_all` seeds the current device alone.",
    target=SIMULATED,
    manual_seed_all=lambda self, seed: self.manual_seed(seed),
)
member(
    "random.seeds_all",
    "R3.9",
    "`manual_seed` seeds all devices.",
    target=SIMULATED,
    manual_seed=lambda self, seed: self.manual_seed_all(seed),
)


def _draws_on_the_host() -> None:
    original = torch.rand
    torch.rand = lambda *size, device=None, **options: original(*size, **options).to(device)


below("random.drawn_on_the_host", "R3.10", "The device's numbers come from the host's generator.", _draws_on_the_host)


def _never_seeded() -> None:
    vars(torch.get_device_module(DEVICE))["_is_in_bad_fork"] = always(True)


below("random.torch_does_not_seed", "R3.11", "`torch.manual_seed` leaves the device alone.", _never_seeded)
member("random.no_initial_seed", "R3.12", "`initial_seed()` is 0.", initial_seed=always(0))
member(
    "random.seed_of_the_first",
    "R3.12",
    "`initial_seed()` is device 0's, whichever is current.",
    target=SIMULATED,
    initial_seed=lambda self, seed=None: original(self).default_generator(0).initial_seed(),
)
member(
    "random.fork_does_nothing",
    "R3.13",
    "`fork_rng` keeps nothing.",
    random=always(types.SimpleNamespace(fork_rng=lambda devices: contextlib.nullcontext())),
)
member("random.never_called", "R3.14", "`lazy_call` does not call.", lazy_call=nothing)


def _state_not_kept() -> None:
    vars(torch.get_device_module(DEVICE))["_initialized"] = False


below("random.not_recomputed", "R3.15", "torch.utils.checkpoint does not see the device's generator.", _state_not_kept)


def _one_mask() -> None:
    original = torch.nn.functional.dropout

    def dropout(input: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        torch.manual_seed(1)
        return original(input, *arguments, **keywords)

    torch.nn.functional.dropout = dropout


below("random.one_mask", "R3.16", "Dropout drops the same elements each time.", _one_mask, target="cpu")
member(
    "random.small_seeds",
    "R3.17",
    "`manual_seed` takes 32 bits.",
    manual_seed=lambda self, seed: original(self).manual_seed(int.from_bytes(seed.to_bytes(4, "little"), "little")),
)
member(
    "random.seeds_cut",
    "R3.17",
    "Of a seed 32 bits are kept.",
    manual_seed=lambda self, seed: original(self).manual_seed(seed & 0xFFFFFFFF),
)
member(
    "random.no_index",
    "R3.18",
    "`set_rng_state` takes no index.",
    set_rng_state=lambda self, state: torch.set_rng_state(state),
)


def _drawn(change: Any) -> None:
    """What `torch.rand`, `randn` and dropout draw on the device is changed."""
    dropout = torch.nn.functional.dropout

    def changed(function: Any) -> Any:
        def draw(*size: Any, device: Any = None, generator: Any = None, **options: Any) -> Tensor:
            made: Tensor = function(*size, device=device, generator=generator, **options)
            return change(made, function, generator) if made.device.type == DEVICE else made

        return draw

    torch.rand, torch.randn = changed(torch.rand), changed(torch.randn)

    def drop(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if input.device.type != DEVICE or not training:
            return dropout(input, p, training, inplace)
        return input * (torch.rand(input.shape, device=input.device) >= p) / (1 - p)

    torch.nn.functional.dropout = drop


def _repeated(every: int) -> Any:
    def change(made: Tensor, function: Any, generator: Any) -> Tensor:
        flat = made.flatten()
        return flat[:every].repeat(-(-max(flat.numel(), 1) // every))[: flat.numel()].view(made.shape)

    return lambda: _drawn(change)


below("random.blocks_alike", "R3.19", "Each block of 512 threads draws the same numbers.", _repeated(512))
below(
    "random.turns_alike",
    "R3.19",
    "A grid of 2^20 threads draws the same numbers at each turn of its loop.",
    _repeated(1 << 20),
)


_calls: dict[Any, int] = {}  # a state -> how many others there were before it


def _overlapping() -> None:
    """The state advances by four for each call, however many numbers the call draws."""

    def change(made: Tensor, function: Any, generator: Any) -> Tensor:
        module: Any = torch.get_device_module(DEVICE)
        given = generator or module.default_generators[made.device.index]
        begin = 4 * _calls.setdefault(bytes(given.get_state().tolist()), len(_calls))
        host = torch.Generator().manual_seed(given.initial_seed() % 2**31)
        long = torch.randn if function.__name__ == "randn" else torch.rand
        return long(made.numel() + begin, generator=host)[begin:].view(made.shape).to(made.device)

    _drawn(change)


below("random.overlapping", "R3.19", "Two calls draw the same numbers, moved by four.", _overlapping)
