"""The host as a device of its own: what a target's runs of DeepSpeed are compared with.

Its ops are the SDK's for CPU tensors, whatever else is installed.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from ds_plugin_sdk.accelerator import DeepSpeedAccelerator
from ds_plugin_sdk.settings import settings


class Host(DeepSpeedAccelerator):
    """The CPU: synchronous, with as many devices as anybody asks for."""

    _torch_pins_host_memory = False

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return settings.local_rank

    def set_device(self, device_index: int) -> None:
        """Nothing to do."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing to wait for."""

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.default_generator

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return {}

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """There is no statistic."""

    def total_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def available_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def empty_cache(self) -> None:
        """Nothing is cached."""

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_triton_supported(self) -> bool:
        return False

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape: Any) -> torch.Tensor:
        return tensor.new_empty(tuple(shape))

    def _torch_is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned()
