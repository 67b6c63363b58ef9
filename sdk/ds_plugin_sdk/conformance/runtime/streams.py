"""R4: streams, and events that order them. Each is tried on slow work: a wait that is missing shows in the values."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ds_plugin_sdk.conformance.check import Clause, check, expect, expect_equal
from ds_plugin_sdk.conformance.runtime.support import (
    MIB,
    SLOW_SECONDS,
    current_device_kept,
    has_two_devices,
    in_threads,
    indices,
    made_current,
    needs_events,
    needs_streams,
    needs_two_devices,
    slow_work,
)
from ds_plugin_sdk.conformance.target import Target


def _needs_both(target: Target) -> str | None:
    return needs_streams(target) or needs_events(target)


def _values(target: Target) -> torch.Tensor:
    """Zeros that are there already."""
    values = torch.zeros(1 << 10, device=target.device)
    target.accelerator.synchronize()
    return values


def _seen(values: torch.Tensor) -> set[float]:
    return set(values.cpu().tolist())


@check(
    "runtime.streams.property",
    Clause(
        "R4.1",
        "`Stream` and `Event` are properties that give a class (or a function that makes one), or None; reading them "
        "never raises and gives the same each time.",
        reason="DeepSpeed evaluates them in annotations while it is imported.",
    ),
    cases=lambda target: ({"member": member} for member in ("Stream", "Event")),
)
def stream_property(target: Target, member: str) -> None:
    first, again = (getattr(target.accelerator, member) for _ in range(2))
    expect(first is None or callable(first), f"{member} is {first!r}", why="expected a class or None")
    expect((first is None) == (again is None), f"{member} is {first!r}, and {again!r} when read again")


@check(
    "runtime.streams.none",
    Clause(
        "R4.2",
        "`stream(None)` is a context that changes nothing; `current_stream()` and `default_stream()`, with an index or "
        "without, and `current_stream()` with a tensor's device give a stream, or None where there are no streams.",
        reason="ZeRO enters the context of its side stream, which is None on a synchronous device; quantized "
        "parameters pass a tensor's device.",
    ),
)
def stream_none(target: Target) -> None:
    accelerator = target.accelerator
    before = accelerator.current_stream()
    with accelerator.stream(None):
        expect_equal(accelerator.current_stream(), before, "current_stream() inside stream(None)")
        made = torch.ones(2, device=target.device)
    expect_equal(_seen(made), {1.0}, "values computed inside stream(None)")
    numbers: list[tuple[Any, ...]] = [(), (None,), *((index,) for index in indices(target))]
    for member, calls in (("current_stream", [*numbers, (made.device,)]), ("default_stream", numbers)):
        for arguments in calls:
            given = getattr(accelerator, member)(*arguments)
            what = f"{member}({', '.join(map(str, arguments))}) is {given!r}"
            expect((given is None) == (accelerator.Stream is None), what, why=f"Stream is {accelerator.Stream!r}")


@check(
    "runtime.streams.surface",
    Clause(
        "R4.3",
        "`Stream()` and `Stream(device=i)` make streams, each another, with `wait_stream`, `wait_event`, "
        "`synchronize`, `query` and `record_event`.",
        reason="What ZeRO, offloaded activations and expert parallelism call on them.",
    ),
    needs=needs_streams,
)
def surface(target: Target) -> None:
    accelerator = target.accelerator
    made = [accelerator.Stream(), *(accelerator.Stream(device=index) for index in indices(target))]
    for stream in made:
        for method in ("wait_stream", "wait_event", "synchronize", "query", "record_event"):
            expect(callable(getattr(stream, method, None)), f"{stream!r} has no {method}()")
    expect(made[0] != accelerator.Stream(), "two calls of Stream() gave one stream")
    expect(made[0] != accelerator.default_stream(), "Stream() gave the default stream")


@check(
    "runtime.streams.device_of_stream",
    Clause(
        "R4.4",
        "`Stream(device=i)`, `current_stream(i)` and `default_stream(i)` are streams of device `i`; without an index "
        "they are of the current device.",
        reason="Work recorded on another device's stream is ordered with nothing.",
    ),
    needs=lambda target: needs_streams(target) or needs_two_devices(target),
)
def device_of_stream(target: Target) -> None:
    accelerator = target.accelerator
    with current_device_kept(target):
        for current in indices(target):
            accelerator.set_device(current)
            for member in ("Stream", "current_stream", "default_stream"):
                function = getattr(accelerator, member)
                for index in indices(target):
                    stream = function(device=index) if member == "Stream" else function(index)
                    what = f"index of the device of {member}({index}) with device {current} current"
                    expect_equal(torch.device(stream.device).index, index, what)
                what = f"index of the device of {member}() with device {current} current"
                expect_equal(torch.device(function().device).index, current, what)


@check(
    "runtime.streams.default",
    Clause(
        "R4.5",
        "Outside any context the default stream is current, on every device.",
        reason="ZeRO lets its side streams wait for `default_stream()` where gradients were computed on it.",
    ),
    needs=needs_streams,
)
def default(target: Target) -> None:
    accelerator = target.accelerator
    for arguments in ((), *((index,) for index in indices(target))):
        expect_equal(
            accelerator.current_stream(*arguments),
            accelerator.default_stream(*arguments),
            f"current_stream({', '.join(map(str, arguments))}) outside any context",
        )


@check(
    "runtime.streams.context",
    Clause(
        "R4.6",
        "Inside `stream(s)`, `s` is current; afterwards, also after an exception, the one before. Contexts nest.",
        reason="ZeRO puts reductions and copies on its side streams by it.",
    ),
    needs=needs_streams,
)
def context(target: Target) -> None:
    accelerator = target.accelerator
    before, outer, inner = accelerator.current_stream(), accelerator.Stream(), accelerator.Stream()
    with accelerator.stream(outer):
        expect_equal(accelerator.current_stream(), outer, "current_stream() inside stream(s)")
        with accelerator.stream(inner):
            expect_equal(accelerator.current_stream(), inner, "current_stream() inside a nested stream(s)")
        expect_equal(accelerator.current_stream(), outer, "current_stream() after a nested stream(s)")
    expect_equal(accelerator.current_stream(), before, "current_stream() after stream(s)")
    try:
        with accelerator.stream(outer):
            raise KeyError("a failing step")
    except KeyError:
        expect_equal(accelerator.current_stream(), before, "current_stream() after an exception in stream(s)")


@check(
    "runtime.streams.in_order",
    Clause(
        "R4.7",
        "Work on one stream is done in the order in which it was submitted, copies included.",
        reason="All of DeepSpeed's code on one stream relies on it, without any wait.",
    ),
)
def in_order(target: Target) -> None:
    with slow_work(target) as keep_busy:
        values = torch.zeros(1 << 10, device=target.device)
        keep_busy()
        values.fill_(1.0)
        copied = values.clone()
        values.fill_(2.0)
        expect_equal(_seen(copied), {1.0}, "a copy made after fill_(1) and before fill_(2)")
        expect_equal(_seen(values), {2.0}, "values after fill_(1), a copy and fill_(2)")


@check(
    "runtime.streams.wait_stream",
    Clause(
        "R4.8",
        "After `a.wait_stream(b)`, later work on `a` sees what was submitted to `b` before.",
        reason="The order between ZeRO's reductions, prefetches and the computation.",
    ),
    needs=needs_streams,
)
def wait_stream(target: Target) -> None:
    accelerator = target.accelerator
    side = accelerator.Stream()
    for first, second in ((side, accelerator.current_stream()), (accelerator.current_stream(), side)):
        values = _values(target)
        with slow_work(target) as keep_busy:
            with accelerator.stream(first):
                keep_busy()
                values.fill_(7.0)
            second.wait_stream(first)
            with accelerator.stream(second):
                copied = values.clone()
            second.synchronize()
            seen = _seen(copied)
        expect_equal(seen, {7.0}, f"values read on {second} after wait_stream({first})")


@check(
    "runtime.streams.synchronize",
    Clause(
        "R4.9",
        "`Stream.synchronize()` returns when the stream's work is done, and `query()` then is True.",
        reason="Offload waits this way before the host reads a gradient.",
    ),
    needs=needs_streams,
)
def stream_synchronize(target: Target) -> None:
    accelerator = target.accelerator
    host, side, values = accelerator.pin_memory(torch.zeros(1 << 10)), accelerator.Stream(), _values(target)
    with slow_work(target) as keep_busy:
        with accelerator.stream(side):
            for _ in range(4):
                keep_busy()
            values.fill_(7.0)
            host.copy_(values, non_blocking=True)
        expect_equal(bool(side.query()), False, "query() of a stream with work to do")
        side.synchronize()
        expect_equal(set(host.tolist()), {7.0}, "values copied to the host when Stream.synchronize() returned")
        expect_equal(bool(side.query()), True, "query() of a stream that was waited for")


@check(
    "runtime.streams.wait_event",
    Clause(
        "R4.10",
        "After `event.record(b)` or `b.record_event(event)`, and `a.wait_event(event)` or, with `a` current, "
        "`event.wait()`, later work on `a` sees what was submitted to `b` before the record.",
        reason="Prefetched parameters and offloaded activations are waited for this way.",
    ),
    needs=_needs_both,
    cases=lambda target: ({"by": by} for by in ("stream.wait_event", "event.wait", "event.record(stream)")),
)
def wait_event(target: Target, by: str) -> None:
    accelerator = target.accelerator
    first, second = accelerator.Stream(), accelerator.Stream()
    event, values = accelerator.Event(), _values(target)
    with slow_work(target) as keep_busy:
        with accelerator.stream(first):
            keep_busy()
            values.fill_(7.0)
            if by != "event.record(stream)":
                event.record()
        if by == "event.record(stream)":
            event.record(first)
        with accelerator.stream(second):
            if by == "event.wait":
                event.wait()
            else:
                second.wait_event(event)
            copied = values.clone()
        second.synchronize()
        seen = _seen(copied)
    expect_equal(seen, {7.0}, f"values read by a stream that waited for the event ({by})")


@check(
    "runtime.streams.record_stream",
    Clause(
        "R4.14",
        "Memory of a tensor on which `record_stream(s)` was called is not given out again before the work of `s` at "
        "its death is done; afterwards it is used again, or given back.",
        reason="ZeRO calls it on each buffer that a side stream still reads when the host releases it, in each step.",
    ),
    needs=needs_streams,
    cases=lambda target: [{}, {"then": "used again"}],
)
def record_stream(target: Target, then: str = "") -> None:
    if then:
        _expect_used_again(target)
    else:
        _expect_recorded(target, lambda tensor: tensor)


@check(
    "runtime.streams.record_stream_of_view",
    Clause(
        "R4.20",
        "`record_stream(s)` of a view holds the memory that the view is part of.",
        reason="ZeRO records slices of its buckets, which begin in the middle of an allocation.",
    ),
    needs=needs_streams,
)
def record_stream_of_view(target: Target) -> None:
    _expect_recorded(target, lambda tensor: tensor[tensor.numel() // 2 :])
    _expect_recorded(target, lambda tensor: tensor.view(4, -1).t())


def _expect_recorded(target: Target, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What a stream reads of a tensor, on a part of which it was recorded, outlives the tensor."""
    accelerator = target.accelerator
    elements = MIB // 4
    tensor, side = torch.full((elements,), 1.0, device=target.device), accelerator.Stream()
    accelerator.synchronize()
    with slow_work(target) as keep_busy:
        with accelerator.stream(side):
            keep_busy()
            copied = tensor.clone()
        part(tensor).record_stream(side)
        del tensor
        others = [torch.full((elements,), 9.0, device=target.device) for _ in range(3)]
        side.synchronize()
        seen = _seen(copied)
    del others
    expect_equal(seen, {1.0}, "values that a recorded stream read after its tensor died")


def _expect_used_again(target: Target) -> None:
    """What is recorded and dropped, step by step, does not add up."""
    accelerator, piece, times = target.accelerator, 8 * MIB, 60
    side = accelerator.Stream()

    def step() -> None:
        tensor = torch.ones(piece, dtype=torch.uint8, device=target.device)
        side.wait_stream(accelerator.current_stream())
        with accelerator.stream(side):
            tensor.fill_(2)
        tensor.record_stream(side)
        del tensor
        accelerator.synchronize()

    for _ in range(4):  # a pool may grow first
        step()
    before = accelerator.memory_reserved()
    for _ in range(times):
        step()
    grown = accelerator.memory_reserved() - before
    what = f"after {times} recorded tensors of {piece // MIB} MiB, each dropped, memory_reserved() has risen by {grown}"
    expect(grown < times * piece // 4, what, why="their memory is neither used again nor given back")


_READS = ("item", "tolist", "cpu", "bool")


@check(
    "runtime.streams.host_reads_wait",
    Clause(
        "R4.15",
        "Reading a value on the host (`item`, `tolist`, `cpu`, `bool`) waits for the current stream of the tensor's "
        "device, whichever device is current.",
        reason="Losses, gradient norms and overflow flags are read this way, without any wait.",
    ),
    cases=lambda target: [
        *({"by": by} for by in _READS),
        *({"by": by, "of": "another device"} for by in _READS if has_two_devices(target)),
    ],
)
def host_reads_wait(target: Target, by: str, of: str = "") -> None:
    with made_current(target, "1" if of else ""):
        _expect_read_waits(target, by, elsewhere=bool(of))


def _expect_read_waits(target: Target, by: str, *, elsewhere: bool) -> None:
    """What the current device is about to write is written when it is read, also while device 0 is current."""
    values = torch.zeros(1, device=target.device)
    target.accelerator.synchronize()
    reads: dict[str, Any] = {
        "item": values.item,
        "tolist": lambda: values.tolist()[0],
        "cpu": lambda: float(values.cpu()),
        "bool": lambda: 7.0 * bool(values),
    }
    with slow_work(target) as keep_busy:
        keep_busy()
        values.fill_(7.0)
        if elsewhere:
            target.accelerator.set_device(0)
        seen = reads[by]()
    expect_equal(seen, 7.0, f"a value read by {by} right after it was written")


@check(
    "runtime.streams.between_devices",
    Clause(
        "R4.16",
        "A copy from one device to another is ordered with the work of both devices' current streams.",
        reason="Pipeline stages and offloaded states cross devices without explicit waits.",
    ),
    needs=needs_two_devices,
    cases=lambda target: [{}, *({"way": way, "how": how} for way in _WAYS for how in _CROSSED)],
)
def between_devices(target: Target, way: str = "", how: str = "") -> None:
    if way:
        for busy in _WAYS[way]:
            _expect_crossed(target, *_WAYS[way], how, busy)
        return
    accelerator = target.accelerator
    with current_device_kept(target):
        accelerator.set_device(0)
        values = torch.zeros(1 << 10, device=accelerator.device_name(0))
        for index in indices(target):
            accelerator.synchronize(index)
        with slow_work(target) as keep_busy:
            keep_busy()
            values.fill_(1.0)
            there = values.to(accelerator.device_name(1))
            values.fill_(2.0)
            seen = _seen(there)
    expect_equal(seen, {1.0}, "a copy on device 1 made between fill_(1) and fill_(2) on device 0")


_WAYS: dict[str, tuple[int, int]] = {"0 to 1": (0, 1), "1 to 0": (1, 0)}

# Of a tensor on one device, what is copied into one on another, and of which dtype that is.
_CROSSED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype]] = {
    "as it lies": (lambda tensor: tensor, torch.float32),
    "transposed": (lambda tensor: tensor.t(), torch.float32),
    "converted": (lambda tensor: tensor, torch.int32),
}


def _expect_crossed(target: Target, source: int, to: int, how: str, busy: int) -> None:
    """A copy reads what was written before it and not after, and writes after what was read before it."""
    accelerator, (view, dtype) = target.accelerator, _CROSSED[how]
    host = torch.arange(1024.0).view(32, 32)
    numbers = host.to(accelerator.device_name(source))
    values = torch.zeros_like(numbers)
    there = torch.full((32, 32), -1, dtype=dtype, device=accelerator.device_name(to))
    with current_device_kept(target):
        accelerator.set_device(busy)
        for index in (source, to):
            accelerator.synchronize(index)
        with slow_work(target) as keep_busy:
            keep_busy()
            values.copy_(numbers)
            before = there.clone()
            there.copy_(view(values))
            values.fill_(-2.0)
            for index in (source, to):
                accelerator.synchronize(index)
    what = f"{how} from device {source} to {to}, with {busy} busy,"
    early, late = before.cpu(), there.cpu()
    expect(bool((early == -1).all()), f"before a copy {what} the target was {early[0, :4].tolist()}", why="expected -1")
    expected = view(host).to(dtype)
    begin, wanted = late[0, :4].tolist(), expected[0, :4].tolist()
    expect(torch.equal(late, expected), f"a copy {what} begins {begin}", why=f"expected {wanted}")


@check(
    "runtime.streams.switches_device",
    Clause(
        "R4.18",
        "`stream(s)` with a stream of another device makes that device current, and the former one afterwards; `s` is "
        "that device's current stream, and afterwards the former one.",
        reason="As in torch.cuda; expert parallelism makes `Stream(device=i)` and enters it.",
    ),
    needs=lambda target: needs_streams(target) or needs_two_devices(target),
)
def switches_device(target: Target) -> None:
    accelerator = target.accelerator
    with current_device_kept(target):
        accelerator.set_device(0)
        before, other = [accelerator.current_stream(index) for index in (0, 1)], accelerator.Stream(device=1)
        with accelerator.stream(other):
            expect_equal(accelerator.current_device(), 1, "current_device() inside stream(Stream(device=1))")
            expect_equal(accelerator.current_stream(), other, "current_stream() inside stream(Stream(device=1))")
        expect_equal(accelerator.current_device(), 0, "current_device() after stream(Stream(device=1))")
        after = [accelerator.current_stream(index) for index in (0, 1)]
        expect_equal(after, before, "current_stream(0) and current_stream(1) after stream(Stream(device=1))")


@check(
    "runtime.streams.apart",
    Clause(
        "R4.19",
        "Work on one stream does not wait for work on another that was submitted before it.",
        reason="Otherwise communication never overlaps computation; streams exist for that.",
    ),
    needs=needs_streams,
)
def apart(target: Target) -> None:
    accelerator = target.accelerator
    slow, quick = accelerator.Stream(), accelerator.Stream()
    values = _values(target)  # made before: a driver may wait for all work when it gives memory
    with slow_work(target) as keep_busy:
        with accelerator.stream(slow):
            for _ in range(4):
                keep_busy()
        begin = time.perf_counter()
        with accelerator.stream(quick):
            values.fill_(1.0)
        quick.synchronize()
        seconds = time.perf_counter() - begin
        still_busy = not slow.query()
    expect(
        still_busy and seconds < 3 * SLOW_SECONDS,
        f"a quick piece of work took {seconds * 1000:.0f} ms while another stream was busy for "
        f"{4000 * SLOW_SECONDS:.0f} ms",
        why="streams wait for each other",
    )


def _waiting_calls(target: Target) -> dict[str, Callable[[Any, Any, torch.Tensor], Any]]:
    """What DeepSpeed calls between streams, with a busy stream, an event behind its work, and a tensor."""
    accelerator = target.accelerator

    def enter(busy: Any, event: Any, tensor: torch.Tensor) -> None:
        with accelerator.stream(busy):
            tensor.fill_(1.0)

    return {
        "wait_stream": lambda busy, event, tensor: accelerator.Stream().wait_stream(busy),
        "current_stream().wait_stream": lambda busy, event, tensor: accelerator.current_stream().wait_stream(busy),
        "wait_event": lambda busy, event, tensor: accelerator.Stream().wait_event(event),
        "event.wait": lambda busy, event, tensor: event.wait(),
        "event.record": lambda busy, event, tensor: accelerator.Event().record(busy),
        "event.query": lambda busy, event, tensor: event.query(),
        "query": lambda busy, event, tensor: busy.query(),
        "record_event": lambda busy, event, tensor: busy.record_event(accelerator.Event()),
        "record_stream": lambda busy, event, tensor: tensor.record_stream(busy),
        "stream": enter,
        "range_push": lambda busy, event, tensor: (accelerator.range_push("a range"), accelerator.range_pop()),
        "set_device": lambda busy, event, tensor: accelerator.set_device(accelerator.current_device()),
        "memory_allocated": lambda busy, event, tensor: accelerator.memory_allocated(),
        "memory_stats": lambda busy, event, tensor: accelerator.memory_stats(),
        "is_available": lambda busy, event, tensor: accelerator.is_available(),
        "device_count": lambda busy, event, tensor: accelerator.device_count(),
        "on_accelerator": lambda busy, event, tensor: accelerator.on_accelerator(tensor),
    }


@check(
    "runtime.streams.host_goes_on",
    Clause(
        "R4.21",
        "The host waits for a stream in no other call than `synchronize`: not when streams wait for each other, not "
        "when events are recorded or asked, not when a tensor is recorded or a stream is entered, and not when the "
        "accelerator is asked for its devices and counters, or told a range.",
        reason="The host prepares the next layers meanwhile; an order between streams that stops it serializes all.",
    ),
    needs=_needs_both,
    cases=lambda target: ({"call": call} for call in _waiting_calls(target)),
)
def host_goes_on(target: Target, call: str) -> None:
    accelerator = target.accelerator
    busy, event = accelerator.Stream(), accelerator.Event()
    tensor = torch.zeros(1 << 10, device=target.device)
    accelerator.synchronize()
    with slow_work(target) as keep_busy:
        with accelerator.stream(busy):
            for _ in range(4):
                keep_busy()
            event.record()
        _waiting_calls(target)[call](busy, event, tensor)
        done = bool(event.query())
    expect(not done, f"when {call} returned, the busy stream had done its work", why="the host had to wait for it")


@check(
    "runtime.streams.of_each_thread",
    Clause(
        "R4.22",
        "Each thread has a current stream of its own: inside `stream(s)` in one, the others keep theirs.",
        reason="Checkpoints are written and batches pinned in threads; their copies must not take the step with them.",
    ),
    needs=needs_streams,
)
def of_each_thread(target: Target) -> None:
    accelerator = target.accelerator
    before, side = accelerator.current_stream(), accelerator.Stream()
    with accelerator.stream(side):
        (theirs,) = in_threads(accelerator.current_stream)
    expect_equal(theirs, before, "current_stream() of a thread that was begun inside stream(s) of another")

    def enter() -> None:
        # Left open on purpose: only what the thread itself submits later may be on this stream.
        accelerator.stream(side).__enter__()

    in_threads(enter)
    expect_equal(accelerator.current_stream(), before, "current_stream() while another thread is inside stream(s)")


@check(
    "runtime.streams.backward",
    Clause(
        "R4.24",
        "The backward pass of what was computed inside `stream(s)` is on `s`, and gradients are there for the stream "
        "on which `backward()` was called.",
        reason="Parts of a step are computed on side streams; the reduction and the optimizer wait for nothing.",
    ),
    needs=needs_streams,
)
def backward(target: Target) -> None:
    accelerator, side = target.accelerator, target.accelerator.Stream()
    streams: list[Any] = []

    class Slow(torch.autograd.Function):
        """Its derivative takes long, and is 3."""

        @staticmethod
        def forward(ctx: Any, input: torch.Tensor) -> torch.Tensor:
            return input.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            streams.append(accelerator.current_stream())
            keep_busy()
            return torch.zeros_like(gradients[0]).fill_(3.0)

    leaf = torch.ones(1 << 10, device=target.device, requires_grad=True)
    accelerator.synchronize()
    with slow_work(target) as keep_busy:
        with accelerator.stream(side):
            result: torch.Tensor = Slow.apply(leaf)  # type: ignore[no-untyped-call]  # torch gives it no type
        torch.autograd.backward(result, torch.ones_like(leaf))
        assert leaf.grad is not None
        seen = _seen(leaf.grad * 2)
    expect_equal(streams, [side], "the stream of the backward pass")
    expect_equal(seen, {6.0}, "twice the gradients of what was computed inside stream(s)")
