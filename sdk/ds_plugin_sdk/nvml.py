"""NVIDIA's GPUs as the driver's management library (NVML) lists them.

NVML creates no CUDA context, so a process that has asked it can still fork, and it is there wherever the driver is.
Called through ctypes: no package is needed. Nothing happens at import.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_LIBRARY = "libnvidia-ml.so.1"
# Where containers and WSL have the driver's libraries, if the loader does not know.
_PLACES = ("/usr/local/nvidia/lib64/", "/usr/lib/wsl/lib/")
_NAME_BYTES = 96
_NO_PERMISSION, _DRIVER_NOT_LOADED, _GPU_IS_LOST = 4, 9, 15


class NvmlError(Exception):
    """NVML cannot be asked. `absent`: because there is no driver, rather than a driver that does not work."""

    def __init__(self, message: str, absent: bool, code: int = 0) -> None:
        super().__init__(message)
        self.absent, self.code = absent, code


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine.

    Attributes:
        name: such as ``NVIDIA H200``.
        uuid: such as ``GPU-8d6f...``.
        capability: CUDA compute capability, such as (9, 0).
    """

    name: str
    uuid: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Driver:
    """What the driver says.

    Attributes:
        version: such as ``580.95.05``.
        cuda: the newest CUDA it runs, such as (13, 0).
        gpus: all GPUs of this machine, hidden ones too, but for those that CUDA has not either: a container was not
            given them, or they have fallen off the bus.
    """

    version: str
    cuda: tuple[int, int]
    gpus: tuple[Gpu, ...]


def ask(library: str = _LIBRARY) -> Driver:
    """The driver's answers.

    Args:
        library: another library that answers like NVML, for tests.

    Raises:
        NvmlError: there is no driver, or it does not answer.
    """
    nvml = _load(library)
    _call(nvml, "nvmlInit_v2")
    try:
        count, cuda = ctypes.c_uint(), ctypes.c_int()
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        _call(nvml, "nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(cuda))
        version = _text(nvml, "nvmlSystemGetDriverVersion")
        gpus = (_gpu(nvml, index) for index in range(count.value))
        return Driver(version, (cuda.value // 1000, cuda.value % 1000 // 10), tuple(filter(None, gpus)))
    finally:
        nvml.nvmlShutdown()


def visible(gpus: Sequence[Gpu], variable: str | None) -> tuple[Gpu, ...]:
    """The GPUs that a process sees under ``CUDA_VISIBLE_DEVICES``, by CUDA's rules.

    Args:
        gpus: all GPUs of the machine.
        variable: the variable's text; None if it is unset. Entries begin with a number, or are (beginnings of) UUIDs;
            what follows a wrong entry is hidden too. A MIG instance counts as a device, and nothing follows it.
    """
    if variable is None:
        return tuple(gpus)
    seen: list[Gpu] = []
    for entry in (word.strip() for word in variable.split(",")):
        if entry.startswith("MIG-") and gpus:
            return (*seen, replace(_parent(gpus, entry), uuid=entry))
        gpu = _gpu_of(gpus, entry)
        if gpu is None:
            break
        if gpu in seen:  # CUDA then shows no device at all
            return ()
        seen.append(gpu)
    return tuple(seen)


def _gpu_of(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if number := re.match(r"[+-]?\d+", entry):  # "1gpu" is 1, as strtol reads it
        return gpus[int(number[0])] if 0 <= int(number[0]) < len(gpus) else None
    matching = [gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _parent(gpus: Sequence[Gpu], entry: str) -> Gpu:
    """The GPU of a MIG instance, which only the older form of names says: else the first that has such instances."""
    named = (gpu for gpu in gpus if gpu.uuid in entry)
    return next(named, next((gpu for gpu in gpus if gpu.capability >= (8, 0)), gpus[0]))


def _load(library: str) -> ctypes.CDLL:
    for place in ("", *_PLACES):
        try:
            return ctypes.CDLL(place + library)
        except OSError:
            continue
    raise NvmlError(f"{library} is not there: no NVIDIA driver is installed", absent=True)


def _gpu(nvml: ctypes.CDLL, index: int) -> Gpu | None:
    """None for one that this process may not use, or that does not answer any more."""
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    try:
        _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        _call(nvml, "nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
        name, uuid = _text(nvml, "nvmlDeviceGetName", handle), _text(nvml, "nvmlDeviceGetUUID", handle)
    except NvmlError as error:
        if error.code in (_NO_PERMISSION, _GPU_IS_LOST):
            return None
        raise
    return Gpu(name, uuid, (major.value, minor.value))


def _text(nvml: ctypes.CDLL, function: str, *args: object) -> str:
    buffer = ctypes.create_string_buffer(_NAME_BYTES)
    _call(nvml, function, *args, buffer, ctypes.c_uint(_NAME_BYTES))
    return buffer.value.decode()


def _call(nvml: ctypes.CDLL, function: str, *args: object) -> None:
    code = int(getattr(nvml, function)(*args))
    if code:
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        text = nvml.nvmlErrorString(code)
        message = f"{function} says: {text.decode() if text else f'error {code}'}"
        raise NvmlError(message, absent=code == _DRIVER_NOT_LOADED, code=code)
