"""The simulated runtime: its sources, its settings, and the delay that makes a missing wait show."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ds_plugin_sdk import privateuse1
from ds_plugin_sdk.errors import InvalidAcceleratorError
from ds_plugin_sdk.settings import settings

if TYPE_CHECKING:
    from ds_plugin_sdk.privateuse1.device_module import DeviceModule


def sources_dir() -> Path:
    """Folder of the simulated runtime's sources, from which a vendor's own starts."""
    return Path(__file__).parent.resolve() / "csrc"


class SimulatedRuntime(privateuse1.RuntimeBuilder):
    """Builds the simulated runtime.

    Args:
        devices: how many to simulate; None: ``DS_SIMULATOR_DEVICES``.
        memory_mb: MiB of each simulated device; None: ``DS_SIMULATOR_MEMORY_MB``.
    """

    def __init__(self, devices: int | None = None, memory_mb: int | None = None) -> None:
        super().__init__()
        self._devices, self._memory_mb = devices, memory_mb

    def sources(self) -> list[str]:
        return [str(path) for path in sorted(sources_dir().glob("*.cpp"))]

    def configure(self, library: ctypes.CDLL) -> None:
        configure(library, self._devices, self._memory_mb)


def install(
    name: str, devices: int | None = None, *, memory_mb: int | None = None, collectives: str | None = None
) -> DeviceModule:
    """Make a simulated device of this name: `privateuse1.install` with a `SimulatedRuntime`, and its errors."""
    return privateuse1.install(name, runtime=SimulatedRuntime(devices, memory_mb), collectives=collectives)


def configure(library: ctypes.CDLL, devices: int | None = None, memory_mb: int | None = None) -> None:
    """Tell a runtime made of the simulated one's sources what to simulate; None: as the settings say.

    Each setting is a function of one source file. Where a vendor has replaced the file, the setting has no effect.

    Raises:
        InvalidAcceleratorError: ``DS_SIMULATOR_DELAY_US`` is set, and the runtime cannot delay work.
    """
    set_devices = getattr(library, "simulator_set_devices", None)
    if set_devices is not None:
        set_devices.argtypes, set_devices.restype = [ctypes.c_int], None
        set_devices(settings.simulator_devices if devices is None else devices)
    set_memory = getattr(library, "simulator_set_memory", None)
    if set_memory is not None:
        set_memory.argtypes, set_memory.restype = [ctypes.c_size_t], None
        set_memory((settings.simulator_memory_mb if memory_mb is None else memory_mb) << 20)
    if settings.simulator_delay_us:
        _set_delay(library, settings.simulator_delay_us)


@contextlib.contextmanager
def delay(microseconds: int) -> Iterator[None]:
    """Within it, each piece of work begins so much later than its stream could, on all streams.

    A missing wait then shows as a wrong result each time. ``DS_SIMULATOR_DELAY_US`` does the same for a whole run.

    Raises:
        InvalidAcceleratorError: no device is installed, or its runtime cannot delay work.
    """
    library = privateuse1.runtime_library()
    _set_delay(library, microseconds)
    try:
        yield
    finally:
        _set_delay(library, settings.simulator_delay_us)


def _set_delay(library: ctypes.CDLL | None, microseconds: int) -> None:
    set_delay = getattr(library, "runtime_set_delay", None)
    if set_delay is None:
        raise InvalidAcceleratorError(
            "work cannot be delayed",
            plugin=privateuse1.installed_name(),
            why="no device is installed, or its runtime lacks runtime_set_delay()",
            hint="call simulator.install() first; unset DS_SIMULATOR_DELAY_US on hardware",
        )
    set_delay.argtypes, set_delay.restype = [ctypes.c_int64], None
    set_delay(microseconds)
