"""Page-locked host memory: it begins with a page, is never swapped out, and direct I/O takes it as it is.

There is no kernel: the system's calls do it all.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import threading
import warnings
import weakref

import torch
from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)
_lock = threading.Lock()
_warned = False

# Where our blocks begin, and the block. The block lives as long as its tensors do, and its entry no longer than that.
_blocks: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()


def empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Page-locked memory. Where the limit of locked memory is reached it is not locked, with one warning.

    It is given back with its last tensor, or unlocked before that by `free`.

    Args:
        numel: number of elements.
        dtype: their dtype.

    Returns:
        A tensor on the CPU of shape [numel]; its elements are 0.
    """
    whole = aligned(numel, dtype)
    address, size = whole.data_ptr(), whole.nbytes
    if size and _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) != 0:
        _warn(size, ctypes.get_errno())
    return whole


def aligned(numel: int, dtype: torch.dtype) -> Tensor:
    """Memory that begins with a page, as that of `empty` does, and is not locked.

    Args:
        numel: number of elements.
        dtype: their dtype.

    Returns:
        A tensor on the CPU of shape [numel]; its elements are 0.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    block = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(block, dtype=dtype)
    with _lock:
        _blocks[tensor.data_ptr()] = block
    return tensor


def free(address: int) -> bool:
    """Unlock the memory that `empty` gave. Tensors in it stay valid: the memory itself goes with the last of them.

    Args:
        address: where it begins, the tensor's ``data_ptr()``.

    Returns:
        Whether there was such memory.
    """
    with _lock:
        block = _blocks.pop(address, None)
    if block is None:
        return False
    _libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(len(block)))
    return True


def contains(tensor: Tensor) -> bool:
    """Whether all of a tensor's memory is ours: what `empty` gave, or a part of it."""
    if tensor.device.type != "cpu":
        return False
    begin = tensor.data_ptr()
    with _lock:
        blocks = list(_blocks.items())
    return any(start <= begin and begin + tensor.nbytes <= start + len(block) for start, block in blocks)


def _warn(size: int, number: int) -> None:
    global _warned
    if _warned:
        return
    _warned = True
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "no limit is set" if limit == resource.RLIM_INFINITY else f"the limit of a process is {limit} bytes"
    warnings.warn(
        f"ds-plugin-sdk: {size} bytes of host memory could not be locked: {os.strerror(number)}; {allowed}. They are "
        "used unlocked, so that the system may swap them out.\n  -> raise the limit with `ulimit -l unlimited`, that "
        "of a container with `--ulimit memlock=-1`",
        RuntimeWarning,
        stacklevel=4,
    )


__all__ = ["aligned", "contains", "empty", "free"]
