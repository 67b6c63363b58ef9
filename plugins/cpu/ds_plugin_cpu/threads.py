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
    # Fewer than a share was somebody's choice: torch.set_num_threads, MKL_NUM_THREADS, a DataLoader's in its workers.
    share, now = fair_threads(), torch.get_num_threads()
    return (share, "a fair share of the cores") if share <= now else (now, "torch, with fewer than a fair share")


def apply() -> None:
    """Set torch's threads as `choose` says, unless they are so already."""
    count, _ = choose()
    if count != torch.get_num_threads():
        torch.set_num_threads(count)
