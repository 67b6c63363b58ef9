"""R2: the four behaviour flags, which decide where DeepSpeed uses streams and events, against what the device does."""

from __future__ import annotations

import time
from typing import Any

import torch

from ds_plugin_sdk.conformance.check import Clause, check, expect, expect_equal
from ds_plugin_sdk.conformance.runtime.support import expect_type, needs_streams, slow_work
from ds_plugin_sdk.conformance.target import Target

_FLAGS = ("is_synchronized_device", "resolves_data_dependency", "handles_memory_backpressure", "use_host_timers")


def _needs(flag: str, value: bool, target: Target) -> str | None:
    given = bool(getattr(target.accelerator, flag)())
    return None if given is value else f"the accelerator declares {flag}() {given}"


@check(
    "runtime.flags.type",
    Clause(
        "R2.1",
        "Each behaviour flag is a method without arguments that gives a bool, the same at each call.",
        reason="DeepSpeed asks again and again; one that changes leaves work half ordered.",
    ),
    cases=lambda target: ({"flag": flag} for flag in _FLAGS),
)
def type_of_flag(target: Target, flag: str) -> None:
    given = getattr(target.accelerator, flag)()
    expect_type(given, bool, f"{flag}()")
    expect_equal(getattr(target.accelerator, flag)(), given, f"{flag}() at a second call")


@check(
    "runtime.flags.asynchronous_has_streams",
    Clause(
        "R2.2",
        "Where `is_synchronized_device()` is False, `Stream()` gives a stream, and tensors of the device take "
        "`record_stream(stream)`.",
        reason="ZeRO then makes side streams and records on them every tensor that they use.",
    ),
    needs=lambda target: _needs("is_synchronized_device", False, target),
)
def asynchronous_has_streams(target: Target) -> None:
    expect(target.accelerator.Stream is not None, "Stream is None", why="is_synchronized_device() is False")
    stream = target.accelerator.Stream()
    tensor = torch.ones(4, device=target.device)
    tensor.record_stream(stream)
    tensor.record_stream(target.accelerator.current_stream())


@check(
    "runtime.flags.unordered_has_waits",
    Clause(
        "R2.3",
        "Where `resolves_data_dependency()` is False, `current_stream()` and every `Stream()` has `wait_stream`, "
        "`wait_event` and `synchronize`.",
        reason="ZeRO orders its side streams by them, without asking whether a stream is None.",
    ),
    needs=lambda target: _needs("resolves_data_dependency", False, target),
)
def unordered_has_waits(target: Target) -> None:
    expect(target.accelerator.Stream is not None, "Stream is None", why="resolves_data_dependency() is False")
    for what, stream in (("Stream()", target.accelerator.Stream()), ("current_stream()", _current_stream(target))):
        for method in ("wait_stream", "wait_event", "synchronize"):
            expect(callable(getattr(stream, method, None)), f"{what} is {stream!r}, which has no {method}()")


@check(
    "runtime.flags.backpressure_has_events",
    Clause(
        "R2.4",
        "Where `handles_memory_backpressure()` is False, `Event()` gives an event with `record`, `query` and "
        "`synchronize`.",
        reason="ZeRO-3 records one for each fetched parameter and waits for the oldest before it fetches more.",
    ),
    needs=lambda target: _needs("handles_memory_backpressure", False, target),
)
def backpressure_has_events(target: Target) -> None:
    expect(target.accelerator.Event is not None, "Event is None", why="handles_memory_backpressure() is False")
    event = target.accelerator.Event()
    event.record()
    event.synchronize()
    expect_equal(bool(event.query()), True, "query() of an event that was recorded and waited for")


@check(
    "runtime.flags.device_timers_have_events",
    Clause(
        "R2.5",
        "Where `use_host_timers()` is False, `Event(enable_timing=True)` gives an event with `elapsed_time`, and "
        "`current_stream().wait_event(event)` works.",
        reason="With wall_clock_breakdown DeepSpeed times every phase of a step by such events.",
    ),
    needs=lambda target: _needs("use_host_timers", False, target),
)
def device_timers_have_events(target: Target) -> None:
    expect(target.accelerator.Event is not None, "Event is None", why="use_host_timers() is False")
    begin, end = (target.accelerator.Event(enable_timing=True) for _ in range(2))
    for event in (begin, end):
        event.record()
        _current_stream(target).wait_event(event)
    end.synchronize()
    expect(begin.elapsed_time(end) >= 0, f"elapsed_time is {begin.elapsed_time(end)}", why="expected milliseconds")


@check(
    "runtime.flags.synchronized",
    Clause(
        "R2.6",
        "Where `is_synchronized_device()` is True, a call returns after its work is done: a non-blocking copy to the "
        "host has arrived.",
        reason="DeepSpeed then uses no side streams and reads such copies without waiting.",
    ),
    needs=lambda target: _needs("is_synchronized_device", True, target),
)
def synchronized(target: Target) -> None:
    host = target.accelerator.pin_memory(torch.zeros(1 << 10))
    with slow_work(target) as keep_busy:
        values = torch.zeros(1 << 10, device=target.device)
        keep_busy()
        values.fill_(7.0)
        host.copy_(values, non_blocking=True)
        seen = set(host.tolist())
    expect_equal(
        seen,
        {7.0},
        "values on the host right after a non-blocking copy",
        hint="let is_synchronized_device() give False: DeepSpeed then waits where it must",
    )


@check(
    "runtime.flags.resolves_data_dependency",
    Clause(
        "R2.7",
        "Where `resolves_data_dependency()` is True, work on one stream sees what was submitted before it on another, "
        "without any wait.",
        reason="DeepSpeed then never calls `wait_stream`, `wait_event` or `Stream.synchronize`.",
    ),
    needs=lambda target: _needs("resolves_data_dependency", True, target) or needs_streams(target),
)
def resolves_data_dependency(target: Target) -> None:
    accelerator = target.accelerator
    values, side = torch.zeros(1 << 10, device=target.device), accelerator.Stream()
    accelerator.synchronize()
    with slow_work(target) as keep_busy:
        with accelerator.stream(side):
            keep_busy()
            values.fill_(7.0)
        seen = set(values.cpu().tolist())
    expect_equal(
        seen,
        {7.0},
        "values read on the current stream that a side stream was writing",
        hint="let resolves_data_dependency() give False: DeepSpeed then waits between streams",
    )


@check(
    "runtime.flags.asynchronous",
    Clause(
        "R2.8",
        "Where `is_synchronized_device()` is False, the host continues while the device works.",
        reason="Overlapping communication and offload with computation is the purpose of the side streams.",
    ),
    needs=lambda target: _needs("is_synchronized_device", False, target),
)
def asynchronous(target: Target) -> None:
    with slow_work(target) as keep_busy:
        target.accelerator.synchronize()
        begin = time.perf_counter()
        for _ in range(4):  # much work: a busy machine may keep the host waiting, too
            keep_busy()
        submitted = time.perf_counter() - begin
        target.accelerator.synchronize()
        done = time.perf_counter() - begin
    expect(
        submitted < 0.7 * done,
        f"submitting work took {submitted * 1000:.0f} ms of the {done * 1000:.0f} ms until it was done",
        why="the host had to wait for the device",
    )


def _current_stream(target: Target) -> Any:
    stream = target.accelerator.current_stream()
    expect(stream is not None, "current_stream() is None", why="a behaviour flag says that work is asynchronous")
    return stream
