"""Defects of page-locked host memory."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from mutants.mutant import SIMULATED
from mutants.runtime.support import DEVICE, always, below, member, original

member("pinned.empty", "R7.1", "`pin_memory` does not copy.", pin_memory=lambda self, t, **_: torch.zeros_like(t))
member("pinned.everything", "R7.2", "All memory counts as pinned.", is_pinned=always(True))
member("pinned.aliases", "R7.3", "`pin_memory` gives the tensor.", target=SIMULATED, pin_memory=lambda self, t, **_: t)
member("pinned.aliases_fresh", "R7.4", "`make_copy=False` gives the tensor.", pin_memory=lambda self, t, **_: t)
member(
    "pinned.shape_kept",
    "R7.5",
    "`match_shape` is ignored.",
    pin_memory=lambda self, tensor, make_copy=True, match_shape=True: torch.empty_like(tensor),
)
member(
    "pinned.any_device",
    "R7.6",
    "`pin_empty` takes any device.",
    pin_empty=lambda self, *size, dtype, device="cpu": original(self).pin_empty(*size, dtype=dtype),
)
member(
    "pinned.no_unpin", "R7.7", "`unpin_memory` wants another argument.", unpin_memory=lambda self, tensor, size: None
)
_STAGING: list[torch.Tensor] = []


def _one_buffer(self: Any, tensor: torch.Tensor, **_: Any) -> torch.Tensor:
    if not _STAGING:
        _STAGING.append(original(self).pin_memory(tensor))
    return _STAGING[0].copy_(tensor)


member("pinned.one_buffer", "R7.8", "All pinned tensors share a buffer.", target=SIMULATED, pin_memory=_one_buffer)
member(
    "pinned.odd_alignment",
    "R7.9",
    "`pin_memory_alignment()` is 3.",
    pin_memory_alignment=always(3),
    register_host_memory=always(False),
)


def _memory_alone(self: Any, tensor: torch.Tensor, **options: Any) -> Any:
    """As a driver copies that is given an address and a number of bytes."""
    if options:
        return original(self).pin_memory(tensor, **options)
    begin = torch.as_strided(tensor, (tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
    pinned = original(self).pin_memory(begin)
    return pinned[tensor.storage_offset() :][: tensor.numel()].view(tensor.shape)


def _some_bytes(self: Any, tensor: torch.Tensor, **options: Any) -> Any:
    if tensor.numel() == 0:
        raise RuntimeError("cannot lock 0 bytes")
    return original(self).pin_memory(tensor, **options)


member("pinned.memory_alone", "R7.1", "Strides are forgotten.", target=SIMULATED, pin_memory=_memory_alone)
member("pinned.some_bytes", "R7.1", "A tensor without elements is an error.", target=SIMULATED, pin_memory=_some_bytes)
member(
    "pinned.beginnings",
    "R7.2",
    "Memory counts as pinned from its first byte on alone.",
    target=SIMULATED,
    is_pinned=lambda self, tensor: tensor.storage_offset() == 0 and original(self).is_pinned(tensor),
)


_pool: list[tuple[Tensor, Any]] = []


def _pin_by_current(self: Any, tensor: Tensor, **options: Any) -> Tensor:
    """Memory from a pool, which it goes back to with an event on the stream that is current when it dies."""
    if options or tensor.numel() != 1024 or tensor.dtype != torch.float32:
        pinned: Tensor = original(self).pin_memory(tensor, **options)
        return pinned
    at = next((i for i, (_, event) in enumerate(_pool) if event.query()), None)
    memory = original(self).pin_memory(torch.empty(1024)) if at is None else _pool.pop(at)[0]
    memory.copy_(tensor.reshape(-1))
    given: Tensor = memory.view(tensor.shape)

    def back() -> None:
        event = torch.Event(DEVICE)
        event.record(torch.get_device_module(DEVICE).current_stream())
        _pool.append((memory, event))

    weakref.finalize(given, back)
    return given


member(
    "pinned.free_for_the_current",
    "R7.11",
    "Pinned memory is free when the current stream is done, whichever copies from it.",
    target=SIMULATED,
    pin_memory=_pin_by_current,
)


def _reads_later() -> None:
    """Memory that is not pinned is read when the device comes to it."""
    to, late = torch.Tensor.to, list[tuple[Tensor, Tensor]]()

    def flush() -> None:
        while late:
            there, source = late.pop()
            there.copy_(source)

    def wrapped(self: Tensor, *arguments: Any, **options: Any) -> Any:
        made = to(self, *arguments, **options)
        moved = self.device.type == "cpu" and made.device.type == DEVICE
        if options.get("non_blocking") and moved and not self.is_pinned():
            late.append((made, self))
        return made

    torch.Tensor.to = wrapped  # type: ignore[method-assign, assignment]  # the defect of this mutant
    for name in ("cpu", "tolist", "item"):
        function = getattr(torch.Tensor, name)

        def read(self: Tensor, *arguments: Any, function: Any = function, **options: Any) -> Any:
            flush()
            return function(self, *arguments, **options)

        setattr(torch.Tensor, name, read)
    synchronize = torch.accelerator.synchronize

    def synchronized(*arguments: Any) -> None:
        flush()
        synchronize(*arguments)

    torch.accelerator.synchronize = synchronized


below("copies.read_later", "R7.12", "A non-blocking copy from ordinary memory reads it later.", _reads_later)


def _staged_badly() -> None:
    """A copy that converts, or that has gaps, goes by a buffer that is not kept for it: 0 arrives behind other work."""
    to, copy = torch.Tensor.to, torch.Tensor.copy_

    def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        odd = source.dtype != self.dtype or not source.is_contiguous()
        if non_blocking and odd and source.device.type == "cpu" and self.device.type == DEVICE:
            side = torch.get_device_module(DEVICE).current_stream()
            if not side.query():
                return self.zero_()
        return copy(self, source, non_blocking)

    def wrapped(self: Tensor, *arguments: Any, **options: Any) -> Any:
        made = to(self, *arguments, **options)
        odd = made.dtype != self.dtype or not self.is_contiguous()
        moved = self.device.type == "cpu" and made.device.type == DEVICE
        busy = moved and not torch.get_device_module(DEVICE).current_stream().query()
        if options.get("non_blocking") and odd and busy:
            made.zero_()
        return made

    torch.Tensor.to, torch.Tensor.copy_ = wrapped, copy_  # type: ignore[method-assign, assignment]  # the defect


_kept: list[Tensor] = []


def _keeps(self: Any, tensor: Tensor, **options: Any) -> Tensor:
    _kept.append(original(self).pin_memory(tensor, **options))
    return _kept[-1]


member("pinned.kept", "R7.16", "Pinned memory stays locked.", target=SIMULATED, pin_memory=_keeps)


def _copy(how: Any) -> Any:
    """Replace ``copy_`` between pinned memory and the device by `how(copy_, self, source, non_blocking)`."""

    def patch() -> None:
        copy = torch.Tensor.copy_

        def copy_(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if {self.device.type, source.device.type} != {"cpu", DEVICE}:
                return copy(self, source, non_blocking)
            copied: Tensor = how(copy, self, source, non_blocking)
            return copied

        torch.Tensor.copy_ = copy_  # type: ignore[method-assign, assignment]  # the defect of this mutant

    return patch


def _by_an_engine(copy: Any, self: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    with torch.Stream(device=DEVICE):
        copied: Tensor = copy(self, source, non_blocking)
    return copied


below(
    "copies.never_blocking",
    "R7.14",
    "A blocking copy of pinned memory does not wait.",
    _copy(lambda copy, self, source, non_blocking: copy(self, source, True)),
)
below("copies.by_an_engine", "R7.15", "Copies of pinned memory are ordered with nothing.", _copy(_by_an_engine))


def _staged_badly_back(copy: Any, self: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """As `_staged_badly`, of copies to the host."""
    odd = source.dtype != self.dtype or not source.is_contiguous()
    busy = not torch.get_device_module(DEVICE).current_stream().query()
    if self.device.type == "cpu" and non_blocking and odd and busy:
        return self.zero_()
    copied: Tensor = copy(self, source, non_blocking)
    return copied


below(
    "copies.staged_badly_back",
    "R7.13",
    "The buffer by which a copy to the host converts is not kept for it.",
    _copy(_staged_badly_back),
)
below("copies.staged_badly", "R7.13", "The buffer by which a copy converts is not kept for it.", _staged_badly)
