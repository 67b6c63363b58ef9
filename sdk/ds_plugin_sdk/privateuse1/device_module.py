"""``torch.<name>``: the functions that torch, and programs written for ``torch.cuda``, expect of a device's module."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

import torch

# A device as torch's functions take it: an index, "zap:1", torch.device("zap", 1); None and "zap" mean the current one.
DeviceLike = int | str | torch.device | None

_PRIVATEUSE1 = int(torch._C._autograd.DeviceType.PrivateUse1)  # type: ignore[call-overload]  # pybind11's enum is an int to Python alone


class StreamContext:
    """Makes a stream current, and its device; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self._before: list[tuple[int, torch.Stream]] = []  # the device, and the stream on that of `stream`

    # Not by the stream's own __enter__, which keeps this in the stream, for all threads and contexts, and leaves the
    # device alone where the stream is current on its own.
    def __enter__(self) -> torch.Stream | None:
        if self.stream is not None:
            accelerator = torch.accelerator
            current = accelerator.current_stream(self.stream.device_index)
            self._before.append((accelerator.current_device_index(), current))
            accelerator.set_stream(self.stream)
        return self.stream

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            device, stream = self._before.pop()
            torch.accelerator.set_stream(stream)
            torch.accelerator.set_device_index(device)


class DeviceModule(ModuleType):
    """The module, as a class, because it is made for a name. Nearly all of it is `torch.accelerator`.

    Args:
        name: torch's name of the device.
        forked: tells whether this process is a fork that cannot use the device, given the id of that which started it.
    """

    StreamContext = StreamContext
    stream = StreamContext

    def __init__(self, name: str, forked: Callable[[int], bool]) -> None:
        super().__init__(f"torch.{name}", f"Device '{name}'.")
        self.device_type = name
        self.device = self._device_context()
        self._pid = os.getpid()
        self._forked = forked
        # Threads of streams must not outlive what they work on.
        atexit.register(self._finish)

    def _index(self, device: DeviceLike = None) -> int:
        if isinstance(device, (str, torch.device)):
            device = torch.device(device).index
        return torch.accelerator.current_device_index() if device is None or device < 0 else device

    def _finish(self) -> None:
        for index in range(self.device_count()):
            with contextlib.suppress(RuntimeError):  # reported already, or nobody is left to report to
                self.synchronize(index)

    # ------------------------------------------------------------------ devices
    def is_available(self) -> bool:
        """Whether this process sees a device."""
        return self.device_count() > 0

    def device_count(self) -> int:
        """How many devices this process sees."""
        # torch.accelerator.device_count() would ask this very function.
        return torch._C._accelerator_hooks_device_count()

    def current_device(self) -> int:
        """The number of the current device."""
        return torch.accelerator.current_device_index()

    def set_device(self, device: DeviceLike) -> None:
        """Make a device current."""
        torch.accelerator.set_device_index(self._index(device))

    def synchronize(self, device: DeviceLike = None) -> None:
        """Wait for all work of a device; raise what went wrong in it."""
        torch.accelerator.synchronize(self._index(device))

    def get_device_name(self, device: DeviceLike = None) -> str:
        """The device type's name, with the device's number."""
        return f"{self.device_type} ({self._index(device)})"

    def get_device_properties(self, device: DeviceLike = None) -> SimpleNamespace:
        """`name`, and `total_memory` in bytes."""
        return SimpleNamespace(name=self.get_device_name(device), total_memory=self.mem_get_info(device)[1])

    def get_device_capability(self, device: DeviceLike = None) -> dict[str, Any]:
        """What `torch.accelerator.get_device_capability` says of it."""
        return torch.accelerator.get_device_capability(self._index(device))

    def _device_context(self) -> type[torch.accelerator.device_index]:
        index = self._index

        class device(torch.accelerator.device_index):
            """``with torch.<name>.device(1):`` makes a device current."""

            def __init__(self, device: DeviceLike) -> None:
                super().__init__(index(device))

        return device

    # ------------------------------------------------------------------ start and fork
    def init(self) -> None:
        """There is nothing to start: `install` did."""

    _lazy_init = init
    _initialized = True  # read by torch.utils.checkpoint, which otherwise leaves the device's random numbers alone

    def is_initialized(self) -> bool:
        """True: `install` has started the device."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return self._forked(self._pid)

    def _lazy_call(self, function: Callable[[], Any]) -> None:
        function()

    # ------------------------------------------------------------------ streams and events
    # Functions and not classes: torch.Event.wait() and elapsed_time() take objects of exactly torch's types.
    def Stream(self, device: DeviceLike = None, priority: int = 0, **identity: int) -> torch.Stream:
        """A new stream of a device; of one that exists, given the ids that make its identity, the same stream."""
        if identity:
            return torch.Stream(**identity)
        return torch.Stream(device=torch.device(self.device_type, self._index(device)), priority=priority)

    def Event(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
        """A new event of the device. `interprocess` is not supported, and has no effect."""
        return torch.Event(torch.device(self.device_type), enable_timing=enable_timing, blocking=blocking)

    def current_stream(self, device: DeviceLike = None) -> torch.Stream:
        """The stream that work of this thread goes to."""
        return torch.accelerator.current_stream(self._index(device))

    def default_stream(self, device: DeviceLike = None) -> torch.Stream:
        """The stream that is current where no other was set."""
        return torch.Stream(stream_id=0, device_index=self._index(device), device_type=_PRIVATEUSE1)

    def set_stream(self, stream: torch.Stream) -> None:
        """Make a stream current, and its device."""
        torch.accelerator.set_stream(stream)

    # ------------------------------------------------------------------ random numbers
    def _generator(self, device: DeviceLike = None) -> torch.Generator:
        generator: torch.Generator = torch.ops.ds_device.default_generator(self._index(device))
        return generator

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        """The generator of each device."""
        return tuple(self._generator(index) for index in range(self.device_count()))

    def manual_seed(self, seed: int) -> None:
        """Seed the current device's generator."""
        self._generator().manual_seed(int(seed))

    def manual_seed_all(self, seed: int) -> None:
        """Seed the generators of all devices."""
        for generator in self.default_generators:
            generator.manual_seed(int(seed))

    def seed(self) -> int:
        """Seed the current device's generator with a random number, which is returned."""
        return self._generator().seed()

    def seed_all(self) -> None:
        """Seed the generators of all devices with one random number."""
        self.manual_seed_all(self.seed())

    def initial_seed(self) -> int:
        """The seed of the current device's generator."""
        return self._generator().initial_seed()

    def get_rng_state(self, device: DeviceLike = None) -> torch.Tensor:
        """The state of a device's generator, uint8 on the host."""
        return self._generator(device).get_state()

    def set_rng_state(self, new_state: torch.Tensor, device: DeviceLike = None) -> None:
        """Set the state of a device's generator."""
        self._generator(device).set_state(new_state.cpu())

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """The states of the generators of all devices."""
        return [generator.get_state() for generator in self.default_generators]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        """Set the states of the generators of all devices."""
        for index, state in enumerate(new_states):
            self.set_rng_state(state, index)

    # ------------------------------------------------------------------ memory
    def empty_cache(self) -> None:
        """Give back the memory that the caching allocator keeps and nobody uses."""
        torch.accelerator.empty_cache()

    def memory_stats(self, device: DeviceLike = None) -> dict[str, Any]:
        """The caching allocator's statistics, by names as in `torch.cuda.memory_stats`."""
        return torch.accelerator.memory_stats(self._index(device))

    def memory_allocated(self, device: DeviceLike = None) -> int:
        """Bytes of a device that tensors have."""
        return torch.accelerator.memory_allocated(self._index(device))

    def max_memory_allocated(self, device: DeviceLike = None) -> int:
        """The most of these since `reset_peak_memory_stats`."""
        return torch.accelerator.max_memory_allocated(self._index(device))

    def memory_reserved(self, device: DeviceLike = None) -> int:
        """Bytes of a device that the caching allocator has."""
        return torch.accelerator.memory_reserved(self._index(device))

    def max_memory_reserved(self, device: DeviceLike = None) -> int:
        """The most of these since `reset_peak_memory_stats`."""
        return torch.accelerator.max_memory_reserved(self._index(device))

    def reset_peak_memory_stats(self, device: DeviceLike = None) -> None:
        """Begin to count the largest numbers anew."""
        torch.accelerator.reset_peak_memory_stats(self._index(device))

    def reset_accumulated_memory_stats(self, device: DeviceLike = None) -> None:
        """Begin to count allocations anew."""
        torch.accelerator.reset_accumulated_memory_stats(self._index(device))

    def mem_get_info(self, device: DeviceLike = None) -> tuple[int, int]:
        """Free and all bytes of a device."""
        return torch.accelerator.get_memory_info(self._index(device))

    # ------------------------------------------------------------------ autocast
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """The dtypes of `torch.autocast`."""
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        """True; in which types a device trains, the accelerator says by `supported_dtypes`."""
        return True
