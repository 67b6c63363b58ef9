"""Cores, NUMA nodes and ranks of this machine, read from the kernel's own files."""

from __future__ import annotations

import os
from pathlib import Path

from ds_plugin_sdk.settings import settings

_NODES = Path("/sys/devices/system/node")


def usable_cores() -> frozenset[int]:
    """Cores that this process may run on: numactl, taskset, containers and schedulers restrict them."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def parse_core_list(text: str) -> frozenset[int]:
    """Cores of the kernel's notation ``0-3,8,10-11``; empty text gives none."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def numa_nodes(folder: Path = _NODES) -> list[frozenset[int]]:
    """Usable cores of each NUMA node that has any; nodes of memory alone (HBM in flat mode) do not count."""
    usable = usable_cores()
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name[4:]))
    nodes = [parse_core_list(file.read_text(encoding="ascii")) & usable for file in lists]
    return [node for node in nodes if node] or [usable]


def device_count() -> int:
    """Ranks that belong on this machine: those the launcher started, else one a NUMA node."""
    return settings.local_world_size() or len(numa_nodes())


def fair_threads() -> int:
    """Threads for this rank so that all ranks of the machine together fill its cores once.

    A launcher that binds each rank to cores of its own leaves masks which together are no larger than the machine;
    such a mask is this rank's already, and is used whole.
    """
    cores, ranks = len(usable_cores()), settings.local_world_size() or 1
    bound = cores * ranks <= (os.cpu_count() or 1)
    return cores if bound else max(1, cores // ranks)
