"""Streams that do not order, and events that do not tell."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mutants.mutant import SIMULATED
from mutants.runtime.support import DEVICE, below, member, nothing, original, side_stream


class _NoWaits(torch.Stream):
    """A stream whose waits do nothing."""

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


def _streams(make: Callable[..., Any]) -> Any:
    """The member Stream, by a function that makes one."""
    return property(lambda self: make)


class _Event:
    """An event of the device with one thing wrong."""

    wrong = ""

    def __init__(self, enable_timing: bool = False) -> None:
        self.event = torch.Event(DEVICE, enable_timing=enable_timing)
        self.recorded = False

    def record(self, stream: Any = None) -> None:
        if not (self.recorded and self.wrong == "recorded once"):
            self.event.record() if stream is None else self.event.record(stream)
        self.recorded = True

    def query(self) -> bool:
        return self.wrong == "always done" or self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()

    def wait(self, stream: Any = None) -> None:
        self.event.wait()

    def elapsed_time(self, other: _Event) -> float:
        if self.wrong == "no error" and not other.recorded:
            return 0.0
        return self.event.elapsed_time(other.event) / (1000 if self.wrong == "seconds" else 1)


def _events(wrong: str) -> Any:
    """The member Event, with one thing wrong."""
    made = type("Event", (_Event,), {"wrong": wrong})
    return property(lambda self: made)


member("streams.number", "R4.1", "`Event` is a number.", target=SIMULATED, Event=5)
member("streams.none_rejected", "R4.2", "`stream(None)` is no context.", target=SIMULATED, stream=lambda self, s: s)
member(
    "streams.no_device",
    "R4.2",
    "`current_stream` takes no tensor's device.",
    target=SIMULATED,
    current_stream=lambda self, index=None: original(self).current_stream(index if index is None else index + 0),
)
_ONE: list[Any] = []


def _one_stream(device: Any = None) -> Any:
    if not _ONE:
        _ONE.append(side_stream())
    return _ONE[0]


member("streams.one_for_all", "R4.3", "`Stream()` gives one stream.", target=SIMULATED, Stream=_streams(_one_stream))
member(
    "streams.index_ignored",
    "R4.4",
    "`current_stream(i)` is the current device's.",
    target=SIMULATED,
    current_stream=lambda self, index=None: original(self).current_stream(),
)
member(
    "streams.of_the_first",
    "R4.4",
    "`Stream()` makes a stream of device 0, whichever is current.",
    target=SIMULATED,
    Stream=_streams(lambda device=0: torch.Stream(device=torch.device(DEVICE, device))),
)
member(
    "streams.default_is_new",
    "R4.5",
    "`default_stream()` is a new stream.",
    target=SIMULATED,
    default_stream=lambda self, index=None: side_stream(),
)
member(
    "streams.context_does_nothing",
    "R4.6",
    "`stream(s)` does not make `s` current.",
    target=SIMULATED,
    stream=lambda self, stream: contextlib.nullcontext(),
)


def _clone_elsewhere() -> None:
    original = torch.Tensor.clone

    def clone(self: torch.Tensor, **options: Any) -> torch.Tensor:
        with side_stream():
            return original(self, **options)

    torch.Tensor.clone = clone  # type: ignore[method-assign, assignment]  # the defect of this mutant


below("streams.copy_not_in_order", "R4.7", "Copies run beside the current stream.", _clone_elsewhere)
for _name, _clause, _what in (
    ("wait_stream", "R4.8", "`wait_stream` does nothing."),
    ("synchronize", "R4.9", "`Stream.synchronize` does nothing."),
    ("wait_event", "R4.10", "`wait_event` does nothing."),
):
    member(
        f"streams.no_{_name}",
        _clause,
        _what,
        target=SIMULATED,
        Stream=_streams(lambda device=0: _NoWaits(device=torch.device(DEVICE, device))),
    )
member("streams.event_early", "R4.11", "An event is always done.", target=SIMULATED, Event=_events("always done"))
member("streams.seconds", "R4.12", "`elapsed_time` is in seconds.", target=SIMULATED, Event=_events("seconds"))
member("streams.event_once", "R4.13", "An event is recorded once.", target=SIMULATED, Event=_events("recorded once"))


def _never_recorded() -> None:
    torch.Tensor.record_stream = nothing  # type: ignore[method-assign]  # the defect of this mutant


below("streams.not_recorded", "R4.14", "`record_stream` does nothing.", _never_recorded)

_recorded: list[torch.Tensor] = []


def _kept_for_ever() -> None:
    def record_stream(self: torch.Tensor, stream: Any) -> None:
        _recorded.append(self)

    torch.Tensor.record_stream = record_stream  # type: ignore[method-assign, assignment]  # the defect of this mutant


below("streams.kept_for_ever", "R4.14", "Memory on which `record_stream` was called is not used again.", _kept_for_ever)


def _read_at_once() -> None:
    original = torch.Tensor.item

    def item(self: torch.Tensor) -> Any:
        with side_stream():
            return original(self)

    torch.Tensor.item = item  # type: ignore[method-assign, assignment]  # the defect of this mutant


below("streams.read_at_once", "R4.15", "`item` does not wait for the current stream.", _read_at_once)


def _waits_for_the_current() -> None:
    original = torch.Tensor.item

    def item(self: torch.Tensor) -> Any:
        if self.device.type != DEVICE or self.device.index == torch.accelerator.current_device_index():
            return original(self)
        with torch.Stream(device=self.device):
            return original(self)

    torch.Tensor.item = item  # type: ignore[method-assign, assignment]  # the defect of this mutant


below(
    "streams.waits_for_the_current",
    "R4.15",
    "`item` waits for the current device's stream, wherever the tensor is.",
    _waits_for_the_current,
)


def _copied_at_once() -> None:
    original = torch.Tensor.to

    def to(self: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if self.device.type != DEVICE:
            return original(self, *arguments, **keywords)
        with torch.Stream(device=self.device):
            return original(self, *arguments, **keywords)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]  # the defect of this mutant


below("streams.copied_at_once", "R4.16", "A copy to another device does not wait for its source.", _copied_at_once)


def _written_at_once() -> None:
    original = torch.Tensor.copy_

    def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if {self.device.type, source.device.type} != {DEVICE} or self.device == source.device:
            return original(self, source, non_blocking)
        with torch.Stream(device=self.device):
            return original(self, source, non_blocking)

    torch.Tensor.copy_ = copy_  # type: ignore[method-assign, assignment]  # the defect of this mutant


below("streams.written_at_once", "R4.16", "A copy from another device does not wait for its target.", _written_at_once)
member(
    "streams.no_time_is_zero", "R4.17", "An unrecorded event has time 0.", target=SIMULATED, Event=_events("no error")
)


@contextlib.contextmanager
def _same_device(self: Any, stream: Any) -> Iterator[None]:
    before = self.current_device()
    with original(self).stream(stream):
        self.set_device(before)
        yield


member("streams.device_stays", "R4.18", "`stream(s)` leaves the device.", target=SIMULATED, stream=_same_device)
member(
    "streams.all_are_default",
    "R4.19",
    "Every stream is the default stream.",
    target=SIMULATED,
    Stream=_streams(lambda device=None: torch.get_device_module(DEVICE).default_stream(device)),
)


@contextlib.contextmanager
def _for_all_threads(self: Any, stream: Any) -> Iterator[None]:
    """As a driver that keeps one current stream for the process."""
    with original(self).stream(stream):
        self.__dict__["last"] = stream
        try:
            yield
        finally:
            self.__dict__["last"] = None


member(
    "streams.of_the_process",
    "R4.22",
    "`stream(s)` makes `s` current in all threads.",
    target=SIMULATED,
    stream=_for_all_threads,
    current_stream=lambda self, index=None: self.__dict__.get("last") or original(self).current_stream(index),
)


_made_events: list[None] = []


def _few_events(enable_timing: bool = False) -> Any:
    _made_events.append(None)
    if len(_made_events) > 4096:
        raise RuntimeError("out of events")
    return torch.Event(DEVICE, enable_timing=enable_timing)


member(
    "streams.events_not_returned",
    "R4.23",
    "Handles of events are not given back; there are 4,096.",
    target=SIMULATED,
    Event=property(lambda self: _few_events),
)


def _leaves(node: Any) -> Iterator[torch.Tensor]:
    for each, _ in node.next_functions if node is not None else ():
        yield from [each.variable] if hasattr(each, "variable") else _leaves(each)


def _backward_elsewhere() -> None:
    def backward(loss: torch.Tensor, *arguments: Any, **options: Any) -> None:
        for leaf in list(_leaves(loss.grad_fn)):
            with torch.Stream(device=DEVICE):
                (leaf.grad,) = torch.autograd.grad(loss, [leaf], *arguments, **options)

    torch.autograd.backward = backward  # type: ignore[assignment]  # the defect of this mutant


below("streams.backward_elsewhere", "R4.24", "Gradients are not awaited by the caller's stream.", _backward_elsewhere)
