"""`CUDA_Accelerator`: NVIDIA GPUs as a DeepSpeed device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from ds_plugin_cuda import nvtx
from ds_plugin_sdk import TorchAccelerator
from ds_plugin_sdk.accelerator import installed
from ds_plugin_sdk.settings import settings

_PASCAL, _VOLTA, _AMPERE, _HOPPER = (6, 0), (7, 0), (8, 0), (9, 0)  # compute capabilities


class CUDA_Accelerator(TorchAccelerator):
    """NVIDIA GPUs by ``torch.cuda``. Making one creates no CUDA context: a process can still fork."""

    device_type: ClassVar[str] = "cuda"
    communication_backend: ClassVar[str] = "nccl"
    op_builders: ClassVar[str] = "ds_plugin_cuda.op_builder"
    visible_devices_env: ClassVar[str] = "CUDA_VISIBLE_DEVICES"
    exported_envs: ClassVar[tuple[str, ...]] = ("NCCL_", "TORCH_NCCL_")
    supports_nvtx_domain: ClassVar[bool] = True

    # ------------------------------------------------------------------ data types
    def supported_dtypes(self) -> list[torch.dtype]:
        """float32; bfloat16 where torch has it, which converts each number before Ampere; float16 from Volta on, and on
        Pascal, which is no faster in it, with ``DS_ALLOW_DEPRECATED_FP16=1``. Without a GPU, what current ones have.
        """
        if not self.is_available():
            return [torch.float32, torch.bfloat16, torch.float16]
        capability = torch.cuda.get_device_capability()
        half = capability >= _VOLTA or (capability >= _PASCAL and settings.allow_deprecated_fp16)
        bfloat16 = [torch.bfloat16] if torch.cuda.is_bf16_supported() else []
        return [torch.float32, *bfloat16, *([torch.float16] if half else [])]

    def is_triton_supported(self) -> bool:
        """From Ampere on, where DeepSpeed's Triton kernels were written for, if Triton is installed."""
        return self.is_available() and torch.cuda.get_device_capability() >= _AMPERE and installed("triton")

    def prefer_triton_grouped_mm(self) -> bool:
        """On Ampere and Ada, where torch's grouped product is a loop over the groups; later ones have a kernel."""
        return self.is_triton_supported() and torch.cuda.get_device_capability() < _HOPPER

    # ------------------------------------------------------------------ communication
    def communication_backend_version(self) -> tuple[int, ...]:
        """NCCL's version, such as (2, 27, 3)."""
        version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]  # torch gives it no type
        return version

    # ------------------------------------------------------------------ graphs
    def is_current_stream_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def create_graph(self) -> torch.cuda.CUDAGraph:
        return torch.cuda.CUDAGraph()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> AbstractContextManager[Any]:
        return torch.cuda.graph(graph, pool, stream)

    def replay_graph(self, graph: Any) -> None:
        graph.replay()

    # ------------------------------------------------------------------ memory
    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """As torch gives them; empty before CUDA is used, so that asking makes no context and processes can fork."""
        started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # torch gives it no type
        return super().memory_stats(device_index) if started else {}

    def total_memory(self, device_index: int | None = None) -> int:
        return int(torch.cuda.get_device_properties(self.device(device_index)).total_memory)

    def _get_nvml_gpu_id(self, torch_gpu_id: int) -> int:
        """The number that the driver has for a device of ``CUDA_VISIBLE_DEVICES``. DeepSpeed's profiler asks for it."""
        return torch.cuda._get_nvml_device_index(torch_gpu_id)

    # ------------------------------------------------------------------ profiling
    def range_push(self, msg: str, domain: str | None = None, category: str | None = None) -> int:
        """Open a range in NVTX; Nsight shows each domain apart, and a category as an attribute of its ranges."""
        return nvtx.push(msg, domain, category)

    def range_pop(self, domain: str | None = None) -> int:
        return nvtx.pop(domain)

    # ------------------------------------------------------------------ page-locked host memory
    def register_host_memory(self, address: int, num_bytes: int) -> bool:
        """Let the GPU reach host memory that is locked already; True if that succeeds."""
        _check(_runtime().cudaHostRegister(address, num_bytes, 0))
        return True

    def unregister_host_memory(self, address: int) -> None:
        """Undo `register_host_memory`; raises if that fails, so that the memory is kept."""
        _check(_runtime().cudaHostUnregister(address))


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch gives it no type


def _check(error: Any) -> None:
    torch.cuda.check_error(int(error))
