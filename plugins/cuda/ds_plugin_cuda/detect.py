"""Whether this process can use a GPU, asked so that it can still fork afterwards."""

from __future__ import annotations

import ctypes
import subprocess
import sys

from ds_plugin_sdk import Probe, nvml
from ds_plugin_sdk.settings import settings

_ANSWER_SECONDS = 60


def probe() -> Probe:
    """Driver, visible GPUs, and a torch that was built for them; the first that is missing is the reason."""
    try:
        driver = nvml.ask()
    except nvml.NvmlError as error:
        if error.absent and (seen := _seen_by_cuda()) is not None:
            return judge(seen, None, torch_cuda())
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
cuda, number, name = ctypes.CDLL(sys.argv[1]), ctypes.c_int(), ctypes.create_string_buffer(96)
def ask(function, *arguments):
    assert getattr(cuda, function)(*arguments) == 0, function
    return number.value
ask("cuInit", 0)
print(ask("cuDriverGetVersion", ctypes.byref(number)))
for index in range(ask("cuDeviceGetCount", ctypes.byref(number))):
    ask("cuDeviceGetName", name, 96, index)
    print(name.value.decode())
"""


def _seen_by_cuda() -> nvml.Driver | None:
    """What CUDA's driver says where there is no NVML: the GPUs that this process sees. None if there are none."""
    try:
        ctypes.CDLL(_CUDA)
        command = [sys.executable, "-c", _ASKS_CUDA, _CUDA]
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    version, *names = asked.stdout.splitlines()
    cuda = int(version) // 1000, int(version) % 1000 // 10
    gpus = tuple(nvml.Gpu(name, f"GPU-{index}", (0, 0)) for index, name in enumerate(names))
    return nvml.Driver(f"of CUDA {_text(cuda)}, without NVML", cuda, gpus) if gpus else None


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
