"""Products of matrices by torch, in the dtype in which the device is fastest."""

from __future__ import annotations

import ctypes
import functools
import math
import platform
from pathlib import Path

import torch
from torch import Tensor

# CPU features by which products of a dtype are at least as fast as those of float32, as /proc/cpuinfo names them.
_FAST = {torch.bfloat16: {"amx_bf16"}, torch.float16: {"amx_fp16", "avx512_fp16"}}
# With these alone Intel's CPUs multiply bfloat16 at half the rate of float32, AMD's at twice the rate.
_FAST_BUT_ON_INTEL = {torch.bfloat16: {"avx512_bf16"}}
# From how many inputs on `ops.linear` on a CPU is torch's product: of float32, of bfloat16 where x86 is fast at it, the
# same with AMX, and of float32 on AMD's CPUs without AVX-512. ``kernels/cpu/linear_binding.cpp`` has the same numbers.
# With AMX it may be fewer, for some layouts and without the loops of AVX-512: the op then finds that out by itself.
_MANY, _MANY_OF_BFLOAT16, _MANY_BY_AMX, _MANY_ON_AMD = 24, 8, 129, 256
# How much is in float32 at a time, as rows, columns and what is summed over: tens of MiB, as fast as all at once.
_ROWS, _COLUMNS, _SUMMED = 2048, 2048, 4096


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to multiply in: 16 bits where the device is fast at them, else float32."""
    slow = tensor.device.type == "cpu" and tensor.element_size() == 2 and not multiplies_fast(tensor.dtype)
    return torch.float32 if slow else tensor.dtype


@functools.cache
def multiplies_fast(dtype: torch.dtype) -> bool:
    """Whether the CPU's product of a 16-bit dtype is as fast as that of float32; what is not x86 is up to torch.

    ``kernels/cpu/linear_binding.cpp`` has the same rule for inference.
    """
    return platform.machine() != "x86_64" or _is_fast(dtype, *_x86())


@functools.cache
def torchs_from(dtype: torch.dtype) -> float:
    """From how many inputs on `ops.linear` of plain weights on a CPU is ``torch.nn.functional.linear``; inf: never."""
    return _torchs_from(dtype, *_x86()) if platform.machine() == "x86_64" else _MANY


def _torchs_from(dtype: torch.dtype, vendor: str, flags: frozenset[str]) -> float:
    if dtype == torch.float32 and vendor == "AuthenticAMD" and "avx512f" not in flags:
        return _MANY_ON_AMD
    if dtype in _FAST and not _is_fast(dtype, vendor, flags):
        return math.inf
    if dtype != torch.bfloat16:
        return _MANY
    return _MANY_BY_AMX if "amx_bf16" in flags else _MANY_OF_BFLOAT16


def _is_fast(dtype: torch.dtype, vendor: str, flags: frozenset[str]) -> bool:
    fast = _FAST[dtype] if vendor == "GenuineIntel" else _FAST[dtype] | _FAST_BUT_ON_INTEL.get(dtype, set())
    return not fast.isdisjoint(flags)


def _x86() -> tuple[str, frozenset[str]]:
    """Vendor and features of the first processor, without AMX where Linux does not give it to this process."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            text = file.read(16384)
    except OSError:
        text = ""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    flags = frozenset(found.get("flags", "").split())
    return found.get("vendor_id", ""), flags if _has_amx(flags) else flags - {"amx_bf16"}


def _has_amx(flags: frozenset[str]) -> bool:
    """As ``kernels/cpu/amx.h`` asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""
    return {"amx_bf16", "avx512_bf16"} <= flags and ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b + bias``, of 16-bit matrices in any layout; sums in float32, rounded once.

    Args:
        a, b: ``[rows, n]`` and ``[n, columns]``, of one dtype.
        bias: ``[columns]``.

    Returns:
        ``[rows, columns]``, contiguous, the dtype of `a`.
    """
    if product_dtype(a) == a.dtype:
        return a @ b if bias is None else torch.addmm(bias, a, b)
    out = a.new_empty(a.shape[0], b.shape[1])
    with torch.autocast(a.device.type, enabled=False):
        for rows in _parts(a.shape[0], _ROWS):
            for columns in _parts(b.shape[1], _COLUMNS):
                sums = _widened(a[rows], b[:, columns])
                out[rows, columns] = sums if bias is None else sums.add_(bias[columns])
    return out


def _widened(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32."""
    first, *rest = _parts(a.shape[1], _SUMMED) or [slice(0, 0)]
    sums = a[:, first].to(torch.float32) @ b[first].to(torch.float32)  # they keep their layout: no copy is transposed
    for part in rest:
        sums.addmm_(a[:, part].to(torch.float32), b[part].to(torch.float32))
    return sums


def _parts(size: int, most: int) -> list[slice]:
    return [slice(begin, min(begin + most, size)) for begin in range(0, size, most)]


__all__ = ["multiplies_fast", "product", "product_dtype", "torchs_from"]
