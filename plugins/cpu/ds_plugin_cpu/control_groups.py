"""Control groups of this process, by which schedulers and containers confine a job: cgroups(7), both versions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


def own(controller: str, groups: Path = GROUPS, member: Path = OWN) -> Iterator[Path]:
    """Folders of this process's control group and of those around it, where a controller's files may be."""
    for line in read(member).splitlines():
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


def read(file: Path) -> str:
    """A file of the kernel's; empty where there is none."""
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""
