"""R3: seeds, states and generators, of each device apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ds_plugin_sdk.conformance.check import Clause, check, expect, expect_equal
from ds_plugin_sdk.conformance.runtime.support import (
    current_device_kept,
    each_current,
    expect_raises,
    expect_type,
    indexed,
    indices,
    made_current,
    needs_two_devices,
    random_state_kept,
)
from ds_plugin_sdk.conformance.target import Target


def _draw(target: Target, index: int | None = None, generator: torch.Generator | None = None) -> list[float]:
    device = target.accelerator.current_device_name() if index is None else target.accelerator.device_name(index)
    values: list[float] = torch.rand(8, device=device, generator=generator).cpu().tolist()
    return values


def _draw_both(target: Target) -> list[float]:
    """Uniform and normal numbers; of the latter an odd count, so that one of a pair may be kept."""
    normal: list[float] = torch.randn(3, device=target.device).cpu().tolist()
    return [*normal, *_draw(target)]


@check(
    "runtime.random.state_type",
    Clause(
        "R3.1",
        "`get_rng_state()` gives a uint8 tensor of one dimension on the CPU.",
        reason="Checkpoints store it, and inference broadcasts it between ranks as bytes.",
    ),
)
def state_type(target: Target) -> None:
    state = target.accelerator.get_rng_state()
    expect(isinstance(state, torch.Tensor), f"get_rng_state() is {state!r}", why="expected a tensor")
    seen = (str(state.dtype), state.device.type, state.dim())
    expect_equal(seen, ("torch.uint8", "cpu", 1), "dtype, device and dimensions of get_rng_state()")


@check(
    "runtime.random.seed",
    Clause(
        "R3.2",
        "After `manual_seed(s)` the current device draws the same numbers each time, and others after another seed.",
        reason="Runs are repeated by their seed; activation checkpointing seeds its RNG tracker this way.",
    ),
)
def seed(target: Target) -> None:
    with random_state_kept(target):
        drawn = []
        for value in (11, 11, 12):
            target.accelerator.manual_seed(value)
            drawn.append(_draw(target))
        expect_equal(drawn[1], drawn[0], "numbers drawn after the second manual_seed(11)")
        expect(drawn[2] != drawn[0], "manual_seed(12) gives the numbers of manual_seed(11)")
        expect(_draw(target) != drawn[2], "a second draw gives the numbers of the first")


@check(
    "runtime.random.restore",
    Clause(
        "R3.3",
        "After `set_rng_state(state)` the device draws the numbers that it drew after `get_rng_state()` gave `state`.",
        reason="Activation checkpointing recomputes with the dropout masks of the forward pass; resumed runs continue.",
    ),
    cases=each_current,
)
def restore(target: Target, current: str = "") -> None:
    with random_state_kept(target), made_current(target, current):
        for before in range(3):  # numbers drawn before the state is taken: it counts them
            for _ in range(before):
                torch.randn(3, device=target.device)
            state = target.accelerator.get_rng_state()
            first = _draw_both(target)
            expect(_draw_both(target) != first, "a second draw gives the numbers of the first")
            target.accelerator.set_rng_state(state)
            expect_equal(_draw_both(target), first, "numbers drawn after set_rng_state()")


@check(
    "runtime.random.state_is_a_copy",
    Clause(
        "R3.4",
        "The state that `get_rng_state()` gave does not change when numbers are drawn.",
        reason="It is kept from the forward pass until the recomputation.",
    ),
)
def state_is_a_copy(target: Target) -> None:
    with random_state_kept(target):
        state = target.accelerator.get_rng_state()
        before = state.clone()
        _draw(target)
        expect(torch.equal(state, before), "a state changed when numbers were drawn after it was taken")
        expect(not torch.equal(target.accelerator.get_rng_state(), before), "drawing does not change get_rng_state()")


@check(
    "runtime.random.restore_index",
    Clause(
        "R3.5",
        "`get_rng_state(i)` and `set_rng_state(state, i)` are those of device `i`, whichever is current.",
        reason="torch and DeepSpeed save the states of all devices that a block of activations used.",
    ),
    needs=needs_two_devices,
    cases=each_current,
)
def restore_index(target: Target, current: str = "") -> None:
    with random_state_kept(target), made_current(target, current):
        for index in indices(target):
            others = {other: target.accelerator.get_rng_state(other) for other in indices(target) if other != index}
            state = target.accelerator.get_rng_state(index)
            first = _draw(target, index)
            target.accelerator.set_rng_state(state, index)
            expect_equal(
                _draw(target, index), first, f"numbers drawn on device {index} after set_rng_state(_, {index})"
            )
            for other, kept in others.items():
                same = torch.equal(target.accelerator.get_rng_state(other), kept)
                expect(same, f"drawing on device {index} changed the state of device {other}")


@check(
    "runtime.random.state_travels",
    Clause(
        "R3.6",
        "A state that went to the device and back still restores.",
        reason="Inference moves it to the device, broadcasts it there and passes `.cpu()` of it back.",
    ),
)
def state_travels(target: Target) -> None:
    with random_state_kept(target):
        state = target.accelerator.get_rng_state()
        first = _draw(target)
        target.accelerator.set_rng_state(state.to(target.device).clone().cpu())
        expect_equal(_draw(target), first, "numbers drawn after the state came back from the device")


@check(
    "runtime.random.default_generator",
    Clause(
        "R3.7",
        "`default_generator(i)` is the generator that device `i` draws from: its `get_state` and `set_state` are the "
        "device's.",
        reason="Activation checkpointing restores states through it.",
    ),
    cases=each_current,
)
def default_generator(target: Target, current: str = "") -> None:
    with random_state_kept(target), made_current(target, current):
        for index in _usable(target):
            generator = target.accelerator.default_generator(index)
            expect(hasattr(generator, "set_state"), f"default_generator({index}) is {generator!r}: no generator")
            state = generator.get_state()
            first = _draw(target, index)
            generator.set_state(state)
            expect_equal(_draw(target, index), first, f"numbers after default_generator({index}).set_state()")
            generator.set_state(state)
            drawn = _draw(target, index, generator)
            expect_equal(drawn, first, f"numbers drawn from default_generator({index}) itself")


@check(
    "runtime.random.seed_all",
    Clause(
        "R3.8",
        "After `manual_seed_all(s)` every device draws the numbers that it draws after `manual_seed(s)`.",
        reason="Programs seed all devices before a rank knows its own.",
    ),
)
def seed_all(target: Target) -> None:
    with random_state_kept(target), current_device_kept(target):
        target.accelerator.manual_seed_all(21)
        drawn = [_draw(target, index) for index in _usable(target)]
        for index, numbers in zip(_usable(target), drawn, strict=True):
            target.accelerator.set_device(index)
            target.accelerator.manual_seed(21)
            expect_equal(numbers, _draw(target, index), f"numbers of device {index} after manual_seed_all(21)")


@check(
    "runtime.random.seed_one",
    Clause(
        "R3.9",
        "`manual_seed(s)` does not change the other devices' generators.",
        reason="Its name in torch means the current device; a rank's seed is its own.",
    ),
    needs=needs_two_devices,
)
def seed_one(target: Target) -> None:
    with random_state_kept(target), current_device_kept(target):
        target.accelerator.set_device(0)
        kept = target.accelerator.get_rng_state(1)
        target.accelerator.manual_seed(31)
        same = torch.equal(target.accelerator.get_rng_state(1), kept)
        expect(same, "manual_seed() on device 0 changed the state of device 1")


@check(
    "runtime.random.host_untouched",
    Clause(
        "R3.10",
        "Drawing on the device does not change the host's generator.",
        reason="The order of the data, drawn on the host, must not depend on what the model draws.",
    ),
    needs=lambda target: "the device draws from the host's generator" if target.device_type == "cpu" else None,
)
def host_untouched(target: Target) -> None:
    with random_state_kept(target):
        torch.manual_seed(5)
        expected = torch.rand(4).tolist()
        values = torch.ones(64, device=target.device)
        for what, draw in _draws(target, values).items():
            torch.manual_seed(5)
            draw()
            expect_equal(torch.rand(4).tolist(), expected, f"numbers of the host after {what} on the device")


def _draws(target: Target, values: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Ways to draw numbers on the device."""
    device = values.device
    return {
        "rand": lambda: torch.rand(8, device=device),
        "randn": lambda: torch.randn(8, device=device),
        "randint": lambda: torch.randint(0, 100, (8,), device=device),
        "randperm": lambda: torch.randperm(8, device=device),
        "dropout": lambda: torch.nn.functional.dropout(values, 0.5),
        "bernoulli_": lambda: torch.empty_like(values).bernoulli_(0.5),
        "normal_": lambda: torch.empty_like(values).normal_(),
        "uniform_": lambda: torch.empty_like(values).uniform_(),
        "exponential_": lambda: torch.empty_like(values).exponential_(),
        "multinomial": lambda: torch.multinomial(values, 4),
    }


@check(
    "runtime.random.torch_seed",
    Clause(
        "R3.11",
        "`torch.manual_seed(s)` seeds the device as `manual_seed(s)` does.",
        reason="Training scripts seed with torch alone.",
    ),
)
def torch_seed(target: Target) -> None:
    with random_state_kept(target):
        target.accelerator.manual_seed(41)
        expected = _draw(target)
        torch.manual_seed(41)
        expect_equal(_draw(target), expected, "numbers drawn after torch.manual_seed(41)")


@check(
    "runtime.random.initial_seed",
    Clause(
        "R3.12",
        "`initial_seed()` is the seed that the current device was given last.",
        reason="Part of the contract since its beginning, for users: it says how to repeat a run.",
    ),
    cases=each_current,
)
def initial_seed(target: Target, current: str = "") -> None:
    with random_state_kept(target), made_current(target, current):
        for value in (51, 52):
            target.accelerator.manual_seed(value)
            expect_equal(target.accelerator.initial_seed(), value, f"initial_seed() after manual_seed({value})")


@check(
    "runtime.random.fork_rng",
    Clause(
        "R3.13",
        "`random().fork_rng(devices=[device])` is a context after which the device draws as if nothing had been drawn "
        "in it, also after an error; `device` may be an index or what `current_device_name()` gives.",
        reason="DeepCompile profiles a graph this way, without disturbing the run.",
    ),
    cases=each_current,
)
def fork_rng(target: Target, current: str = "") -> None:
    with random_state_kept(target), made_current(target, current):
        devices: list[Any] = [
            target.accelerator.current_device(),
            torch.device(target.accelerator.current_device_name()),
        ]
        for device in devices:
            target.accelerator.manual_seed(61)
            expected = _draw(target)
            target.accelerator.manual_seed(61)
            with target.accelerator.random().fork_rng(devices=[device]):
                _draw(target)
            expect_equal(_draw(target), expected, f"numbers drawn after random().fork_rng(devices=[{device!r}])")
            target.accelerator.manual_seed(61)
            with contextlib.suppress(ArithmeticError), target.accelerator.random().fork_rng(devices=[device]):
                _draw(target)
                raise ArithmeticError
            expect_equal(_draw(target), expected, f"numbers drawn after fork_rng(devices=[{device!r}]) and an error")


@check(
    "runtime.random.own_generator",
    Clause(
        "R3.21",
        "What is drawn by a `torch.Generator(device)` depends on its seed alone, and leaves the device's generator.",
        reason="Samplers and diffusion pipelines hand over one for each request.",
    ),
)
def own_generator(target: Target) -> None:
    with random_state_kept(target):
        generator = torch.Generator(device=target.device)
        drawn = []
        for seed in (71, 71, 72):
            _draw(target)
            state = target.accelerator.get_rng_state()
            generator.manual_seed(seed)
            numbers = torch.randn(8, device=target.device, generator=generator)
            numbers = torch.cat([numbers, torch.empty(8, device=target.device).uniform_(generator=generator)])
            drawn.append(numbers.cpu().tolist())
            same = torch.equal(state, target.accelerator.get_rng_state())
            expect(same, "numbers drawn by a generator of its own changed the state of the device's")
        expect_equal(drawn[1], drawn[0], "numbers drawn by a generator that was given the same seed again")
        expect(drawn[2] != drawn[0], "a generator with another seed gives the same numbers")


@check(
    "runtime.random.lazy_call",
    Clause(
        "R3.14",
        "`lazy_call(callback)` has run the callback, once, by the time the device is used.",
        reason="Activation checkpointing sets the RNG state in such a callback.",
    ),
)
def lazy_call(target: Target) -> None:
    calls: list[int] = []
    target.accelerator.lazy_call(lambda: calls.append(1))
    torch.ones(1, device=target.device)
    expect_equal(len(calls), 1, "how often lazy_call() ran its callback")


@check(
    "runtime.random.recomputation",
    Clause(
        "R3.15",
        "A block with dropout, recomputed by `torch.utils.checkpoint`, drops the same elements: its gradients equal "
        "those without recomputation.",
        reason="Activation checkpointing is how large models fit.",
    ),
)
def recomputation(target: Target) -> None:
    with random_state_kept(target):
        block = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 16))
        block.to(target.device)
        x = torch.randn(8, 16).to(target.device).requires_grad_()
        gradients = []
        calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
            block,
            lambda x: checkpoint(block, x, use_reentrant=False),
        ]
        for call in calls:
            target.accelerator.manual_seed(71)
            (gradient,) = torch.autograd.grad(call(x).square().sum(), x)
            gradients.append(gradient.cpu())
        first, again = gradients
        same = torch.allclose(first, again, rtol=1e-4, atol=1e-5)  # a device need not add up in one order
        expect(same, "gradients of a recomputed block differ", why="it dropped other elements")


@check(
    "runtime.random.dropout",
    Clause(
        "R3.16",
        "Dropout drops about its share, and other elements each time.",
        reason="A mask that is drawn once and used again trains a smaller model.",
    ),
)
def dropout(target: Target) -> None:
    with random_state_kept(target):
        target.accelerator.manual_seed(81)
        masks = [torch.nn.functional.dropout(torch.ones(4096, device=target.device), 0.25).cpu() for _ in range(2)]
        share = float((masks[0] == 0).float().mean())
        # Six standard deviations of a binomial share.
        expect(abs(share - 0.25) < 0.04, f"dropout(p=0.25) dropped {share:.3f} of 4096 elements")
        expect(not torch.equal(*masks), "two calls of dropout dropped the same elements")
        kept = set(masks[0][masks[0] != 0].tolist())
        expect(all(abs(value - 4 / 3) < 1e-6 for value in kept), f"kept elements are {kept}", why="expected 1 / 0.75")


def _usable(target: Target) -> list[int]:
    """Indices whose generators are apart: one where torch has no indices."""
    return list(indices(target)) if indexed(target) else [0]


@check(
    "runtime.random.seed_type",
    Clause(
        "R3.17",
        "`manual_seed` takes any seed that torch takes, up to 64 bits.",
        reason="DeepSpeed adds ranks and offsets to the user's seed.",
    ),
)
def seed_type(target: Target) -> None:
    with random_state_kept(target):
        for value in (0, 2**31, 2**63 - 1, 2**64 - 1):
            target.accelerator.manual_seed(value)
            first = _draw(target)
            target.accelerator.manual_seed(value)
            expect_equal(_draw(target), first, f"numbers drawn after the second manual_seed({value})")
            expect_type(target.accelerator.initial_seed(), int, "initial_seed()")
            expect_equal(target.accelerator.initial_seed(), value, f"initial_seed() after manual_seed({value})")


@check(
    "runtime.random.index_of_current",
    Clause(
        "R3.18",
        "`get_rng_state(i)` and `set_rng_state(state, i)` with the current device's index do what they do without it.",
        reason="DeepSpeed and torch call them both ways.",
    ),
)
def index_of_current(target: Target) -> None:
    with random_state_kept(target):
        index = target.accelerator.current_device()
        state = target.accelerator.get_rng_state(index)
        first = _draw(target)
        target.accelerator.set_rng_state(state, index)
        expect_equal(_draw(target), first, f"numbers drawn after set_rng_state(state, {index!r})")


@check(
    "runtime.random.no_state",
    Clause(
        "R3.20",
        "`set_rng_state` of what is no state, since bytes are missing, raises, and the state stays.",
        reason="Of a checkpoint that another kind of device wrote, the masks would be others without an error.",
    ),
)
def no_state(target: Target) -> None:
    accelerator = target.accelerator
    with random_state_kept(target):
        state = accelerator.get_rng_state()
        kinds = (RuntimeError, ValueError, TypeError)
        expect_raises(lambda: accelerator.set_rng_state(state[: len(state) // 2]), kinds, "set_rng_state() of a half")
        same = torch.equal(accelerator.get_rng_state(), state)
        expect(same, "the state changed when set_rng_state() was given a half of one")


@check(
    "runtime.random.independent",
    Clause(
        "R3.19",
        "The numbers of one draw differ from each other, and from those of the next draw.",
        reason="Weights that repeat from block to block stay alike in training; masks of two layers are drawn apart.",
    ),
    cases=lambda target: [
        *({"by": by} for by in ("rand", "randn")),
        *({"by": by, "of": "millions"} for by in ("rand", "randn")),
    ],
)
def independent(target: Target, by: str, of: str = "") -> None:
    with random_state_kept(target):
        target.accelerator.manual_seed(91)
        if of:
            _expect_pairs_differ(target, by)
            return
        count = 4096
        draws = [set(getattr(torch, by)(count, device=target.device).cpu().tolist()) for _ in range(2)]
        # Of 2**24 numbers, or more, one pair is the same by chance.
        different, common = len(draws[0]), len(draws[0] & draws[1])
        expect(different > count - 100, f"{by}({count}) gave {different} different numbers")
        expect(common < 100, f"{common} of {count} numbers of {by} were those of the call before")


def _expect_pairs_differ(target: Target, by: str) -> None:
    """Of more numbers than a device draws at once: each two that lie together, in this draw and the next."""
    count = 3_000_000
    drawn = [getattr(torch, by)(count, device=target.device).cpu() for _ in range(2)]
    each = [_different_pairs(numbers) for numbers in drawn]
    both = _different_pairs(torch.cat(drawn))
    # Of 2**46 pairs, or more, hardly one comes twice by chance.
    different = f"{by}({count}) gave {min(each)} different pairs"
    expect(min(each) > count // 2 - 100, different, why=f"expected nearly {count // 2}")
    different = f"two calls of {by}({count}) gave {both} different pairs"
    expect(both > count - 100, different, why=f"expected nearly {count}")


def _different_pairs(numbers: torch.Tensor) -> int:
    pairs: torch.Tensor = numbers.view(torch.int64).unique()  # type: ignore[no-untyped-call]  # torch gives it no type
    return pairs.numel()
