"""Whether this process can use a GPU, asked so that it can still fork afterwards."""

from __future__ import annotations

from ds_plugin_sdk import Probe, nvml
from ds_plugin_sdk.settings import settings


def probe() -> Probe:
    """Driver, visible GPUs, and a torch that was built for them; the first that is missing is the reason."""
    try:
        driver = nvml.ask()
    except nvml.NvmlError as error:
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
    count = nvml.visible(driver.gpus, visible_devices)
    if count == 0:
        return Probe.absent(f"CUDA_VISIBLE_DEVICES={visible_devices!r} hides all of {len(driver.gpus)} GPUs")
    if cuda is None:
        return Probe.absent("the installed torch was built without CUDA: install one of pytorch.org's CUDA builds")
    if driver.cuda[0] < cuda[0]:
        return Probe.broken(
            f"torch was built for CUDA {_text(cuda)}, and the NVIDIA driver {driver.version} runs CUDA up to "
            f"{_text(driver.cuda)}: update the driver, or install a torch for CUDA {driver.cuda[0]}"
        )
    return Probe.available(devices=count, detail=f"{driver.gpus[0].name}, driver {driver.version}")


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
