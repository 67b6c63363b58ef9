"""Whether this process can use a GPU, asked so that it can still fork afterwards."""

from __future__ import annotations

import ctypes
import subprocess
import sys

from ds_plugin_sdk import Probe, nvml
from ds_plugin_sdk.settings import settings


def probe() -> Probe:
    """Driver, visible GPUs, and a torch that was built for them; the first that is missing is the reason."""
    try:
        driver = nvml.ask()
    except nvml.NvmlError as error:
        if error.absent and (probe := _by_cuda()) is not None:
            return probe
        return Probe.absent(str(error)) if error.absent else Probe.broken(f"the NVIDIA driver does not work: {error}")
    return judge(driver, settings.cuda_visible_devices, torch_cuda())


def judge(driver: nvml.Driver, visible_devices: str | None, cuda: tuple[int, int] | None) -> Probe:
    """The probe's answer.

    Args:
        driver: what NVML says.
        visible_devices: ``CUDA_VISIBLE_DEVICES``.
        cuda: the CUDA release that torch was built for, or None if it was built for none.
    """
    if not driver.gpus:
        return Probe.absent(f"the NVIDIA driver {driver.version} finds no GPU")
    visible = nvml.visible(driver.gpus, visible_devices)
    if not visible:
        return Probe.absent(f"CUDA_VISIBLE_DEVICES={visible_devices!r} hides all of {len(driver.gpus)} GPUs")
    if cuda is None:
        return Probe.absent("the installed torch was built without CUDA: install one of pytorch.org's CUDA builds")
    if driver.cuda[0] < cuda[0]:
        return Probe.broken(
            f"torch was built for CUDA {_text(cuda)}, and the NVIDIA driver {driver.version} runs CUDA up to "
            f"{_text(driver.cuda)}: update the driver, or install a torch for CUDA {driver.cuda[0]}"
        )
    return Probe.available(devices=len(visible), detail=f"{visible[0].name}, driver {driver.version}")


# Containers may have CUDA's driver and not NVML, as Jetson boards do. CUDA is asked in another process: one that has
# asked it cannot fork.
_CUDA = "libcuda.so.1"
_ASKS_CUDA = """
import ctypes, sys
cuda, count, name = ctypes.CDLL(sys.argv[1]), ctypes.c_int(), ctypes.create_string_buffer(96)
assert cuda.cuInit(0) == cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 < count.value
cuda.cuDeviceGetName(name, 96, 0)
print(count.value, name.value.decode())
"""


def _by_cuda() -> Probe | None:
    """What CUDA's driver says, where there is one and no NVML; None if it shows no GPU."""
    try:
        ctypes.CDLL(_CUDA)
        asked = subprocess.run(
            [sys.executable, "-c", _ASKS_CUDA, _CUDA], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    count, _, name = asked.stdout.strip().partition(" ")
    if torch_cuda() is None:
        return None
    return Probe.available(devices=int(count), detail=f"{name}, without NVML")


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA release that the installed torch was built for, without importing it; None if there is none."""
    from ds_plugin_sdk.errors import ToolchainError
    from ds_plugin_sdk.jit import machine

    try:
        return machine.find_torch().cuda_release
    except ToolchainError:
        return None


def _text(release: tuple[int, int]) -> str:
    return f"{release[0]}.{release[1]}"
