"""Host memory as a device's memory: statistics in bytes, and an allocator that keeps large blocks, on huge pages.

Large tensors come from fresh pages of the operating system and go back to it when freed, so that a memory-bound op
spends most of its time in page faults: measured on 2 cores, layer norm with residual of a 4096 x 4096 float32 tensor
takes 40 ms, and 7 ms when glibc keeps the freed block. So glibc is configured to keep blocks, up to a bound, and torch
to ask for huge pages, of which a stream crosses fewer.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ds_plugin_cpu import control_groups
from ds_plugin_sdk import large_pages
from ds_plugin_sdk.settings import export, settings

# Parameters of glibc's mallopt(), from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4

# mallopt takes an int: what is kept at the top of the heap stays below 2 GiB, and below a quarter of the memory.
_LARGEST_KEPT = 2**31 - 1

# c10/core/impl/alloc_cpu.cpp: tensors of 2 MiB and more.
_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
_HUGE_PAGES_OF_KERNEL = Path("/sys/kernel/mm/transparent_hugepage")

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MEMINFO = Path("/proc/meminfo")

# A control group's limit, what it uses, and its field of inactive pages of files, in the two versions.
_NAMES_OF_CGROUPS = (
    ("memory.max", "memory.current", b"inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", b"total_inactive_file"),
)


def _read(file: Path) -> bytes:
    """A small file of the kernel's, without what `open` does for large ones; empty where there is none."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, 1 << 14)
    finally:
        os.close(descriptor)


def _kilobytes(text: bytes, field: bytes) -> int:
    """Bytes of a ``Field:  123 kB`` line; 0 where the kernel has no such line."""
    _, found, rest = text.partition(b"\n" + field + b":")
    return int(rest.split(None, 1)[0]) * 1024 if found else 0


def resident() -> int:
    """Bytes of this process that are in memory."""
    return _kilobytes(_read(_STATUS), b"VmRSS")


def peak() -> int:
    """Largest `resident` since the process started, or since `reset_peak`."""
    return _kilobytes(_read(_STATUS), b"VmHWM")


def resident_and_peak() -> tuple[int, int]:
    """`resident` and `peak` of one moment."""
    status = _read(_STATUS)
    return _kilobytes(status, b"VmRSS"), _kilobytes(status, b"VmHWM")


def reset_peak() -> None:
    """Reset `peak` to `resident`. Kernels that do not allow it keep the old peak."""
    try:
        _CLEAR_REFS.write_text("5", encoding="ascii")  # 5 resets the peak: proc(5), /proc/pid/clear_refs
    except OSError:
        return


def total(groups: Path = control_groups.GROUPS, member: Path = control_groups.OWN) -> int:
    """Memory of the machine, or of the container or the scheduler's job that this process lives in."""
    machine = _kilobytes(b"\n" + _read(_MEMINFO), b"MemTotal")
    return min([machine, *(limit for limit, _ in _limits(groups, member))])


def available(groups: Path = control_groups.GROUPS, member: Path = control_groups.OWN) -> int:
    """Memory that can still be allocated without swapping: pages of files that were read or written are given up."""
    machine = _kilobytes(_read(_MEMINFO), b"MemAvailable")
    return min([machine, *(max(0, limit - used) for limit, used in _limits(groups, member))])


def _limits(groups: Path, member: Path) -> Iterator[tuple[int, int]]:
    """What each control group that this process lives in may use and uses, in bytes; groups without a limit are left
    out. Pages of files, not used lately, do not count as used: the kernel takes them back first.
    """
    for group in control_groups.own("memory", groups, member):
        for limit, used, files in _NAMES_OF_CGROUPS:
            numbers = _read(group / limit).strip(), _read(group / used).strip()
            if all(map(bytes.isdigit, numbers)):  # "max" is no limit
                _, _, rest = (b"\n" + _read(group / "memory.stat")).partition(b"\n%b " % files)
                yield int(numbers[0]), int(numbers[1]) - (int(rest.split(None, 1)[0]) if rest else 0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libc.so.6")
        return library if hasattr(library, "gnu_get_libc_version") else None
    except OSError:
        return None


@functools.cache
def keep_large_blocks() -> int:
    """Tell the allocator to keep freed blocks for reuse, and torch to ask the system for huge pages for large tensors.

    torch reads its variable, ``THP_MEM_ALLOC_ENABLE``, once, when it allocates its first tensor: huge pages are for
    programs that make the accelerator, as ``import deepspeed`` does, before that. The user's value stays.

    Returns:
        Bytes kept at most; 0 where the C library is not glibc, the user runs another allocator, or
        ``DS_PLUGIN_CPU_KEEP_MEMORY=0``.
    """
    library = _glibc()
    if library is None or not settings.cpu_keep_memory or _other_allocator():
        return 0
    bound = min(_LARGEST_KEPT, total() // 4)
    kept = library.mallopt(_M_MMAP_MAX, 0) and library.mallopt(_M_TRIM_THRESHOLD, bound)
    if not kept:
        return 0
    if _HUGE_PAGES_OF_KERNEL.exists():  # torch warns where a kernel has none
        export({_HUGE_PAGES: "1"})
    return bound


def release() -> None:
    """Give kept blocks back to the operating system, those of caches of keys and values too."""
    large_pages.release()
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


def _other_allocator() -> bool:
    """Whether malloc is somebody else's (jemalloc, tcmalloc, mimalloc are preloaded)."""
    return bool(re.search(r"jemalloc|tcmalloc|mimalloc", "\n".join(_loaded_libraries())))


def _loaded_libraries() -> list[str]:
    try:
        maps = Path(f"/proc/{os.getpid()}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line.rsplit("/", 1)[-1] for line in maps.splitlines() if ".so" in line]
