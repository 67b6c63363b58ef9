"""Memory in the largest pages that the system gives without being set up for them.

With pages of 4 KiB the processor spends much of the time of reading large memory on looking up addresses. Linux gives
pages of 2 MiB to those who ask, for memory that was never touched and is aligned to them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

_PAGE = 2 << 20  # of x86-64 and most others; where pages are larger the system rounds as it likes
_MADV_HUGEPAGE = 14


def zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    """A new tensor of zeros, of the dtype and device of another.

    Large ones on a CPU are mappings of their own: what an allocator hands out again has the pages that it had before.
    Their storage cannot be resized. They are the allocator's where the system has no such pages or no more mappings,
    and in a program that is being compiled.
    """
    size = torch.Size(shape).numel() * like.element_size()
    plain = like.device.type == "cpu" and sys.platform == "linux" and not torch.compiler.is_compiling()
    if plain and size >= _PAGE:
        with contextlib.suppress(OSError):
            return _mapped(size).view(like.dtype).view(tuple(shape))
    return like.new_zeros(tuple(shape))


def _mapped(size: int) -> Tensor:
    """Bytes of a new private mapping, which ends with the last tensor of it."""
    memory = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _PAGE
    ask(whole)
    return whole[start : start + size]


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


__all__ = ["ask", "zeros"]
