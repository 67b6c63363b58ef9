"""Weights as `ds_plugin::linear` wants them: one matrix for each product, near together, in large pages."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ds_plugin_sdk.ops.linear import quantize_weight

Weights = Literal["int8"] | None

_MADV_HUGEPAGE = 14
_ALIGNMENT = 64
_MOST_GROUP = 128


@dataclass
class Matrix:
    """One matrix with its bias.

    Attributes:
        weight: ``[out, in]``.
        bias: ``[out]`` or None.
        scales: of int8 weights, else None.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None = None


@dataclass(frozen=True)
class Source:
    """A parameter that a matrix is made of; `transposed` if it holds ``[in, out]``."""

    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None
    transposed: bool = False

    @property
    def matrix(self) -> Tensor:
        return self.weight.t() if self.transposed else self.weight


class Arena:
    """Memory for many tensors at once.

    A token's step reads every weight once. With pages of 4 KiB the processor spends much of that time on looking up
    addresses; large pages, where the system has them, are read up to 1.7 times as fast.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._used = 0
        if device.type == "cpu":
            _ask_for_large_pages(self._memory)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of this memory."""
        size = torch.Size(shape).numel() * dtype.itemsize
        start = self._used
        self._used += padded(size)
        return self._memory[start : start + size].view(dtype).view(tuple(shape))


def padded(size: int) -> int:
    """Bytes that an arena needs for a tensor of `size` bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _ask_for_large_pages(memory: Tensor) -> None:
    if not sys.platform.startswith("linux"):
        return
    start = memory.data_ptr()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = start + memory.nbytes - first
    if length > 0:
        # Advice: a system without large pages ignores it.
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(_MADV_HUGEPAGE))


class Packer:
    """Collects what is to be packed; `pack` then makes the matrices, and knows how to undo it."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._planned: list[tuple[Matrix, tuple[Source, ...]]] = []

    def add(self, *sources: Source) -> Matrix:
        """A matrix of the rows of all sources. It is filled by `pack`."""
        matrix = Matrix(sources[0].weight, None)
        self._planned.append((matrix, sources))
        return matrix

    def pack(self) -> list[Callable[[], None]]:
        """Fill every matrix. Parameters are moved, not copied, unless the weights are quantized.

        Returns:
            What undoes it.
        """
        if not self._planned:
            return []
        device = self._planned[0][1][0].weight.device
        undo: list[Callable[[], None]] = []
        arena = Arena(sum(padded(self._bytes(sources)) for _, sources in self._planned), device)
        with torch.no_grad():
            for matrix, sources in self._planned:
                matrix.bias = _bias(sources)
                if self._weights == "int8":
                    self._quantize(matrix, sources, arena)
                else:
                    undo += self._move(matrix, sources, arena)
        return undo

    def _bytes(self, sources: Sequence[Source]) -> int:
        itemsize = 1 if self._weights == "int8" else sources[0].weight.dtype.itemsize
        return sum(source.weight.numel() for source in sources) * itemsize

    def _quantize(self, matrix: Matrix, sources: Sequence[Source], arena: Arena) -> None:
        whole = torch.cat([source.matrix for source in sources])
        columns = whole.shape[1]
        group = next(size for size in range(min(_MOST_GROUP, columns), 0, -1) if columns % size == 0)
        weight, matrix.scales = quantize_weight(whole, group)
        matrix.weight = arena.empty(weight.shape, torch.int8).copy_(weight)

    def _move(self, matrix: Matrix, sources: Sequence[Source], arena: Arena) -> list[Callable[[], None]]:
        rows = [source.matrix.shape[0] for source in sources]
        columns = sources[0].matrix.shape[1]
        matrix.weight = arena.empty((sum(rows), columns), sources[0].weight.dtype)
        undo: list[Callable[[], None]] = []
        for source, part in zip(sources, torch.split(matrix.weight, rows), strict=True):
            part.copy_(source.matrix)
            source.weight.data = part.t() if source.transposed else part
            undo.append(_own_memory(source.weight))
        return undo


def _own_memory(parameter: torch.nn.Parameter) -> Callable[[], None]:
    def undo() -> None:
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)

    return undo


def _bias(sources: Sequence[Source]) -> Tensor | None:
    """The biases in one; sources without one among others that have one count as zeros."""
    if all(source.bias is None for source in sources):
        return None
    if len(sources) == 1:
        return sources[0].bias
    return torch.cat(
        [
            source.weight.new_zeros(source.matrix.shape[0]) if source.bias is None else source.bias.detach()
            for source in sources
        ]
    )
