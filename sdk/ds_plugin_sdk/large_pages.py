"""Memory in the largest pages that the system gives without being set up for them.

With pages of 4 KiB the processor spends much of the time of reading large memory on looking up addresses. Linux gives
pages of 2 MiB to those who ask, for memory that was never touched and is aligned to them.

Freed memory is kept for the next tensor: a virtual machine may have given the pages of its own free memory back to its
host, and then touching them again takes longer than a prompt's attention. The system may take kept pages back at any
time (``MADV_FREE``), so they are no memory that a program lacks. Nothing is kept where address space is limited. Nor
is what a forked process has, too: the system takes the pages of that back from neither.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import resource
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ds_plugin_sdk.settings import settings

_PAGE = 2 << 20  # of x86-64 and most others; where pages are larger the system rounds as it likes
_MADV_FREE, _MADV_HUGEPAGE = 8, 14  # mmap has the names only where the headers that it was compiled with had them

# Bytes of freed memory at most, and of one mapping: reuse makes zeros of all of it, also of room that is never used.
_KEPT, _KEPT_OF_ONE = 1 << 30, 1 << 29
# Tensors end at any time, in any thread and amid any code, so that there is no lock: each method of a deque is whole.
_freed: deque[mmap.mmap] = deque()
_forks = 0


def _forget() -> None:
    global _forks
    _forks += 1
    release()


# Afterwards, too: other threads go on until the very fork.
os.register_at_fork(before=_forget, after_in_parent=_forget, after_in_child=_forget)


def zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """A new tensor of zeros, of the dtype and device of another.

    Large ones on a CPU are mappings of their own: what an allocator hands out again has the pages that it had before.
    Their storage cannot be resized, and its memory is kept for the next one. They are the allocator's where the system
    has no such pages or no more mappings, and in a program that is being compiled.
    """
    size = torch.Size(shape).numel() * like.element_size()
    plain = like.device.type == "cpu" and sys.platform == "linux" and not torch.compiler.is_compiling()
    if plain and size >= _PAGE:
        with contextlib.suppress(OSError):
            return _mapped(size).view(like.dtype).view(tuple(shape))
    return like.new_zeros(tuple(shape))


def _mapped(size: int) -> Tensor:
    """Bytes of a private mapping, which is kept when the last tensor of it ends."""
    forks = _forks  # before anything that lets other threads fork
    kept = _taken(size + _PAGE)
    memory = kept or _new(size + _PAGE)
    owner = (ctypes.c_char * len(memory)).from_buffer(memory)  # what the tensor holds
    start = -ctypes.addressof(owner) % _PAGE
    if kept:  # no tensor's `zero_`, which a transform of torch.func refuses
        ctypes.memset(ctypes.addressof(owner) + start, 0, size)
    if len(memory) <= _KEPT_OF_ONE and settings.cpu_keep_memory and not _is_limited():
        weakref.finalize(owner, _keep, memory, forks).atexit = False
    whole = torch.frombuffer(owner, dtype=torch.uint8)
    if not kept:
        ask(whole)
    return whole[start : start + size]


def _new(size: int) -> mmap.mmap:
    new = functools.partial(mmap.mmap, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        return new()
    except OSError:
        release()
        return new()


def _is_limited() -> bool:
    """Whether kept mappings, though the system has their pages back, may be what other memory is refused for."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return any(limit != resource.RLIM_INFINITY for limit in limits) or _counts_mappings()


@functools.cache
def _counts_mappings() -> bool:
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text(encoding="ascii").strip() == "2"
    except OSError:
        return False


def _taken(size: int) -> mmap.mmap | None:
    """The smallest kept mapping of that size, or up to half as large again."""
    for memory in sorted(_freed.copy(), key=len):  # a copy: ends of tensors amid a loop would end it
        if size <= len(memory) <= size + size // 2:
            with contextlib.suppress(ValueError):  # another thread has taken it
                _freed.remove(memory)
                return memory
    return None


def _keep(memory: mmap.mmap, forks: int) -> None:
    if forks != _forks:
        return
    try:
        memory.madvise(_MADV_FREE)
    except OSError:  # Linux before 4.5, gVisor; locked memory
        return
    _freed.append(memory)
    if forks != _forks:  # meanwhile
        with contextlib.suppress(ValueError):
            _freed.remove(memory)
    while sum(map(len, _freed.copy())) > _KEPT:
        with contextlib.suppress(IndexError):  # as above
            _freed.popleft()


def release() -> None:
    """Give kept memory back to the system."""
    _freed.clear()


def ask(memory: Tensor) -> None:
    """Ask for large pages for the memory of a tensor on a CPU."""
    if not sys.platform.startswith("linux"):
        return
    start = memory.data_ptr()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = start + memory.nbytes - first
    if length > 0:
        # Advice: a system without large pages ignores it.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(_MADV_HUGEPAGE))


__all__ = ["ask", "release", "zeros"]
