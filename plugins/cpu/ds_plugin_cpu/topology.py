"""Cores, NUMA nodes and ranks of this machine, read from the kernel's own files."""

from __future__ import annotations

import math
import os
from pathlib import Path

from ds_plugin_cpu import control_groups
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


def device_count(folder: Path = _NODES) -> int:
    """Ranks that belong on this machine: those the launcher started, else one a NUMA node."""
    return settings.local_world_size() or len(numa_nodes(folder))


def job_cores(groups: Path = control_groups.GROUPS, member: Path = control_groups.OWN) -> int:
    """Cores of all ranks here together: those of this process's control group, or of the machine.

    Schedulers and containers confine a whole job to a control group; what binds one rank leaves the group as it is. A
    quota of CPU time counts as the cores that use it up, rounded up: a group above its quota is halted as a whole.
    """
    sets = (
        control_groups.read(group / name)
        for group in control_groups.own("cpuset", groups, member)
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus")
    )
    cores = len(parse_core_list(next(filter(None, sets), ""))) or os.cpu_count() or 1
    quotas = map(_quota, control_groups.own("cpu", groups, member))
    return min([cores, *(math.ceil(quota) for quota in quotas if quota)])


def _quota(group: Path) -> float:
    """CPU time that a control group may take in a second, in seconds; 0 without a limit."""
    read = control_groups.read
    text = read(group / "cpu.max") or f"{read(group / 'cpu.cfs_quota_us')} {read(group / 'cpu.cfs_period_us')}"
    quota, _, period = text.strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() else 0.0  # "max", -1, or no such file


def fair_threads() -> int:
    """Threads for this rank so that all ranks here together fill their cores once; never more than its own cores.

    A rank that a launcher bound to cores of its own uses them all, and ranks that share cores divide them.
    """
    return min(len(usable_cores()), max(1, job_cores() // (settings.local_world_size() or 1)))
