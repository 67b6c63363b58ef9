"""R5: memory statistics, all in bytes.

They are compared around one large tensor. Beside it an allocator rounds up and keeps freed blocks, and a device that
counts the host's resident pages sees the rest of the process: hence `_SLACK`, and `empty_cache` before each reading.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch

from ds_plugin_sdk.conformance import programs
from ds_plugin_sdk.conformance.check import (
    Clause,
    ExcusedError,
    NonconformanceError,
    Parameters,
    check,
    expect,
    expect_equal,
)
from ds_plugin_sdk.conformance.runtime.support import (
    MIB,
    current_device_kept,
    each_current,
    expect_raises,
    expect_type,
    indices,
    made_current,
    needs_two_devices,
    simulated,
    slow_work,
)
from ds_plugin_sdk.conformance.target import Target

_SIZE = 96 * MIB
_SLACK = 24 * MIB

_COUNTERS = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "memory_cached",
    "max_memory_cached",
    "total_memory",
    "available_memory",
)


# Those that rise by a tensor's bytes.
_BY_DEVICE = tuple(counter for counter in _COUNTERS if counter not in ("total_memory", "available_memory"))


def _allocate(target: Target, index: int | None = None) -> torch.Tensor:
    """A tensor of `_SIZE` bytes, each of them written."""
    device = target.device if index is None else target.accelerator.device_name(index)
    tensor = torch.full((_SIZE,), 1, dtype=torch.uint8, device=device)
    target.accelerator.synchronize(index)
    return tensor


def _settle(target: Target) -> None:
    gc.collect()
    target.accelerator.synchronize()
    target.accelerator.empty_cache()


def _steady(target: Target) -> int:
    """`available_memory()` once what was freed before has arrived where it is counted: a kernel may take seconds."""
    _settle(target)
    before, end = target.accelerator.available_memory(), time.monotonic() + 3
    while time.monotonic() < end:
        time.sleep(0.05)
        now = target.accelerator.available_memory()
        if abs(now - before) < MIB:
            break
        before = now
    return int(before)


def _mib(size: float) -> str:
    return f"{size / MIB:.1f} MiB"


def _expect_change(seen: int, expected: int, what: str) -> None:
    expect(
        abs(seen - expected) <= _SLACK,
        f"{what} changed by {seen} ({_mib(seen)})",
        why=f"expected {_mib(expected)}, give or take {_mib(_SLACK)}: all numbers are bytes",
    )


def _expect_rise(counter: str, seen: int, what: str) -> None:
    """Expect the bytes of a tensor. What is reserved may be more: some allocators take large pieces from the driver."""
    if "reserved" in counter or "cached" in counter:
        expect(seen >= _SIZE - _SLACK, f"{what} rose by {seen} ({_mib(seen)})", why=f"expected {_mib(_SIZE)} or more")
    else:
        _expect_change(seen, _SIZE, what)


@check(
    "runtime.memory.type",
    Clause(
        "R5.1",
        "Each counter of memory is an int of at least 0, without an index and with each.",
        reason="DeepSpeed divides them by 1024**3 for its logs, where None raises.",
    ),
    cases=lambda target: ({"counter": counter} for counter in _COUNTERS),
)
def type_of_counter(target: Target, counter: str) -> None:
    for arguments in ((), (None,), *((index,) for index in indices(target))):
        given = getattr(target.accelerator, counter)(*arguments)
        call = f"{counter}({', '.join(map(str, arguments))})"
        expect_type(given, int, call)
        expect(given >= 0, f"{call} is {given}", why="expected at least 0")


@check(
    "runtime.memory.allocated",
    Clause(
        "R5.2",
        "`memory_allocated()` rises by a tensor's bytes when it is made, and falls by them when it is gone and "
        "`empty_cache()` was called.",
        reason="`see_memory_usage` reports it; DeepCompile plans by it.",
    ),
)
def allocated(target: Target) -> None:
    _settle(target)
    before = target.accelerator.memory_allocated()
    tensor = _allocate(target)
    _expect_change(target.accelerator.memory_allocated() - before, _SIZE, "memory_allocated() at an allocation")
    held = target.accelerator.memory_allocated()
    del tensor
    _settle(target)
    _expect_change(target.accelerator.memory_allocated() - held, -_SIZE, "memory_allocated() when the tensor was gone")


@check(
    "runtime.memory.reserved",
    Clause(
        "R5.3",
        "`memory_reserved()` is at least `memory_allocated()`, rises with an allocation, and `empty_cache()` brings "
        "it down again.",
        reason="What other processes cannot have; `see_memory_usage` reports it.",
    ),
    cases=each_current,
)
def reserved(target: Target, current: str = "") -> None:
    with made_current(target, current):
        _expect_reserved(target)


def _expect_reserved(target: Target) -> None:
    _settle(target)
    before = target.accelerator.memory_reserved()
    tensor = _allocate(target)
    held, used = target.accelerator.memory_reserved(), target.accelerator.memory_allocated()
    _expect_rise("reserved", held - before, "memory_reserved() at an allocation")
    expect(held >= used - _SLACK, f"memory_reserved() is {held}, less than memory_allocated(), {used}")
    del tensor
    _settle(target)
    fallen = held - target.accelerator.memory_reserved()
    expect(
        fallen >= _SIZE - _SLACK,
        f"memory_reserved() fell by {fallen} ({_mib(fallen)}) at empty_cache()",
        why=f"expected {_mib(_SIZE)} or more",
    )


@check(
    "runtime.memory.peak",
    Clause(
        "R5.4",
        "`max_memory_allocated()` and `max_memory_reserved()` are the largest values since the last reset, and stay "
        "when memory is freed.",
        reason="The peak decides whether a model fits; the autotuner and DeepCompile read it.",
    ),
    cases=lambda target: ({"counter": counter} for counter in ("allocated", "reserved")),
)
def peak(target: Target, counter: str) -> None:
    accelerator = target.accelerator
    current, largest = (getattr(accelerator, f"{prefix}memory_{counter}") for prefix in ("", "max_"))
    _settle(target)
    accelerator.reset_peak_memory_stats()
    before, against = current(), f"against memory_{counter}() before,"
    tensor = _allocate(target)
    del tensor
    _settle(target)
    # Asked now for the first time: who looks at what is allocated only when the peak is asked for has missed it.
    _expect_rise(counter, largest() - before, f"max_memory_{counter}(), when a tensor had come and gone, {against}")
    tensor = _allocate(target)
    _expect_rise(counter, largest() - before, f"max_memory_{counter}(), while another was there, {against}")
    del tensor
    _settle(target)
    _expect_rise(counter, largest() - before, f"max_memory_{counter}(), when that was gone too, {against}")
    expect(largest() >= current() - _SLACK, f"max_memory_{counter}() is {largest()}, below the current {current()}")


@check(
    "runtime.memory.reset_peak",
    Clause(
        "R5.5",
        "`reset_peak_memory_stats()`, and its older names for their counters, restart the peak from the current value.",
        reason="DeepSpeed measures the peak of each phase this way.",
    ),
    cases=lambda target: (
        {"member": member, "counter": counter, **each}
        for each in each_current(target)
        for member, counter in (
            ("reset_peak_memory_stats", "max_memory_allocated"),
            ("reset_peak_memory_stats", "max_memory_reserved"),
            ("reset_max_memory_allocated", "max_memory_allocated"),
            ("reset_max_memory_cached", "max_memory_cached"),
        )
    ),
)
def reset_peak(target: Target, member: str, counter: str, current: str = "") -> None:
    with made_current(target, current):
        _expect_peak_reset(target, member, counter)


def _expect_peak_reset(target: Target, member: str, counter: str) -> None:
    tensor = _allocate(target)
    del tensor
    _settle(target)
    before = getattr(target.accelerator, counter)()
    getattr(target.accelerator, member)()
    after = getattr(target.accelerator, counter)()
    current = getattr(target.accelerator, counter.removeprefix("max_"))()
    expect(
        abs(after - current) <= _SLACK,
        f"{counter}() is {after} after {member}() ({before} before)",
        why=f"expected the current value, {current}",
    )


@check(
    "runtime.memory.older_names",
    Clause(
        "R5.6",
        "`memory_cached()` is `memory_reserved()`, and `max_memory_cached()` is `max_memory_reserved()`.",
        reason="DeepSpeed logs both under torch's older names.",
    ),
)
def older_names(target: Target) -> None:
    accelerator = target.accelerator
    tensor = _allocate(target)
    for old, new in (("memory_cached", "memory_reserved"), ("max_memory_cached", "max_memory_reserved")):
        first, second = getattr(accelerator, old)(), getattr(accelerator, new)()
        expect(abs(first - second) <= _SLACK, f"{old}() is {first}", why=f"{new}() is {second}")
    del tensor


@check(
    "runtime.memory.stats",
    Clause(
        "R5.7",
        "`memory_stats()` is a dict from str to int, with `allocated_bytes.all.current` and `.peak` as "
        "`memory_allocated()` and `max_memory_allocated()` have them.",
        reason="Each ZeRO-3 step calls `.get` on it; DeepCompile reads its entries.",
    ),
)
def stats(target: Target) -> None:
    tensor = _allocate(target)
    for arguments in ((), *((index,) for index in indices(target))):
        given = target.accelerator.memory_stats(*arguments)
        call = f"memory_stats({', '.join(map(str, arguments))})"
        expect(isinstance(given, dict), f"{call} is {given!r}", why="expected a dict")
        wrong = {key: value for key, value in given.items() if type(key) is not str or type(value) is not int}
        expect(not wrong, f"{call} holds {wrong}", why="expected ints by str")
        for key, counter in (("current", "memory_allocated"), ("peak", "max_memory_allocated")):
            entry = given.get(f"allocated_bytes.all.{key}")
            expect(entry is not None, f"{call} lacks 'allocated_bytes.all.{key}'", why=f"it has {sorted(given)}")
            expected = getattr(target.accelerator, counter)(*arguments)
            same = abs(int(entry or 0) - expected) <= _SLACK
            expect(same, f"{call}['allocated_bytes.all.{key}'] is {entry}", why=f"{counter}() is {expected}")
    del tensor


@check(
    "runtime.memory.total",
    Clause(
        "R5.8",
        "`total_memory(i)` is the memory of device `i` in bytes: at least what is allocated and what is available.",
        reason="The autotuner and inference size batches and KV caches by it.",
    ),
)
def total(target: Target) -> None:
    accelerator = target.accelerator
    tensor = _allocate(target)
    for arguments in ((), *((index,) for index in indices(target))):
        call = f"total_memory({', '.join(map(str, arguments))})"
        size = accelerator.total_memory(*arguments)
        # No device that trains has less; in KiB even the largest would seem to.
        expect(size >= 256 * MIB, f"{call} is {size}", why="expected bytes")
        for counter in ("memory_allocated", "available_memory"):
            part = getattr(accelerator, counter)(*arguments)
            expect(part <= size, f"{call} is {size}, less than {counter}(), {part}")
    expect_equal(accelerator.total_memory(), accelerator.total_memory(), "total_memory() at a second call")
    del tensor


@check(
    "runtime.memory.available",
    Clause(
        "R5.9",
        "`available_memory()` falls by about a tensor's bytes when it is made.",
        reason="ZeRO flattens parameters on the device only where their bytes are available.",
    ),
)
def available(target: Target) -> None:
    # The host's memory is shared with others, who allocate and free meanwhile, and its kernel does not count freed
    # pages at once as available: there the numbers follow when enough is held, or at another time.
    falls = [fall for _ in range(4) for fall in _falls(target)]
    expect(
        any(0.5 * held <= fall <= 1.5 * held for held, fall in falls),
        f"while tensors of {_SIZE} bytes were made, available_memory() fell by {[fall for _, fall in falls]}",
        why="expected about the sum of their bytes",
    )


def _falls(target: Target) -> list[tuple[int, int]]:
    """Bytes held, and by how much `available_memory()` fell meanwhile, for one tensor, two, and more."""
    before = _steady(target)
    tensors: list[torch.Tensor] = []
    falls: list[tuple[int, int]] = []
    while len(tensors) < 8:
        tensors.append(_allocate(target))
        falls.append((_SIZE * len(tensors), before - target.accelerator.available_memory()))
    return falls


@check(
    "runtime.memory.available_beside_others",
    Clause(
        "R5.18",
        "`available_memory()` falls by about what another process allocates on the device.",
        reason="Ranks, and other users' jobs, share a device or a host; what they hold cannot be had.",
    ),
    needs=lambda target: "a simulated device is of one process" if simulated(target) else None,
    timeout=250.0,
)
def available_beside_others(target: Target) -> None:
    told = programs.run("process", target, "beside_another", timeout=240.0)[0][0]
    # Others may allocate and free meanwhile, hence several times.
    expect(
        any(0.5 * told["size"] <= fall <= 1.5 * told["size"] for fall in told["falls"]),
        f"while another process held {_mib(told['size'])}, available_memory() fell by {told['falls']}",
        why="expected about as many bytes",
    )


@check(
    "runtime.memory.available_index",
    Clause(
        "R5.16",
        "`available_memory(i)` is that of device `i`; without an index it is the current device's.",
        reason="A rank plans by its own device, whichever another library has made current.",
    ),
    needs=needs_two_devices,
)
def available_index(target: Target) -> None:
    accelerator = target.accelerator
    _settle(target)
    with current_device_kept(target):
        accelerator.set_device(0)
        before = [accelerator.available_memory(index) for index in indices(target)]
        tensors = [_allocate(target, 1) for _ in range(4)]
        fell = [then - accelerator.available_memory(index) for index, then in enumerate(before)]
        current = before[0] - accelerator.available_memory()
        accelerator.set_device(1)
        second = before[1] - accelerator.available_memory()
        fell_there = [then - accelerator.available_memory(index) for index, then in enumerate(before)]
    held = _SIZE * len(tensors)
    others = [current, fell[0], *fell[2:], fell_there[0]]
    expect(
        all(0.5 * held <= each <= 1.5 * held for each in (fell[1], second, fell_there[1]))
        and all(abs(each) < 0.25 * held for each in others),
        f"while tensors of {held} bytes were made on device 1, available_memory(i) fell by {fell}, and "
        f"available_memory() by {current} with device 0 current, by {fell_there} and {second} with device 1",
        why="expected about their bytes on device 1, and nothing on the others",
    )


@check(
    "runtime.memory.index",
    Clause(
        "R5.10",
        "The counters of device `i` count the tensors of device `i`; without an index they are the current device's.",
        reason="Each rank logs, and plans by, its own device.",
    ),
    needs=needs_two_devices,
    cases=lambda target: ({"counter": counter} for counter in (*_BY_DEVICE, "stats")),
)
def index(target: Target, counter: str) -> None:
    accelerator = target.accelerator
    read: Any = _current_bytes(accelerator) if counter == "stats" else getattr(accelerator, counter)
    for there, other in ((1, 0), (0, 1)):
        _settle(target)
        for index in indices(target):  # so that peaks begin with what is held
            accelerator.reset_peak_memory_stats(index)
        with current_device_kept(target):
            accelerator.set_device(other)
            before = [read(index) for index in indices(target)]
            tensor = _allocate(target, there)
            made = f"at an allocation on device {there}"
            _expect_rise(counter, read(there) - before[there], f"{counter} of device {there} {made}")
            _expect_change(read(other) - before[other], 0, f"{counter} of device {other} {made}")
            _expect_change(read() - before[other], 0, f"{counter} without an index, on device {other}, {made}")
            accelerator.set_device(there)
            _expect_rise(counter, read() - before[there], f"{counter} without an index, on device {there}, {made}")
            _expect_change(read(other) - before[other], 0, f"{counter} of device {other}, no longer current, {made}")
            del tensor


def _current_bytes(accelerator: Any) -> Any:
    return lambda *arguments: accelerator.memory_stats(*arguments)["allocated_bytes.all.current"]


@check(
    "runtime.memory.reset_index",
    Clause(
        "R5.11",
        "`reset_peak_memory_stats(i)` resets the peak of device `i` alone.",
        reason="A reset of another rank's device would lose its peak.",
    ),
    needs=needs_two_devices,
)
def reset_index(target: Target) -> None:
    accelerator = target.accelerator
    for device in (0, 1):
        tensor = _allocate(target, device)
        del tensor
    _settle(target)
    before = [accelerator.max_memory_allocated(device) for device in (0, 1)]
    accelerator.reset_peak_memory_stats(1)
    kept, reset = (accelerator.max_memory_allocated(device) for device in (0, 1))
    expect_equal(kept, before[0], "max_memory_allocated(0) after reset_peak_memory_stats(1)")
    current = accelerator.memory_allocated(1)
    expect(abs(reset - current) <= _SLACK, f"max_memory_allocated(1) is {reset} after its reset", why=f"now {current}")


@check(
    "runtime.memory.reset_stats",
    Clause(
        "R5.15",
        "After `reset_peak_memory_stats()` every `.all.peak` of `memory_stats()` is its `.all.current`, with an index "
        "and without.",
        reason="DeepSpeed and DeepCompile read the same peaks by both ways.",
    ),
    cases=each_current,
)
def reset_stats(target: Target, current: str = "") -> None:
    with made_current(target, current):
        for arguments in ((), *((index,) for index in indices(target))):
            _expect_peaks_reset(target, *arguments)


def _expect_peaks_reset(target: Target, *arguments: int) -> None:
    tensor = _allocate(target, *arguments)
    target.accelerator.memory_stats(*arguments)  # read meanwhile, as logs do
    del tensor
    _settle(target)
    target.accelerator.reset_peak_memory_stats(*arguments)
    stats = target.accelerator.memory_stats(*arguments)
    for key, peak in stats.items():
        current = stats.get(f"{key.removesuffix('.peak')}.current")
        if key.endswith("_bytes.all.peak") and current is not None:
            what = f"memory_stats({', '.join(map(str, arguments))})['{key}'] after reset_peak_memory_stats()"
            expect(abs(peak - current) <= _SLACK, f"{what} is {peak}", why=f"the current value is {current}")


@check(
    "runtime.memory.exhausted",
    Clause(
        "R5.12",
        "An allocation that cannot be met raises RuntimeError (`torch.OutOfMemoryError` is one), is not counted, and "
        "the device can be used afterwards.",
        reason="The autotuner tries batch sizes until one does not fit.",
    ),
)
def exhausted(target: Target) -> None:
    petabyte = 1 << 50
    _settle(target)
    counters = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    before = {counter: getattr(target.accelerator, counter)() for counter in counters}
    expect_raises(
        lambda: torch.empty(petabyte, dtype=torch.uint8, device=target.device),
        RuntimeError,
        f"an allocation of 1 PiB on {target.device}",
    )
    for counter, counted in before.items():
        rise = getattr(target.accelerator, counter)() - counted
        expect(rise <= _SLACK, f"{counter}() rose by {_mib(rise)} at an allocation that failed")
    values = torch.full((4,), 3.0, device=target.device)
    expect_equal(values.cpu().tolist(), [3.0] * 4, "values computed after an allocation that failed")


@check(
    "runtime.memory.kept_gives_way",
    Clause(
        "R5.17",
        "Memory that is kept for reuse is given back where an allocation would fail otherwise.",
        reason="Batches of another length ask for other sizes, when a device is full of those of the former.",
    ),
    needs=lambda target: "the host's memory is shared with others" if target.device_type == "cpu" else None,
)
def kept_gives_way(target: Target) -> None:
    _settle(target)
    room = target.accelerator.available_memory()

    def take(share: float) -> None:
        torch.empty(int(share * room), dtype=torch.uint8, device=target.device)

    take(0.55)
    try:
        take(0.75)
    except RuntimeError as error:
        _settle(target)
        try:
            take(0.75)
        except RuntimeError:
            raise ExcusedError("skipped", "three quarters of available_memory() cannot be had at once") from error
        what = "an allocation failed that can be met once empty_cache() was called"
        raise NonconformanceError(what, why=str(error)) from error


def _emptied_behind(target: Target) -> Iterator[Parameters]:
    yield {}
    yield {"behind": "pending work"}
    if target.accelerator.Stream is not None:
        yield {"behind": "work of a recorded stream"}


@check(
    "runtime.memory.empty_cache",
    Clause(
        "R5.13",
        "`empty_cache()` leaves living tensors as they are, and gives back no memory that work before it still reads.",
        reason="DeepSpeed calls it between phases, with the model on the device.",
    ),
    cases=_emptied_behind,
)
def empty_cache(target: Target, behind: str = "") -> None:
    if behind:
        _expect_read_to_the_end(target, recorded=behind == "work of a recorded stream")
        return
    tensors = [torch.full((1 << 10,), float(number), device=target.device) for number in range(32)]
    kept = tensors[1::2]
    del tensors
    target.accelerator.empty_cache()
    fresh = [torch.full((1 << 10,), -1.0, device=target.device) for _ in range(32)]
    seen = [set(tensor.cpu().tolist()) for tensor in kept]
    del fresh
    expect_equal(seen, [{2.0 * i + 1} for i in range(16)], "values of living tensors after empty_cache()")


def _expect_read_to_the_end(target: Target, *, recorded: bool) -> None:
    """What is dropped, and freed by `empty_cache`, is still there for who reads it; another stream gets its memory."""
    accelerator, elements = target.accelerator, 4 * MIB
    streams: list[Any] = [accelerator.Stream() for _ in range(2)] if accelerator.Stream is not None else [None, None]
    reads: Any = streams[0] if recorded else None
    source = torch.full((elements,), 1.0, device=target.device)
    accelerator.synchronize()
    with slow_work(target) as keep_busy:
        with accelerator.stream(reads):
            for _ in range(4):
                keep_busy()
            copied = source.clone()
        if recorded:
            source.record_stream(reads)
        del source
        accelerator.empty_cache()
        with accelerator.stream(streams[1]):
            others = [torch.full((elements,), 9.0, device=target.device) for _ in range(3)]
        accelerator.synchronize()
        seen = {float(each) for each in copied.cpu().aminmax()}
    del others
    expect_equal(seen, {1.0}, "values that pending work read of a tensor that was dropped before empty_cache()")


@check(
    "runtime.memory.own",
    Clause(
        "R5.14",
        "Devices have memory of their own: a tensor on one is not changed by work on another.",
        reason="Each rank's device holds its own shard.",
    ),
    needs=needs_two_devices,
)
def own(target: Target) -> None:
    tensors = [torch.full((MIB,), float(i), device=target.accelerator.device_name(i)) for i in indices(target)]
    for tensor in tensors:
        tensor.add_(10)
    seen = [set(tensor.cpu().tolist()) for tensor in tensors]
    expect_equal(seen, [{10.0 + i} for i in indices(target)], "values on each device after each got 10 added")
