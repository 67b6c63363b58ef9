"""What the checks of the runtime share: device indices, work that takes a while, and things put back as they were."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ds_plugin_sdk import privateuse1, simulator
from ds_plugin_sdk.conformance.check import Parameters, expect
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.errors import InvalidAcceleratorError

# How long slow work lasts: long against what a busy machine keeps a thread waiting, short for who waits for it.
SLOW_SECONDS = 0.06
_PIECES = 3

MIB = 1 << 20

Found = TypeVar("Found")


def indexed(target: Target) -> bool:
    """Whether torch numbers devices of this type. It does not number the CPU."""
    return torch.empty(0, device=target.device_type).device.index is not None


def indices(target: Target) -> range:
    """Indices of the target's devices."""
    return range(int(target.accelerator.device_count()))


def place(target: Target, index: int) -> torch.device:
    """Where torch says that a tensor of a device lies."""
    return torch.device(target.device_type, index) if indexed(target) else torch.device(target.device_type)


def needs_streams(target: Target) -> str | None:
    return None if target.accelerator.Stream is not None else "the accelerator declares no streams (Stream is None)"


def needs_events(target: Target) -> str | None:
    return None if target.accelerator.Event is not None else "the accelerator declares no events (Event is None)"


def needs_indices(target: Target) -> str | None:
    return None if indexed(target) else f"torch does not number devices of type '{target.device_type}'"


def needs_two_devices(target: Target) -> str | None:
    count = len(indices(target))
    return needs_indices(target) or (None if count > 1 else f"the accelerator declares {count} device")


def has_two_devices(target: Target) -> bool:
    """Whether there are devices beside the first, which torch numbers."""
    return int(target.accelerator.device_count()) > 1 and indexed(target)


def each_current(target: Target) -> Iterator[Parameters]:
    """The cases of what is called without an index: as the process is, and with device 1 current."""
    yield {}
    if has_two_devices(target):
        yield {"current": "1"}


@contextlib.contextmanager
def made_current(target: Target, index: str) -> Iterator[None]:
    """Within it a device is current, if one is named; afterwards the same as before."""
    if not index:
        yield
        return
    with current_device_kept(target):
        target.accelerator.set_device(int(index))
        yield


@contextlib.contextmanager
def current_device_kept(target: Target) -> Iterator[None]:
    """Afterwards the same device is current as before."""
    before = target.accelerator.current_device()
    try:
        yield
    finally:
        target.accelerator.set_device(before)


def in_threads(*functions: Callable[[], Found]) -> list[Found]:
    """What functions give that run at the same time, each in a thread of its own; raises what one of them raises."""
    found: dict[int, Found] = {}
    errors: list[BaseException] = []
    together = threading.Barrier(len(functions))

    def run(index: int) -> None:
        try:
            together.wait()
            found[index] = functions[index]()
        except BaseException as error:  # of a thread it would be printed, and be lost
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[index] for index in range(len(functions))]


@contextlib.contextmanager
def random_state_kept(target: Target) -> Iterator[None]:
    """Afterwards the host's and all devices' generators are as before."""
    host, accelerator = torch.get_rng_state(), target.accelerator
    # Without an index where there is one device, so that a member that cannot take one fails its own check alone.
    each = [(index,) for index in indices(target)] if needs_two_devices(target) is None else [()]
    states = [accelerator.get_rng_state(*arguments) for arguments in each]
    try:
        yield
    finally:
        for arguments, state in zip(each, states, strict=True):
            accelerator.set_rng_state(state, *arguments)
        torch.set_rng_state(host)


@contextlib.contextmanager
def slow_work(target: Target) -> Iterator[Callable[[], None]]:
    """Gives a function that keeps the current stream of the device busy for about `SLOW_SECONDS`.

    A simulated device is told to be slow. On any other the work is a chain of matrix products, as long as it takes.
    """
    with contextlib.ExitStack() as stack:
        yield _delayed(target, stack) or _products(target)
        target.accelerator.synchronize()


def host_waits(target: Target, call: Callable[[], object]) -> bool:
    """Whether a call returns only when the work before it on the current stream is done.

    It is made once before: what a first call does once is no part of this.
    """
    call()
    target.accelerator.synchronize()
    with slow_work(target) as keep_busy:
        for _ in range(4):
            keep_busy()
        before = target.accelerator.current_stream().record_event()
        call()
        return bool(before.query())


def simulated(target: Target) -> bool:
    """Whether the device is the SDK's simulated one."""
    if privateuse1.installed_name() != target.device_type:
        return False
    try:
        with simulator.delay(0):
            return True
    except InvalidAcceleratorError:  # the vendor's own runtime, which cannot be told
        return False


def _delayed(target: Target, stack: contextlib.ExitStack) -> Callable[[], None] | None:
    if privateuse1.installed_name() != target.device_type:
        return None
    target.accelerator.synchronize()
    try:
        stack.enter_context(simulator.delay(int(SLOW_SECONDS / _PIECES * 1e6)))
    except InvalidAcceleratorError:  # the vendor's own runtime, which cannot be told
        return None

    def keep_busy() -> None:
        piece = torch.empty(1, device=target.accelerator.current_device_name())
        for _ in range(_PIECES):
            piece.fill_(0)

    return keep_busy


def _products(target: Target) -> Callable[[], None]:
    device = target.accelerator.current_device_name()
    side, count, seconds = 1024, 1, 0.0
    matrix = torch.full((side, side), 1e-3, device=device)

    def submit(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    submit(1)
    while seconds < SLOW_SECONDS / 4:
        if count < 32 or side == 8192:
            count *= 2
        else:  # a fast device: larger products, since the host waits where a thousand or so are pending
            side, count = 2 * side, count // 4
            matrix = torch.full((side, side), 1e-3, device=device)
            submit(1)
        target.accelerator.synchronize()
        begin = time.perf_counter()
        submit(count)
        target.accelerator.synchronize()
        seconds = time.perf_counter() - begin
    count = max(1, int(count * SLOW_SECONDS / seconds))
    return lambda: submit(count)


def expect_raises(
    call: Callable[[], Any], kinds: type[Exception] | tuple[type[Exception], ...], what: str, *, why: str = ""
) -> None:
    """Fail unless `call` raises one of `kinds`; `what` names the call."""
    names = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
    try:
        given = call()
    except kinds:
        return
    except Exception as error:
        expect(False, f"{what} raised {type(error).__name__}: {error}", why=f"expected {names}")
        return
    expect(False, f"{what} was accepted and gave {given!r}", why=why or f"expected {names}")


def expect_type(value: Any, kind: type, what: str) -> None:
    """Fail unless a value is exactly of a type, so that True is no int."""
    expect(type(value) is kind, f"{what} is {value!r} of type {type(value).__name__}", why=f"expected {kind.__name__}")
