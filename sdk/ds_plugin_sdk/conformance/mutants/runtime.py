"""Defects of the runtime: members that answer wrongly or do nothing, streams that do not order, memory that aliases.

Most are one member of the accelerator, replaced; `_member` declares those. Some lie below it, in what torch does on the
device; `_below` declares those.

Many replace a function of torch by a defective one, which is what the silenced assignments are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ds_plugin_sdk.conformance.mutants.mutant import SIMULATED, mutant, override
from ds_plugin_sdk.conformance.runtime.builders import NAMES
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.registry import Probe

_DEVICE = "simulated"


def _member(name: str, clause: str, description: str, *, target: str = "cpu", only: str = "", **members: Any) -> None:
    """Declare a mutant in which members of the accelerator are replaced."""

    def install(sound: Target) -> Target:
        return override(sound, **members)

    install.__doc__ = description
    mutant(name, clause, "runtime", target=target, only=only)(install)


def _below(
    name: str, clause: str, description: str, patch: Callable[[], None], *, target: str = SIMULATED, only: str = ""
) -> None:
    """Declare a mutant in which something of torch's is replaced, for the process."""

    def install(sound: Target) -> Target:
        patch()
        return sound

    install.__doc__ = description
    mutant(name, clause, "runtime", target=target, only=only)(install)


def _sound(accelerator: Any) -> Any:
    """The accelerator's members as they were before they were replaced."""
    return super(type(accelerator), accelerator)


def _nothing(*arguments: Any, **keywords: Any) -> None:
    return None


def _always(value: Any) -> Callable[..., Any]:
    return lambda *arguments, **keywords: value


def _side_stream() -> Any:
    return torch.Stream(device=_DEVICE)


# ---- R1: the device --------------------------------------------------------------------------------------------------
_member("device.name_with_index", "R1.1", "`device_name()` has an index.", device_name=_always("cpu:0"))
_member("device.marketing_name", "R1.2", "`_name` is not the device's type.", _name=property(_always("CPU"), _nothing))
_member(
    "device.one_name_for_all",
    "R1.3",
    "`device_name(i)` names device 0 whatever `i` is.",
    target=SIMULATED,
    device_name=lambda self, index=None: _sound(self).device_name(None if index is None else 0),
)
_member("device.count_as_float", "R1.4", "`device_count()` is a float.", device_count=_always(1.0))
_member("device.unavailable", "R1.5", "`is_available()` is False.", is_available=_always(False))
_member("device.current_as_text", "R1.6", "`current_device()` is the text of an index.", current_device=_always("0"))
_member(
    "device.current_of_another",
    "R1.7",
    "`current_device_name()` names device 1 while device 0 is current.",
    target=SIMULATED,
    current_device_name=_always(f"{_DEVICE}:1"),
)
_member("device.none", "R1.8", "`device()` is None.", device=_nothing)
_member("device.set_ignored", "R1.9", "`set_device` does nothing.", target=SIMULATED, set_device=_nothing)
_member(
    "device.set_wraps_around",
    "R1.10",
    "`set_device(2)` of two devices takes device 0.",
    target=SIMULATED,
    set_device=lambda self, index: _sound(self).set_device(index % 2),
)
_member(
    "device.count_off_by_one",
    "R1.11",
    "`device_count()` is one less than there are.",
    target=SIMULATED,
    device_count=lambda self: _sound(self).device_count() - 1,
)
_member("device.no_synchronize", "R1.12", "`synchronize` does nothing.", target=SIMULATED, synchronize=_nothing)
_member(
    "device.synchronize_current_only",
    "R1.13",
    "`synchronize(i)` waits for the current device.",
    target=SIMULATED,
    synchronize=lambda self, index=None: _sound(self).synchronize(),
)
_member("device.slow_synchronize", "R1.14", "`synchronize` sleeps.", synchronize=lambda self, i=None: time.sleep(0.05))
_member(
    "device.only_the_first",
    "R1.15",
    "`on_accelerator` knows device 0 alone.",
    target=SIMULATED,
    on_accelerator=lambda self, tensor: str(tensor.device) == f"{_DEVICE}:0",
)


def _layout_lost() -> None:
    sound = torch.Tensor.cpu

    def cpu(self: torch.Tensor) -> torch.Tensor:
        got = sound(self)
        return got if got.is_contiguous() else got.t().reshape(got.shape)

    torch.Tensor.cpu = cpu  # type: ignore[method-assign, assignment]


_below("device.layout_lost", "R1.16", "A tensor that is not contiguous comes back in another order.", _layout_lost)
_member(
    "device.fixed_member",
    "R1.17",
    "`is_available` is a property that cannot be replaced.",
    is_available=property(lambda self: _always(True)),
)


def _no_autocast() -> None:
    torch.autocast.__enter__ = lambda self: self  # type: ignore[method-assign]
    torch.autocast.__exit__ = _nothing  # type: ignore[method-assign]


_below("device.no_autocast", "R1.18", "Autocast changes no type.", _no_autocast, target="cpu")

# ---- R2: the flags ---------------------------------------------------------------------------------------------------
_member("flags.number", "R2.1", "`use_host_timers()` is 1.", use_host_timers=_always(1))
_member(
    "flags.asynchronous_without_streams",
    "R2.2",
    "It is not synchronized, and Stream is None.",
    is_synchronized_device=_always(False),
    _check_flags=_nothing,
)
_member(
    "flags.unordered_without_streams",
    "R2.3",
    "It does not resolve dependencies, and Stream is None.",
    resolves_data_dependency=_always(False),
    _check_flags=_nothing,
)
_member(
    "flags.backpressure_without_events",
    "R2.4",
    "It does not handle backpressure, and Event is None.",
    handles_memory_backpressure=_always(False),
    _check_flags=_nothing,
)
_member(
    "flags.device_timers_without_events",
    "R2.5",
    "It does not use host timers, and Event is None.",
    use_host_timers=_always(False),
    _check_flags=_nothing,
)
_member("flags.falsely_synchronized", "R2.6", "It is asynchronous and denies it.", target=SIMULATED, synchronous=True)
_member(
    "flags.falsely_resolving",
    "R2.7",
    "It claims to order streams by itself.",
    target=SIMULATED,
    resolves_data_dependency=_always(True),
)


def _host_waits() -> None:
    sound = torch.Tensor.fill_

    def fill_(self: torch.Tensor, value: Any) -> torch.Tensor:
        result = sound(self, value)
        torch.accelerator.synchronize()
        return result

    torch.Tensor.fill_ = fill_  # type: ignore[method-assign, assignment]


_below("flags.host_waits", "R2.8", "The host waits for each piece of work.", _host_waits)

# ---- R3: random numbers ----------------------------------------------------------------------------------------------
_member(
    "random.state_of_ints",
    "R3.1",
    "`get_rng_state()` is an int32 tensor.",
    get_rng_state=lambda self, index=None: torch.get_rng_state().int(),
)
_member("random.seed_ignored", "R3.2", "`manual_seed` does nothing.", manual_seed=_nothing)
_member("random.state_ignored", "R3.3", "`set_rng_state` does nothing.", set_rng_state=_nothing)
_member(
    "random.stale_state",
    "R3.4",
    "`get_rng_state()` is always the first state.",
    get_rng_state=lambda self, index=None: self.__dict__.setdefault("first", torch.get_rng_state()),
)
_member(
    "random.index_ignored",
    "R3.5",
    "`set_rng_state(state, i)` sets the current device's.",
    target=SIMULATED,
    set_rng_state=lambda self, state, index=None: _sound(self).set_rng_state(state),
)


def _only_own_states(self: Any, state: torch.Tensor, index: int | None = None) -> None:
    if state is self.__dict__.get("given"):
        torch.set_rng_state(state)


_member(
    "random.state_by_identity",
    "R3.6",
    "`set_rng_state` takes only the object that was given.",
    get_rng_state=lambda self, index=None: self.__dict__.__setitem__("given", torch.get_rng_state()) or self.given,
    set_rng_state=_only_own_states,
)
_member(
    "random.another_generator",
    "R3.7",
    "`default_generator` is a new generator.",
    default_generator=lambda self, index: torch.Generator(),
)
_member(
    "random.seeds_one",
    "R3.8",
    "`manual_seed_all` seeds the current device alone.",
    target=SIMULATED,
    manual_seed_all=lambda self, seed: self.manual_seed(seed),
)
_member(
    "random.seeds_all",
    "R3.9",
    "`manual_seed` seeds all devices.",
    target=SIMULATED,
    manual_seed=lambda self, seed: self.manual_seed_all(seed),
)


def _draws_on_the_host() -> None:
    sound = torch.rand
    torch.rand = lambda *size, device=None, **options: sound(*size, **options).to(device)


_below("random.drawn_on_the_host", "R3.10", "The device's numbers come from the host's generator.", _draws_on_the_host)


def _never_seeded() -> None:
    torch.get_device_module(_DEVICE)._is_in_bad_fork = _always(True)


_below("random.torch_does_not_seed", "R3.11", "`torch.manual_seed` leaves the device alone.", _never_seeded)
_member("random.no_initial_seed", "R3.12", "`initial_seed()` is 0.", initial_seed=_always(0))
_member(
    "random.fork_does_nothing",
    "R3.13",
    "`fork_rng` keeps nothing.",
    random=_always(types.SimpleNamespace(fork_rng=lambda devices: contextlib.nullcontext())),
)
_member("random.never_called", "R3.14", "`lazy_call` does not call.", lazy_call=_nothing)


def _state_not_kept() -> None:
    torch.get_device_module(_DEVICE)._initialized = False


_below("random.not_recomputed", "R3.15", "torch.utils.checkpoint does not see the device's generator.", _state_not_kept)


def _one_mask() -> None:
    sound = torch.nn.functional.dropout

    def dropout(input: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        torch.manual_seed(1)
        return sound(input, *arguments, **keywords)

    torch.nn.functional.dropout = dropout


_below("random.one_mask", "R3.16", "Dropout drops the same elements each time.", _one_mask, target="cpu")
_member(
    "random.small_seeds",
    "R3.17",
    "`manual_seed` takes 32 bits.",
    manual_seed=lambda self, seed: _sound(self).manual_seed(int.from_bytes(seed.to_bytes(4, "little"), "little")),
)
_member(
    "random.no_index",
    "R3.18",
    "`set_rng_state` takes no index.",
    set_rng_state=lambda self, state: torch.set_rng_state(state),
)


# ---- R4: streams and events ------------------------------------------------------------------------------------------
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
        self.event = torch.Event(_DEVICE, enable_timing=enable_timing)
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


_member("streams.number", "R4.1", "`Event` is a number.", target=SIMULATED, Event=5)
_member("streams.none_refused", "R4.2", "`stream(None)` is no context.", target=SIMULATED, stream=lambda self, s: s)
_ONE: list[Any] = []


def _one_stream(device: Any = None) -> Any:
    if not _ONE:
        _ONE.append(_side_stream())
    return _ONE[0]


_member("streams.one_for_all", "R4.3", "`Stream()` gives one stream.", target=SIMULATED, Stream=_streams(_one_stream))
_member(
    "streams.index_ignored",
    "R4.4",
    "`current_stream(i)` is the current device's.",
    target=SIMULATED,
    current_stream=lambda self, index=None: _sound(self).current_stream(),
)
_member(
    "streams.default_is_new",
    "R4.5",
    "`default_stream()` is a new stream.",
    target=SIMULATED,
    default_stream=lambda self, index=None: _side_stream(),
)
_member(
    "streams.context_does_nothing",
    "R4.6",
    "`stream(s)` does not make `s` current.",
    target=SIMULATED,
    stream=lambda self, stream: contextlib.nullcontext(),
)


def _clone_elsewhere() -> None:
    sound = torch.Tensor.clone

    def clone(self: torch.Tensor, **options: Any) -> torch.Tensor:
        with _side_stream():
            return sound(self, **options)

    torch.Tensor.clone = clone  # type: ignore[method-assign, assignment]


_below("streams.copy_not_in_order", "R4.7", "Copies run beside the current stream.", _clone_elsewhere)
for _name, _clause, _what in (
    ("wait_stream", "R4.8", "`wait_stream` does nothing."),
    ("synchronize", "R4.9", "`Stream.synchronize` does nothing."),
    ("wait_event", "R4.10", "`wait_event` does nothing."),
):
    _member(
        f"streams.no_{_name}",
        _clause,
        _what,
        target=SIMULATED,
        Stream=_streams(lambda device=0: _NoWaits(device=torch.device(_DEVICE, device))),
    )
_member("streams.event_early", "R4.11", "An event is always done.", target=SIMULATED, Event=_events("always done"))
_member("streams.seconds", "R4.12", "`elapsed_time` is in seconds.", target=SIMULATED, Event=_events("seconds"))
_member("streams.event_once", "R4.13", "An event is recorded once.", target=SIMULATED, Event=_events("recorded once"))


def _never_recorded() -> None:
    torch.Tensor.record_stream = _nothing  # type: ignore[method-assign]


_below("streams.not_recorded", "R4.14", "`record_stream` does nothing.", _never_recorded)


def _read_at_once() -> None:
    sound = torch.Tensor.item

    def item(self: torch.Tensor) -> Any:
        with _side_stream():
            return sound(self)

    torch.Tensor.item = item  # type: ignore[method-assign, assignment]


_below("streams.read_at_once", "R4.15", "`item` does not wait for the current stream.", _read_at_once)


def _copied_at_once() -> None:
    sound = torch.Tensor.to

    def to(self: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        if self.device.type != _DEVICE:
            return sound(self, *arguments, **keywords)
        with torch.Stream(device=self.device):
            return sound(self, *arguments, **keywords)

    torch.Tensor.to = to  # type: ignore[method-assign, assignment]


_below("streams.copied_at_once", "R4.16", "A copy to another device does not wait for its source.", _copied_at_once)
_member(
    "streams.no_time_is_zero", "R4.17", "An unrecorded event has time 0.", target=SIMULATED, Event=_events("no error")
)


@contextlib.contextmanager
def _same_device(self: Any, stream: Any) -> Iterator[None]:
    before = self.current_device()
    with _sound(self).stream(stream):
        self.set_device(before)
        yield


_member("streams.device_stays", "R4.18", "`stream(s)` leaves the device.", target=SIMULATED, stream=_same_device)
_member(
    "streams.all_are_default",
    "R4.19",
    "Every stream is the default stream.",
    target=SIMULATED,
    Stream=_streams(lambda device=None: torch.get_device_module(_DEVICE).default_stream(device)),
)

# ---- R5: memory ------------------------------------------------------------------------------------------------------
_member("memory.none", "R5.1", "`memory_allocated()` is None.", memory_allocated=_nothing)
_member(
    "memory.kib",
    "R5.2",
    "`memory_allocated()` is in KiB.",
    memory_allocated=lambda self, index=None: _sound(self).memory_allocated(index) // 1024,
)
_member("memory.nothing_reserved", "R5.3", "`memory_reserved()` is 0.", memory_reserved=_always(0))
_member(
    "memory.peak_is_current",
    "R5.4",
    "The peak is the current value.",
    max_memory_allocated=lambda self, index=None: self.memory_allocated(index),
)
_member(
    "memory.peak_not_reset",
    "R5.5",
    "`reset_peak_memory_stats` does nothing.",
    target=SIMULATED,
    reset_peak_memory_stats=_nothing,
)
_member("memory.cached_is_another", "R5.6", "`memory_cached()` is 0.", memory_cached=_always(0))
_member("memory.no_stats", "R5.7", "`memory_stats()` is None.", memory_stats=_nothing)
_member(
    "memory.total_in_mib",
    "R5.8",
    "`total_memory()` is in MiB.",
    total_memory=lambda self, index=None: _sound(self).total_memory(index) >> 20,
)
_member(
    "memory.all_available",
    "R5.9",
    "`available_memory()` is the whole.",
    available_memory=lambda self, index=None: self.total_memory(index),
)
_member(
    "memory.index_ignored",
    "R5.10",
    "`memory_stats(i)` is the current device's.",
    target=SIMULATED,
    memory_stats=lambda self, index=None: _sound(self).memory_stats(),
)
_member(
    "memory.all_reset",
    "R5.11",
    "`reset_peak_memory_stats(i)` resets all devices.",
    target=SIMULATED,
    reset_peak_memory_stats=lambda self, index=None: [_sound(self).reset_peak_memory_stats(i) for i in (0, 1)],
)


def _never_exhausted() -> None:
    sound = torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        try:
            return sound(*size, **options)
        except RuntimeError:
            return sound(0, **options)

    torch.empty = empty


_below("memory.never_exhausted", "R5.12", "An allocation that fails gives an empty tensor.", _never_exhausted)


def _clear_all(self: Any) -> None:
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.device.type == _DEVICE:
            thing.zero_()


_member("memory.cache_takes_all", "R5.13", "`empty_cache()` empties tensors.", target=SIMULATED, empty_cache=_clear_all)


def _shared() -> None:
    sound: Any = torch.full
    made: list[torch.Tensor] = []

    def full(*arguments: Any, **options: Any) -> torch.Tensor:
        if torch.device(options.get("device", "cpu")) == torch.device(_DEVICE, 1) and made:
            return made[0]
        made.append(sound(*arguments, **options))
        return made[-1]

    torch.full = full


_below("memory.shared", "R5.14", "Two devices have one memory.", _shared)

# ---- R6: dtypes ------------------------------------------------------------------------------------------------------
_member("dtypes.int8", "R6.1", "int8 can be trained in.", supported_dtypes=_always([torch.float32, torch.int8]))
_member("dtypes.undecided", "R6.2", "`is_fp16_supported()` is None.", is_fp16_supported=_nothing)


def _other_gelu() -> None:
    sound = torch.nn.functional.gelu

    def gelu(input: torch.Tensor, **options: Any) -> torch.Tensor:
        return input * torch.sigmoid(1.2 * input) if input.device.type == _DEVICE else sound(input, **options)

    torch.nn.functional.gelu = gelu  # type: ignore[assignment]


_below("dtypes.other_gelu", "R6.3", "The device computes another GELU.", _other_gelu)
_member(
    "dtypes.no_fp64", "R6.4", "`is_fp64_supported()` is False, and float64 works.", is_fp64_supported=_always(False)
)
_member(
    "dtypes.host_factories", "R6.5", "`FloatTensor` is on the CPU.", target=SIMULATED, FloatTensor=torch.FloatTensor
)


def _all_finite() -> None:
    torch.isfinite = lambda tensor: torch.ones_like(tensor, dtype=torch.bool)  # type: ignore[assignment]


_below("dtypes.all_finite", "R6.6", "Infinity counts as finite.", _all_finite)


def _narrow_sum() -> None:
    sound = torch.Tensor.sum

    def sum_(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        total = sound(self, *arguments, **options)
        # Where a sum of ones stops growing: the next whole number cannot be told apart.
        return total.clamp(max=256) if self.dtype == torch.bfloat16 else total

    torch.Tensor.sum = sum_  # type: ignore[method-assign, assignment]


_below("dtypes.narrow_sum", "R6.7", "Sums in bfloat16 are accumulated in bfloat16.", _narrow_sum, target="cpu")

# ---- R7: pinned memory -----------------------------------------------------------------------------------------------
_member("pinned.empty", "R7.1", "`pin_memory` does not copy.", pin_memory=lambda self, t, **_: torch.zeros_like(t))
_member("pinned.everything", "R7.2", "All memory counts as pinned.", is_pinned=_always(True))
_member("pinned.aliases", "R7.3", "`pin_memory` gives the tensor.", target=SIMULATED, pin_memory=lambda self, t, **_: t)
_member("pinned.aliases_fresh", "R7.4", "`make_copy=False` gives the tensor.", pin_memory=lambda self, t, **_: t)
_member(
    "pinned.shape_kept",
    "R7.5",
    "`match_shape` is ignored.",
    pin_memory=lambda self, tensor, make_copy=True, match_shape=True: torch.empty_like(tensor),
)
_member(
    "pinned.any_device",
    "R7.6",
    "`pin_empty` takes any device.",
    pin_empty=lambda self, *size, dtype, device="cpu": _sound(self).pin_empty(*size, dtype=dtype),
)
_member(
    "pinned.no_unpin", "R7.7", "`unpin_memory` wants another argument.", unpin_memory=lambda self, tensor, size: None
)
_STAGING: list[torch.Tensor] = []


def _one_buffer(self: Any, tensor: torch.Tensor, **_: Any) -> torch.Tensor:
    if not _STAGING:
        _STAGING.append(_sound(self).pin_memory(tensor))
    return _STAGING[0].copy_(tensor)


_member("pinned.one_buffer", "R7.8", "All pinned tensors share a buffer.", target=SIMULATED, pin_memory=_one_buffer)
_member(
    "pinned.odd_alignment",
    "R7.9",
    "`pin_memory_alignment()` is 3.",
    pin_memory_alignment=_always(3),
    register_host_memory=_always(False),
)

# ---- R8: communication and compilation -------------------------------------------------------------------------------
_member(
    "communication.unknown",
    "R8.1",
    "torch knows no backend of that name.",
    communication_backend_name=_always("nobodyccl"),
)
_member(
    "communication.host_only",
    "R8.2",
    "The backend takes tensors of the host alone.",
    target=SIMULATED,
    communication_backend="gloo",
)
_member("communication.triton", "R8.3", "Triton is declared, and is not there.", is_triton_supported=_always(True))
_member("communication.no_compiler", "R8.4", "The compile backend is unknown.", get_compile_backend=_always("nobody"))


def _doubling() -> None:
    def doubling(graph: Any, inputs: Any) -> Any:
        return lambda *arguments: tuple(2 * value for value in graph(*arguments))

    torch._dynamo.register_backend(doubling, name="doubling")


def _compiles_wrongly(target: Target) -> Target:
    """Compiled code computes twice the value."""
    _doubling()
    return override(target, get_compile_backend=_always("doubling"))


mutant("communication.wrong_code", "R8.5", "runtime")(_compiles_wrongly)
_member(
    "communication.any_compiler",
    "R8.6",
    "`set_compile_backend` takes any name.",
    set_compile_backend=lambda self, name: setattr(self, "_compile_backend", name),
)

# ---- R9: profiling ---------------------------------------------------------------------------------------------------
_member("profiling.domain_needed", "R9.1", "`range_push` needs a domain.", range_push=lambda self, msg, domain: None)
_member("profiling.no_context", "R9.2", "`capture_to_graph` gives None.", capture_to_graph=_nothing)
_member(
    "profiling.empty_replay",
    "R9.3",
    "`replay_graph` does nothing.",
    target=SIMULATED,
    create_graph=lambda self: object(),
    is_current_stream_capturing=_always(True),
    replay_graph=_nothing,
)
_member("profiling.always_capturing", "R9.4", "It is always capturing.", is_current_stream_capturing=_always(True))

# ---- R10: the manifest -----------------------------------------------------------------------------------------------
_MANIFEST = """\
{first}
from ds_plugin_sdk import Plugin, Probe
plugin = Plugin("{name}", (1, 0), "ds_plugin_cpu.accelerator:CPU_Accelerator", probe=lambda: Probe.available(1))
"""


def _another_manifest(target: Target, name: str, first: str) -> Target:
    """Install a plugin of this name, whose manifest begins with a line, for this process and those it starts."""
    site = Path(tempfile.mkdtemp(prefix="conformance-mutant-"))
    info = site / f"ds_plugin_{name}-1.0.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: ds-plugin-{name}\nVersion: 1.0\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    entry_points = f"[ds_plugin_sdk.plugins]\n{name} = ds_plugin_{name}:plugin\n"
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    (site / f"ds_plugin_{name}.py").write_text(_MANIFEST.format(name=name, first=first), encoding="utf-8")
    sys.path.append(str(site))
    assert target.plugin is not None
    return dataclasses.replace(target, plugin=dataclasses.replace(target.plugin, name=name))


@mutant("manifest.imports_torch", "R10.1", "runtime")
def imports_torch(target: Target) -> Target:
    """The manifest imports torch."""
    return _another_manifest(target, "heavy", "import torch")


@mutant("manifest.slow", "R10.2", "runtime")
def slow(target: Target) -> Target:
    """The manifest takes a second and a half to import."""
    return _another_manifest(target, "slow", "import time; time.sleep(1.5)")


@mutant("manifest.boasts", "R10.3", "runtime")
def boasts(target: Target) -> Target:
    """`probe()` tells of seven devices."""
    assert target.plugin is not None
    return dataclasses.replace(
        target, plugin=dataclasses.replace(target.plugin, probe=lambda: Probe.available(devices=7))
    )


@mutant("manifest.another_class", "R10.4", "runtime")
def another_class(target: Target) -> Target:
    """The manifest names a class that is not chosen."""
    assert target.plugin is not None
    return dataclasses.replace(target, plugin=dataclasses.replace(target.plugin, accelerator="nowhere:Nothing"))


_made: list[int] = []


def _counted(self: Any) -> int:
    if "number" not in self.__dict__:
        _made.append(1)
        self.__dict__["number"] = len(_made)
    return int(self.__dict__["number"])


_member("manifest.counts_instances", "R10.5", "Each instance counts one more device.", device_count=_counted)


# ---- R11: processes --------------------------------------------------------------------------------------------------
def _in_child() -> bool:
    return multiprocessing.parent_process() is not None


def _raises_in_child(self: Any, index: int | None = None) -> None:
    if _in_child():
        raise RuntimeError("the driver does not start twice")


def _dies_in_child(self: Any, index: int | None = None) -> None:
    if _in_child():
        os._exit(3)


_member("processes.text", "R11.1", "A rank's `current_device()` is a text.", current_device=_always("0"))
_member("processes.not_hidden", "R11.2", "`set_visible_devices_envs` does nothing.", set_visible_devices_envs=_nothing)
_member("processes.all_counted", "R11.3", "Hidden devices are counted.", target=SIMULATED, device_count=_always(2))
_member("processes.all_exported", "R11.4", "`export_envs()` has an empty prefix.", export_envs=_always([""]))


def _pins_nothing() -> None:
    torch.Tensor.pin_memory = lambda self, *_: torch.zeros_like(self)  # type: ignore[method-assign]


_below("processes.batches_lost", "R11.5", "What a data loader pins is lost.", _pins_nothing)
_member(
    "processes.used_early",
    "R11.6",
    "`is_available()` uses the device.",
    target=SIMULATED,
    is_available=lambda self: bool(torch.ones(1, device=_DEVICE).item()),
)
_member("processes.dies_in_fork", "R11.7", "Using the device in a child ends it.", synchronize=_dies_in_child)
_member("processes.no_spawn", "R11.8", "A spawned child cannot use the device.", synchronize=_raises_in_child)
_member("processes.one_device", "R11.9", "Every rank stays on device 0.", target=SIMULATED, set_device=_nothing)


# ---- R12: builders ---------------------------------------------------------------------------------------------------
class _EmptyBuilder:
    NAME = BUILD_VAR = name = "empty"

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = True) -> None:
        return None


def _known_only(self: Any, name: str) -> Any:
    if name not in NAMES:
        raise KeyError(name)
    return _sound(self).get_op_builder(name)


_member("builders.nameless", "R12.1", "Builders have no NAME.", get_op_builder=_always(type("Builder", (), {})))
_member("builders.missing", "R12.2", "`create_op_builder` gives None.", create_op_builder=_nothing)
_member("builders.empty", "R12.3", "`load()` gives None.", create_op_builder=_always(_EmptyBuilder()))
_member("builders.known_only", "R12.4", "An unknown name raises.", get_op_builder=_known_only)
_member(
    "builders.no_folder", "R12.5", "`op_builder_dir()` is no package.", op_builder_dir=_always("ds_plugin_sdk.paths")
)
_member(
    "builders.new_class",
    "R12.6",
    "Each call of `get_op_builder` gives a new class.",
    get_op_builder=lambda self, name: type(name, (_sound(self).get_op_builder(name),), {}),
)
_member("builders.no_extension", "R12.7", "`build_extension()` is None.", build_extension=_nothing)
