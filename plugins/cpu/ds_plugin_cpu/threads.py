"""How many threads a rank computes with."""

from __future__ import annotations

import torch

from ds_plugin_cpu.topology import fair_threads
from ds_plugin_sdk.settings import settings


def choose() -> tuple[int, str]:
    """Threads for this rank, and who said so."""
    if settings.cpu_threads is not None:
        return settings.cpu_threads, "DS_PLUGIN_CPU_THREADS"
    if settings.omp_threads is not None:
        return torch.get_num_threads(), "OMP_NUM_THREADS"
    return fair_threads(), "a fair share of the cores"


def apply() -> None:
    """Set torch's threads as `choose` says, unless they are so already."""
    count, _ = choose()
    if count != torch.get_num_threads():
        torch.set_num_threads(count)
