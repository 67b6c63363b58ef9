"""Weights as `ds_plugin::linear` wants them: one matrix for each product, near together, in large pages."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, distributed, nn
from transformers.pytorch_utils import Conv1D

from ds_plugin_sdk.integrations.transformers import large_pages
from ds_plugin_sdk.integrations.transformers.understood import (
    NotUnderstoodError,
    Place,
    Snapshot,
    check_own_code,
    check_parameter,
    name_of,
)
from ds_plugin_sdk.ops.linear import quantize_weight

Quantized = Literal["int8", "int4"]
Weights = Quantized | None

_ALIGNMENT = 64
_MOST_GROUP = 128
_LEAST_INT4_GROUP = 64
_SAMPLES = 256

_packing = threading.Lock()
_asked = threading.local()
# A node's, while it is asked whether it is held.
_MARK = "ds_plugin_sdk"


@contextmanager
def only_asked() -> Iterator[None]:
    """Within it `Matrix.follow` says of contents that wait to be read whether they can be made, and makes none."""
    before, _asked.only = getattr(_asked, "only", False), True
    try:
        yield
    finally:
        _asked.only = before


class Contents(NamedTuple):
    """What a product reads, as `ds_plugin::linear` takes it.

    Attributes:
        weight: ``[out, in]``, of the input's dtype or quantized.
        bias: ``[out]``, or None.
        scales, offsets: ``[out, groups]`` of quantized weights, or None.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None = None
    offsets: Tensor | None = None


class Matrix:
    """The weights of one linear layer, or of several with the same input, one after the other.

    Attributes:
        layers: that have them.
        contents: what products read.
        order: which input each column of the contents is for, ``[in]``, int64; None if they are in their order.
        dtype, device: of inputs that they serve.
        held: the layers' tensors when `contents` were made.
        pack_waiting: makes them, and those of all others that wait to be read; None of those that do not wait.
    """

    layers: Sequence[nn.Module]
    contents: Contents
    order: Tensor | None = None
    dtype: torch.dtype
    device: torch.device
    held: Snapshot
    pack_waiting: Callable[[], None] | None = None

    @property
    def parameters(self) -> Sequence[Tensor]:
        """The tensors of the layers, each of which can be in one matrix only."""
        raise NotImplementedError

    @property
    def rows(self) -> list[int]:
        """Outputs of each layer."""
        raise NotImplementedError

    def bytes(self, weights: Weights) -> int:
        """Of an arena, which it needs."""
        raise NotImplementedError

    def turns(self, weights: Weights) -> bool:
        """Whether parameters get other strides when they are packed."""
        return False

    def pack(self, arena: Arena, weights: Weights) -> None:
        """Make the contents, in the arena."""
        raise NotImplementedError

    def doubt(self) -> None:
        """The parameters may have been changed without torch's counting it, through ``.data``."""
        raise NotImplementedError

    def follow(self, compare: bool) -> bool:
        """Make sure that the contents are those of the layers; False if they cannot be.

        Args:
            compare: look at a sample of the tensors too, for changes that torch does not count: through ``.data``.
        """
        raise NotImplementedError


class PlainMatrix(Matrix):
    """That of plain layers.

    Parameters are moved into the matrix, not copied, so that whatever changes them changes the matrix. Only quantized
    weights are copies; `follow` makes them again when the parameters have changed. Parameters that would get other
    strides, as those of `Conv1D`, stay until the contents are read: deepspeed.initialize and fully_shard refuse such.

    Args:
        layers: plain linear layers.
        sensitive: 8 bits are the least, as for the layer that makes logits.

    Raises:
        NotUnderstoodError: a layer is no plain linear layer, or its parameters cannot be moved.
    """

    def __init__(self, *layers: nn.Module, sensitive: bool = False) -> None:
        self.layers = layers
        self._sensitive = sensitive
        self._weights: Weights = None
        self.held = Snapshot()
        self._doubted = self._packed = False
        self._samples: list[Tensor] = []
        for layer in layers:
            if type(layer) not in (nn.Linear, Conv1D):
                raise NotUnderstoodError(f"{name_of(layer)} is no plain linear layer")
            check_own_code(layer)
        self._check()

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        found = [layer._parameters[name] for layer in self.layers for name in ("weight", "bias")]
        return [parameter for parameter in found if parameter is not None]

    @property
    def rows(self) -> list[int]:
        return [_rows(layer).shape[0] for layer in self.layers]

    def bytes(self, weights: Weights) -> int:
        itemsize, bits = self.dtype.itemsize, self._bits(weights) or 8 * self.dtype.itemsize
        rows = sum(self.rows)
        return padded(rows * _rows(self.layers[0]).shape[1] * bits // 8) + padded(rows * itemsize)

    def _bits(self, weights: Weights) -> Literal[4, 8] | None:
        """Of a quantized weight. Columns that are no whole blocks of int4 weights take 8."""
        in_blocks = _rows(self.layers[0]).shape[1] % _LEAST_INT4_GROUP == 0
        return None if weights is None else 4 if weights == "int4" and in_blocks and not self._sensitive else 8

    def turns(self, weights: Weights) -> bool:
        return weights is None and not all(_rows(layer).is_contiguous() for layer in self.layers)

    def may_pack(self) -> bool:
        """Whether the parameters can be moved as they are now."""
        try:
            self._check()
            check_turns(self, self._weights)
        except NotUnderstoodError:
            return False
        return True

    def pack(self, arena: Arena, weights: Weights) -> None:
        """Move the parameters into the arena; if quantized, the biases, and copies of the weights."""
        self._weights = weights
        bias = self._move_biases(arena)
        if weights:
            self.contents = self._quantize(arena, bias)
            self._samples = [sample(_weight(layer)) for layer in self.layers]
        else:
            self.contents = Contents(_move(arena, [_rows(layer) for layer in self.layers], self._set_rows), bias)
        self.held = Snapshot(self._place(layer, name) for layer in self.layers for name in layer._parameters)
        self._doubted = False
        self._packed = True

    def _place(self, layer: nn.Module, name: str) -> Place:
        """The one bias of one layer is read where it is; quantized weights are copies; all else was moved."""
        weight = name == "weight"
        return Place(layer._parameters, name, weight or len(self.layers) > 1, weight and self._weights is not None)

    def doubt(self) -> None:
        self._doubted = self._weights is not None

    def follow(self, compare: bool) -> bool:
        if self.pack_waiting is not None:
            if getattr(_asked, "only", False):
                return self.may_pack()
            self.pack_waiting()
        if (
            self._packed
            and not self._doubted
            and self.held.holds()
            and not (compare and self._weights and self._differs())
        ):
            return True
        return self._pack_again()

    def _pack_again(self) -> bool:
        with _packing:
            if not self.may_pack():
                return False
            with torch.inference_mode(False), torch.no_grad():
                self.pack(Arena(self.bytes(self._weights), self.device), self._weights)
        return True

    def _check(self) -> None:
        for layer in self.layers:
            _check_parameters(layer)
        self.dtype, self.device = _weight(self.layers[0]).dtype, _weight(self.layers[0]).device
        ours = set(self.held.addresses)
        for parameter in self.parameters:
            if parameter.dtype != self.dtype or parameter.device != self.device:
                raise NotUnderstoodError("its parameters are of several dtypes, or on several devices")
            if parameter.data_ptr() not in ours:
                _check_memory(parameter)
        if len({_rows(layer).shape[1] for layer in self.layers}) != 1:
            raise NotUnderstoodError("its products have inputs of several sizes")

    def _differs(self) -> bool:
        return not all(
            now.shape == then.shape and torch.equal(now, then)
            for now, then in zip((sample(_weight(layer)) for layer in self.layers), self._samples, strict=True)
        )

    def _quantize(self, arena: Arena, bias: Tensor | None) -> Contents:
        whole = torch.cat([_rows(layer) for layer in self.layers])
        columns = whole.shape[1]
        bits = self._bits(self._weights) or 8
        least = _LEAST_INT4_GROUP if bits == 4 else 1
        sizes = range(min(_MOST_GROUP, columns), 0, -1)
        group = next(size for size in sizes if columns % size == 0 and size % least == 0)
        weight, scales = quantize_weight(whole, group, bits)
        return Contents(arena.empty(weight.shape, weight.dtype).copy_(weight), bias, scales)

    def _set_rows(self, index: int, rows: Tensor) -> None:
        _weight(self.layers[index]).data = rows.t() if type(self.layers[index]) is Conv1D else rows

    def _move_biases(self, arena: Arena) -> Tensor | None:
        biases = [layer._parameters["bias"] for layer in self.layers]
        if len(biases) == 1 or not any(bias is not None for bias in biases):
            return biases[0]
        parts = [
            _weight(layer).new_zeros(_rows(layer).shape[0]) if bias is None else bias.detach()
            for layer, bias in zip(self.layers, biases, strict=True)
        ]

        def set_bias(index: int, part: Tensor) -> None:
            if (bias := biases[index]) is not None:
                bias.data = part

        return _move(arena, parts, set_bias)


class Arena:
    """Memory for many tensors at once.

    A token's step reads every weight once. Large pages, where the system has them, are read up to 1.7 times as fast.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._used = 0
        if device.type == "cpu":
            large_pages.ask(self._memory)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor of this memory."""
        size = torch.Size(shape).numel() * dtype.itemsize
        start = self._used
        self._used += padded(size)
        return self._memory[start : start + size].view(dtype).view(tuple(shape))


def padded(size: int) -> int:
    """Bytes that an arena needs for a tensor of `size` bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Packer:
    """Collects matrices; `pack` then fills them all, with one arena for each device."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._matrices: list[Matrix] = []
        self._waiting: list[PlainMatrix] = []
        self._claimed: set[int] = set()

    def add(self, *matrices: Matrix) -> None:
        """Plan to pack these, or none, with `NotUnderstoodError`: a parameter can be moved into one matrix only."""
        parameters = [id(parameter) for matrix in matrices for parameter in matrix.parameters]
        if len(set(parameters)) != len(parameters) or not self._claimed.isdisjoint(parameters):
            raise NotUnderstoodError("it shares a parameter with another layer")
        for matrix in matrices:
            check_turns(matrix, self._weights)
        self._claimed.update(parameters)
        self._matrices += matrices

    def pack(self) -> list[Callable[[], None]]:
        """Fill every matrix, but for those that change strides: they are filled when the first of them is read.

        Returns:
            What undoes it.
        """
        now: list[Matrix] = []
        for matrix in self._matrices:
            if isinstance(matrix, PlainMatrix) and matrix.turns(self._weights):
                matrix.pack_waiting = self._pack_waiting
                self._waiting.append(matrix)
            else:
                now.append(matrix)
        with _packing:
            self._fill(now)
        return [functools.partial(_give_back, matrix) for matrix in self._matrices]

    def _pack_waiting(self) -> None:
        with _packing:
            waiting, self._waiting = self._waiting, []
            self._fill([matrix for matrix in waiting if matrix.may_pack()])
            for matrix in waiting:
                matrix.pack_waiting = None

    def _fill(self, chosen: Sequence[Matrix]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            for device in {matrix.device for matrix in chosen}:
                matrices = [matrix for matrix in chosen if matrix.device == device]
                arena = Arena(sum(matrix.bytes(self._weights) for matrix in matrices), device)
                for matrix in matrices:
                    matrix.pack(arena, self._weights)


def check_turns(matrix: Matrix, weights: Weights) -> None:
    """Raise `NotUnderstoodError` if packing gives strides to parameters that somebody relies upon."""
    if matrix.turns(weights) and any(map(_is_awaited, matrix.parameters)):
        raise NotUnderstoodError("its gradient is awaited with the strides that it has, as by DistributedDataParallel")


def _is_awaited(parameter: Tensor) -> bool:
    """Whether something holds the node that gets a parameter's gradient. DistributedDataParallel does, and puts the
    gradient into a buffer with the strides of its parameter then, whatever they are by now: numbers change places.

    Nobody can be asked for it. A node that is not held is another one each time.
    """
    if not (distributed.is_available() and distributed.is_initialized() and parameter.requires_grad):
        return False
    _gradient_node(parameter).metadata[_MARK] = True
    return _gradient_node(parameter).metadata.pop(_MARK, None) is not None


def _gradient_node(parameter: Tensor) -> Any:
    """The node that gets a parameter's gradient."""
    with torch.inference_mode(False), torch.enable_grad():
        view: Any = parameter.view_as(parameter)
    return view.grad_fn.next_functions[0][0]


def _check_parameters(layer: nn.Module) -> None:
    check_parameter(layer._parameters.get("weight"), "its weight")
    if "bias" not in layer._parameters:
        raise NotUnderstoodError("its bias is no parameter")
    if _weight(layer).dim() != 2 or _weight(layer).numel() == 0:
        raise NotUnderstoodError(f"its weight is {list(_weight(layer).shape)}")
    bias = layer._parameters["bias"]
    if bias is not None:
        check_parameter(bias, "its bias")
        if bias.shape != _rows(layer).shape[:1]:
            raise NotUnderstoodError(f"its bias is {list(bias.shape)}")


def _check_memory(parameter: nn.Parameter) -> None:
    if parameter.untyped_storage().nbytes() != parameter.nbytes:
        raise NotUnderstoodError("its memory is part of a larger buffer, which others may write")
    if parameter.device.type == "cpu" and parameter.untyped_storage().is_shared():
        raise NotUnderstoodError("its memory is shared with other processes")


def _weight(layer: nn.Module) -> nn.Parameter:
    weight = layer._parameters["weight"]
    assert weight is not None
    return weight


def _rows(layer: nn.Module) -> Tensor:
    """``[out, in]``, whichever way the layer keeps it."""
    weight = _weight(layer).detach()
    return weight.t() if type(layer) is Conv1D else weight


def sample(weight: Tensor) -> Tensor:
    """Some of its elements, which tell whether it has changed."""
    flat = weight.detach().view(-1) if weight.is_contiguous() else weight.detach().flatten()
    return flat[:: max(1, flat.numel() // _SAMPLES)].clone()


def _move(arena: Arena, parts: Sequence[Tensor], set_part: Callable[[int, Tensor], None]) -> Tensor:
    """One tensor of the arena with all parts, one after the other; each is handed over as its view of it."""
    sizes = [part.shape[0] for part in parts]
    whole = arena.empty((sum(sizes), *parts[0].shape[1:]), parts[0].dtype)
    for index, view in enumerate(torch.split(whole, sizes)):
        view.copy_(parts[index])
        set_part(index, view)
    return whole


def _give_back(matrix: Matrix) -> None:
    """Memory of its own for each parameter that was moved and still is where it was moved to.

    It lies as torch makes parameters, unless somebody relies on how it lies by now.
    """
    matrix.pack_waiting = None
    held = matrix.held
    for parameter, address in zip(held.moved, held.addresses, strict=True):
        if not held.counts(parameter) and parameter.data_ptr() == address:
            layout = torch.preserve_format if _is_awaited(parameter) else torch.contiguous_format
            parameter.data = parameter.data.clone(memory_format=layout)


__all__ = ["Arena", "Contents", "Matrix", "Packer", "PlainMatrix", "Quantized", "Weights", "padded", "sample"]
