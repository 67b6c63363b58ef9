"""Cores, NUMA nodes and ranks of this machine, read from the kernel's own files."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from ds_plugin_sdk.settings import settings

_NODES = Path("/sys/devices/system/node")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


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


def job_cores(groups: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> int:
    """Cores of all ranks here together: those of this process's control group, or of the machine.

    Schedulers and containers confine a whole job to a control group; what binds one rank leaves the group as it is. A
    quota of CPU time counts as the cores that use it up, rounded up: a group above its quota is halted as a whole.
    """
    sets = (
        _read(group / name)
        for group in _own_groups("cpuset", groups, own)
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus")
    )
    cores = len(parse_core_list(next(filter(None, sets), ""))) or os.cpu_count() or 1
    return min([cores, *(math.ceil(quota) for quota in map(_quota, _own_groups("cpu", groups, own)) if quota)])


def _own_groups(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """Folders of this process's control group and of those around it, where a controller's files may be."""
    for line in _read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # the second version, which has one tree for all controllers
            tree = groups
        elif controller in controllers.split(","):
            tree = groups / controllers
        else:
            continue
        # In a container the path may be the host's: then the tree's root is the container's group.
        group = tree / path.lstrip("/")
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(tree))


def _quota(group: Path) -> float:
    """CPU time that a control group may take in a second, in seconds; 0 without a limit."""
    text = _read(group / "cpu.max") or f"{_read(group / 'cpu.cfs_quota_us')} {_read(group / 'cpu.cfs_period_us')}"
    quota, _, period = text.strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() else 0.0  # "max", -1, or no such file


def _read(file: Path) -> str:
    """A file of the kernel's; empty where there is none."""
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


def fair_threads() -> int:
    """Threads for this rank so that all ranks here together fill their cores once; never more than its own cores.

    A rank that a launcher bound to cores of its own uses them all, and ranks that share cores divide them.
    """
    return min(len(usable_cores()), max(1, job_cores() // (settings.local_world_size() or 1)))
