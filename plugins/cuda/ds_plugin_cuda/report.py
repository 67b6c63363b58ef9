"""What `sdk report` says about NVIDIA's GPUs. It asks NVML alone, and so creates no CUDA context."""

from __future__ import annotations

from collections.abc import Iterable

from ds_plugin_cuda.detect import torch_cuda
from ds_plugin_sdk import nvml
from ds_plugin_sdk.errors import ToolchainError
from ds_plugin_sdk.jit import CudaToolchain


def lines() -> Iterable[tuple[str, str]]:
    """Driver, GPUs, torch's CUDA, the compiler."""
    try:
        driver = nvml.ask()
        yield "driver", f"{driver.version}, runs CUDA up to {driver.cuda[0]}.{driver.cuda[1]}"
        for index, gpu in enumerate(driver.gpus):
            yield f"GPU {index}", f"{gpu.name}, compute capability {gpu.capability[0]}.{gpu.capability[1]}"
    except nvml.NvmlError as error:
        yield "driver", str(error)
    cuda = torch_cuda()
    yield "torch's CUDA", "none" if cuda is None else f"{cuda[0]}.{cuda[1]}"
    try:
        nvcc = CudaToolchain().nvcc()
        yield "nvcc", f"{nvcc.version} ({nvcc.path})"
    except ToolchainError as error:
        yield "nvcc", error.why
