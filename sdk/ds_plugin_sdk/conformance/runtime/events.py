"""R4: events, as they are asked and timed; `streams` has those that order streams."""

from __future__ import annotations

import time

import torch

from ds_plugin_sdk.conformance.check import Clause, check, expect, expect_equal
from ds_plugin_sdk.conformance.runtime.support import expect_raises, needs_events, slow_work
from ds_plugin_sdk.conformance.target import Target


@check(
    "runtime.streams.event_done",
    Clause(
        "R4.11",
        "`event.query()` is False until the work before the record is done; `event.synchronize()` returns then.",
        reason="ZeRO-3 asks how many fetches are still under way, and waits for the oldest.",
    ),
    needs=needs_events,
)
def event_done(target: Target) -> None:
    accelerator = target.accelerator
    event, values = accelerator.Event(), torch.zeros(1 << 10, device=target.device)
    host = accelerator.pin_memory(torch.zeros(1 << 10))
    with slow_work(target) as keep_busy:
        for _ in range(4):
            keep_busy()
        values.fill_(7.0)
        host.copy_(values, non_blocking=True)
        event.record()
        expect_equal(bool(event.query()), False, "query() of an event behind work to do")
        event.synchronize()
        expect_equal(set(host.tolist()), {7.0}, "values copied to the host when Event.synchronize() returned")
        expect_equal(bool(event.query()), True, "query() of an event that was waited for")


@check(
    "runtime.streams.elapsed_time",
    Clause(
        "R4.12",
        "`start.elapsed_time(end)` is the time between two events of `enable_timing=True` in milliseconds.",
        reason="DeepSpeed's timers and throughput are computed from it.",
    ),
    needs=needs_events,
)
def elapsed_time(target: Target) -> None:
    accelerator = target.accelerator
    start, end = (accelerator.Event(enable_timing=True) for _ in range(2))
    accelerator.synchronize()
    with slow_work(target) as keep_busy:
        begin = time.perf_counter()
        start.record()
        keep_busy()
        end.record()
        end.synchronize()
        host = (time.perf_counter() - begin) * 1000
    measured = start.elapsed_time(end)
    expect(
        0.3 * host <= measured <= 1.05 * host + 1,
        f"elapsed_time() is {measured:.6g} for work that took {host:.6g} ms by the host's clock",
        why="expected milliseconds",
    )


@check(
    "runtime.streams.event_reuse",
    Clause(
        "R4.13",
        "An event can be recorded again; it then stands for the later point.",
        reason="DeepSpeed's timers record the same pair of events each step.",
    ),
    needs=needs_events,
)
def event_reuse(target: Target) -> None:
    event = target.accelerator.Event()
    event.record()
    event.synchronize()
    with slow_work(target) as keep_busy:
        for _ in range(4):
            keep_busy()
        event.record()
        expect_equal(bool(event.query()), False, "query() of an event that was recorded again behind work to do")
        event.synchronize()
        expect_equal(bool(event.query()), True, "query() after it was waited for")


@check(
    "runtime.streams.timing_needs_both",
    Clause(
        "R4.17",
        "`elapsed_time` of an event that was not recorded raises.",
        reason="A timer that was never started must not report a time.",
    ),
    needs=needs_events,
)
def timing_needs_both(target: Target) -> None:
    start, end = (target.accelerator.Event(enable_timing=True) for _ in range(2))
    start.record()
    start.synchronize()
    kinds = (RuntimeError, ValueError)
    expect_raises(lambda: start.elapsed_time(end), kinds, "elapsed_time() of an event that was not recorded")


@check(
    "runtime.streams.unrecorded",
    Clause(
        "R4.25",
        "An event that was not recorded is done: `query()` is True, and whoever waits for it goes on.",
        reason="The first step waits for what no step before it has recorded.",
    ),
    needs=needs_events,
    isolated=True,
)
def unrecorded(target: Target) -> None:
    accelerator, values = target.accelerator, torch.zeros(4, device=target.device)
    event = accelerator.Event()
    expect_equal(bool(event.query()), True, "query() of an event that was not recorded")
    event.synchronize()
    event.wait()
    accelerator.current_stream().wait_event(event)
    values.add_(1)
    accelerator.synchronize()
    expect_equal(values.cpu().tolist(), [1.0] * 4, "values computed after a wait for an event that was not recorded")


@check(
    "runtime.streams.many_events",
    Clause(
        "R4.23",
        "Events, and streams, that are dropped can be made again without end.",
        reason="ZeRO-3 makes an event for each parameter that it fetches, in each step; layers of long sequences make "
        "two streams in each pass.",
    ),
    needs=needs_events,
    cases=lambda target: [{}, {"of": "streams"}],
)
def many_events(target: Target, of: str = "") -> None:
    if of:
        _expect_many_streams(target)
        return
    count = 20_000
    for number in range(count):
        event = target.accelerator.Event()
        event.record()
        if number % 1000 == 0:
            event.synchronize()
    event.synchronize()
    expect(bool(event.query()), f"the last of {count} events is not done after it was waited for")


def _expect_many_streams(target: Target) -> None:
    accelerator, count = target.accelerator, 3000
    values = torch.zeros(1, device=target.device)
    accelerator.synchronize()
    for _ in range(count):
        with accelerator.stream(accelerator.Stream()):
            values.fill_(7.0)
    accelerator.synchronize()
    expect_equal(values.item(), 7.0, f"a value written on each of {count} streams")
