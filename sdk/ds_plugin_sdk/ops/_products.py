"""Products of matrices by torch, in the dtype in which the device is fastest, or by an op of ours that is faster."""

from __future__ import annotations

import ctypes
import functools
import math
import platform
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ds_plugin_sdk.ops._watched import is_watched
from ds_plugin_sdk.ops.matmul import addmm_, has_kernel

# CPU features by which products of a dtype are at least as fast as those of float32, as /proc/cpuinfo names them.
_FAST = {torch.bfloat16: {"amx_bf16"}, torch.float16: {"amx_fp16", "avx512_fp16"}}
# With these alone Intel's CPUs multiply bfloat16 at half the rate of float32, AMD's at twice the rate.
_FAST_BUT_ON_INTEL = {torch.bfloat16: {"avx512_bf16"}}
# From how many inputs on `ops.linear` on a CPU is torch's product: of float32, of bfloat16 where x86 is fast at it, the
# same with AMX, and of float32 on AMD's CPUs without AVX-512. ``kernels/cpu/linear_binding.cpp`` has the same numbers.
# With AMX it may be fewer, for some layouts and without the loops of AVX-512: the op then finds that out by itself.
_MANY, _MANY_OF_BFLOAT16, _MANY_BY_AMX, _MANY_ON_AMD = 24, 8, 129, 256
# AMD's family of CPUs from which on their units for AVX-512 do twice what AVX2's do: Zen 5.
_ZEN5 = 0x1A
# Sizes below which a product is torch's there: of thin matrices, and of what takes no longer than a call from Python.
# ``kernels/cpu/matmul_binding.cpp`` has the first of them.
_LEAST_SIDE, _LEAST = 40, 1 << 22
# And multiplications of 16-bit numbers that are not worth to be made float32.
_LEAST_WIDENED = 1 << 16
# How much is in float32 at a time, as rows, columns and what is summed over: tens of MiB, as fast as all at once.
_ROWS, _COLUMNS, _SUMMED = 2048, 2048, 4096


class _X86(NamedTuple):
    """A CPU, as /proc/cpuinfo has it."""

    vendor: str
    family: int
    flags: frozenset[str]


def product_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to multiply in: 16 bits where the device is fast at them, else float32."""
    slow = tensor.device.type == "cpu" and tensor.element_size() == 2 and not multiplies_fast(tensor.dtype)
    return torch.float32 if slow else tensor.dtype


def is_torchs_slower(tensor: Tensor) -> bool:
    """Whether torch's product of such matrices takes longer than `product`: sizes and what watches torch aside."""
    return product_dtype(tensor) != tensor.dtype or (
        tensor.dtype == torch.float32 and tensor.device.type == "cpu" and _is_ours_faster()
    )


@functools.cache
def multiplies_fast(dtype: torch.dtype) -> bool:
    """Whether the CPU's product of a 16-bit dtype is as fast as that of float32; what is not x86 is up to torch.

    ``kernels/cpu/linear_binding.cpp`` has the same rule for inference.
    """
    return platform.machine() != "x86_64" or _is_fast(dtype, _x86())


@functools.cache
def multiplies_floats_fast() -> bool:
    """Whether torch's product of float32 is as fast as ``ds_plugin::addmm_``.

    It is MKL's, which uses AVX-512 on Intel's CPUs alone: half of what Zen 5 can do. ``kernels/cpu/device.h`` has
    the same rule.
    """
    return platform.machine() != "x86_64" or not _is_zen5(_x86())


def _is_ours_faster() -> bool:
    """Whether ``ds_plugin::addmm_`` is, and torch was not allowed to multiply float32 in bfloat16, as
    ``torch.set_float32_matmul_precision("medium")`` does.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # an object that torch puts there
    return not multiplies_floats_fast() and matmul.fp32_precision != "bf16"


def torchs_from(dtype: torch.dtype) -> float:
    """From how many inputs on a linear layer of plain weights on a CPU is better left to torch; inf: never.

    `ops.linear` leaves it from the same number on, but for float32 where torch may multiply that in bfloat16.
    """
    many = _torchs_from_here(dtype)
    return _MANY if dtype == torch.float32 and many == math.inf and not _is_ours_faster() else many


@functools.cache
def _torchs_from_here(dtype: torch.dtype) -> float:
    return _torchs_from(dtype, _x86()) if platform.machine() == "x86_64" else _MANY


def _torchs_from(dtype: torch.dtype, cpu: _X86) -> float:
    if dtype == torch.float32 and _is_zen5(cpu):
        return math.inf
    if dtype == torch.float32 and cpu.vendor == "AuthenticAMD" and "avx512f" not in cpu.flags:
        return _MANY_ON_AMD
    if dtype in _FAST and not _is_fast(dtype, cpu):
        return math.inf
    if dtype != torch.bfloat16:
        return _MANY
    return _MANY_BY_AMX if "amx_bf16" in cpu.flags else _MANY_OF_BFLOAT16


def _is_fast(dtype: torch.dtype, cpu: _X86) -> bool:
    fast = _FAST[dtype] if cpu.vendor == "GenuineIntel" else _FAST[dtype] | _FAST_BUT_ON_INTEL.get(dtype, set())
    return not fast.isdisjoint(cpu.flags)


def _is_zen5(cpu: _X86) -> bool:
    """Or a later one, with AVX-512."""
    return cpu.vendor == "AuthenticAMD" and cpu.family >= _ZEN5 and "avx512f" in cpu.flags


def _x86() -> _X86:
    """The first processor, without AMX where Linux does not give it to this process."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
            text = file.read(16384)
    except OSError:
        text = ""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    flags, family = frozenset(found.get("flags", "").split()), found.get("cpu family", "")
    flags = flags if _has_amx(flags) else flags - {"amx_bf16"}
    return _X86(found.get("vendor_id", ""), int(family) if family.isdecimal() else 0, flags)


def _has_amx(flags: frozenset[str]) -> bool:
    """As ``kernels/cpu/amx.h`` asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)."""
    return {"amx_bf16", "avx512_bf16"} <= flags and ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """``a @ b + bias``, of matrices in any layout; sums in float32 or wider, rounded once.

    Args:
        a, b: ``[rows, n]`` and ``[n, columns]``, of one dtype.
        bias: ``[columns]``, or ``[rows, columns]``.
        out: memory for the result; None for new memory.

    Returns:
        ``[rows, columns]``, the dtype of `a`; contiguous if it is new.
    """
    few = math.prod(a.shape) * b.shape[1] < _LEAST_WIDENED
    if torch.compiler.is_compiling() or product_dtype(a) == a.dtype or few:
        return _product(a, b, bias, out)
    out = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
    bias = None if bias is None else bias.expand(out.shape)
    with torch.autocast(a.device.type, enabled=False):
        for rows in _parts(a.shape[0], _ROWS):
            for columns in _parts(b.shape[1], _COLUMNS):
                sums = _widened(a[rows], b[:, columns])
                out[rows, columns] = sums if bias is None else sums.add_(bias[rows, columns])
    return out


def add_product(sums: Tensor, a: Tensor, b: Tensor, *, beta: int = 1) -> None:
    """``sums = beta * sums + a @ b``, all of one dtype, in which the device is fast, or float64."""
    if _is_ours(a, b, sums):
        addmm_(sums, a, b, beta=beta)
    else:
        sums.addmm_(a, b, beta=beta)


def _is_ours(a: Tensor, b: Tensor, *sums: Tensor) -> bool:
    """Whether ``ds_plugin::addmm_`` multiplies them: who compiles or sees operators is to see torch's."""
    return (
        not is_watched()
        and all(type(matrix) in (Tensor, nn.Parameter) for matrix in (a, b, *sums))
        and a.dtype == torch.float32
        and is_torchs_slower(a)
        and is_worth_addmm(a.shape[0], a.shape[1], b.shape[1])
    )


def is_worth_addmm(*sizes: int) -> bool:
    """Whether ``ds_plugin::addmm_`` has a kernel, and rows, columns and depth of a product are enough for it."""
    return min(sizes) >= _LEAST_SIDE and math.prod(sizes) >= _LEAST and has_kernel()


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    if not _is_ours(a, b):
        return torch.mm(a, b, out=out) if bias is None else torch.addmm(bias, a, b, out=out)
    sums = a.new_empty(a.shape[0], b.shape[1]) if out is None else out
    if bias is not None:
        sums.copy_(bias)
    return addmm_(sums, a, b, beta=0 if bias is None else 1)


def _widened(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32."""
    first, *rest = _parts(a.shape[1], _SUMMED) or [slice(0, 0)]
    sums = _product(a[:, first].to(torch.float32), b[first].to(torch.float32))  # they keep their layout
    for part in rest:
        add_product(sums, a[:, part].to(torch.float32), b[part].to(torch.float32))
    return sums


def _parts(size: int, most: int) -> list[slice]:
    return [slice(begin, min(begin + most, size)) for begin in range(0, size, most)]


__all__ = [
    "add_product",
    "is_torchs_slower",
    "is_worth_addmm",
    "multiplies_fast",
    "multiplies_floats_fast",
    "product",
    "product_dtype",
    "torchs_from",
]
