"""`CPU_Accelerator`: the CPU's cores and memory as a DeepSpeed device."""

from __future__ import annotations

import functools
import warnings
from typing import Any, ClassVar

import torch

from ds_plugin_cpu import collectives, memory, threads, topology
from ds_plugin_sdk.accelerator import DeepSpeedAccelerator
from ds_plugin_sdk.settings import settings

_local_world_size = settings.local_world_size  # looked up once: DeepSpeed asks in each step
_CPU = torch.device("cpu")
_TENSOR_TYPES = {
    torch.bfloat16: torch.BFloat16Tensor,
    torch.uint8: torch.ByteTensor,
    torch.float64: torch.DoubleTensor,
    torch.float32: torch.FloatTensor,
    torch.float16: torch.HalfTensor,
    torch.int32: torch.IntTensor,
    torch.int64: torch.LongTensor,
}


class CPU_Accelerator(DeepSpeedAccelerator):
    """The CPU: synchronous, one device for each NUMA node, memory shared by all of them.

    Creating one configures this process for the CPU: it takes a fair share of the cores among the ranks of
    the machine, and it keeps large blocks of memory for reuse.
    """

    visible_devices_env: ClassVar[str] = "CPU_VISIBLE_DEVICES"
    exported_envs: ClassVar[tuple[str, ...]] = (
        "OMP_",
        "KMP_",
        "GOMP_",
        "LD_PRELOAD",
        "DNNL_",
        "ONEDNN_",
        "CCL_",
    )
    _torch_pins_host_memory: ClassVar[bool] = False

    def __init__(self) -> None:
        self._communication_backend_name, _ = collectives.choose()
        super().__init__()
        collectives.warn_of_ipex()
        if settings.cpu_float16 and not _computes_in_float16():
            _warn_of_float16()
        threads.apply()
        memory.keep_large_blocks()

    # ------------------------------------------------------------------ behaviour flags: no streams, no events
    def is_synchronized_device(self) -> bool:
        return True

    def resolves_data_dependency(self) -> bool:
        return True

    def handles_memory_backpressure(self) -> bool:
        return True

    def use_host_timers(self) -> bool:
        return True

    # ------------------------------------------------------------------ device
    def device_name(self, device_index: int | None = None) -> str:
        """``cpu``: torch has one CPU device, whatever the index."""
        return "cpu"

    def device(self, device_index: int | None = None) -> torch.device:
        """The CPU, whatever is given: torch has one. A device of another kind is no error here."""
        return _CPU

    def device_count(self) -> int:
        return _local_world_size() or topology.device_count()

    def is_available(self) -> bool:
        """Always: there is a CPU."""
        return True

    def current_device(self) -> torch.device:
        """The CPU as torch has it, which takes no number for it as a device."""
        return _CPU

    def current_device_name(self) -> str:
        return "cpu"

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu

    def set_device(self, device_index: int) -> None:
        """Nothing to do: a rank runs where its launcher put it."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing to wait for."""

    # ------------------------------------------------------------------ random numbers
    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def initial_seed(self, seed: int | None = None) -> int:
        return torch.initial_seed()

    def default_generator(self, device_index: Any) -> torch.Generator:
        return torch.default_generator

    # ------------------------------------------------------------------ memory
    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Resident memory of this process; all of it counts as allocated, since torch's CPU allocator keeps no book."""
        current, peak = memory.resident_and_peak()
        return {
            "allocated_bytes.all.current": current,
            "allocated_bytes.all.peak": peak,
            "reserved_bytes.all.current": current,
            "reserved_bytes.all.peak": peak,
        }

    def memory_allocated(self, device_index: int | None = None) -> int:
        return memory.resident()

    def memory_reserved(self, device_index: int | None = None) -> int:
        return memory.resident()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        memory.reset_peak()

    def total_memory(self, device_index: int | None = None) -> int:
        return memory.total()

    def available_memory(self, device_index: int | None = None) -> int:
        return memory.available()

    def empty_cache(self) -> None:
        memory.release()

    # ------------------------------------------------------------------ data types
    def supported_dtypes(self) -> list[torch.dtype]:
        """float32, bfloat16 (every op of torch has it on a CPU), and float16 where `is_fp16_supported`."""
        return [torch.float32, torch.bfloat16, *([torch.float16] if self.is_fp16_supported() else [])]

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        """Where oneDNN computes in it, and where the user wants it nevertheless."""
        return _computes_in_float16() or settings.cpu_float16

    def _tensor_type(self, dtype: torch.dtype) -> Any:
        return _TENSOR_TYPES[dtype]

    # ------------------------------------------------------------------ communication and compilation
    def communication_backend_name(self) -> str:
        """``ccl`` where oneCCL was a backend of torch's when this accelerator was made, else ``gloo``."""
        return self._communication_backend_name

    def is_triton_supported(self) -> bool:
        return False

    # ------------------------------------------------------------------ page-locked memory: all memory is the host's
    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        return tensor.new_empty(tuple(shape))

    def _torch_is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()


def _computes_in_float16() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


@functools.cache
def _warn_of_float16() -> None:
    warnings.warn(
        "ds-plugin-cpu: this CPU does not compute in float16; DS_PLUGIN_CPU_FLOAT16=1 offers it nevertheless, to try a "
        "configuration: a step of a small GPT took nine times as long as in float32, on a CPU with AVX2",
        RuntimeWarning,
        stacklevel=3,
    )
