"""Weights as `ds_plugin::linear` wants them: one matrix for each product, near together, in large pages."""

from __future__ import annotations

import enum
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ds_plugin_sdk import large_pages
from ds_plugin_sdk.integrations.transformers.as_found import Place, Snapshot
from ds_plugin_sdk.integrations.transformers.understood import (
    NotUnderstoodError,
    check_own_code,
    check_parameter,
    name_of,
)
from ds_plugin_sdk.ops import decoder_layer
from ds_plugin_sdk.ops.linear import quantize_weight
from ds_plugin_sdk.thread_lock import ThreadLock

Quantized = Literal["int8", "int4"]
Weights = Quantized | None

_ALIGNMENT = 64
_GROUP = 128
_LEAST_GROUP = 32  # with a scale for fewer, eight bits would be nine and more
_LEAST_INT4_GROUP = 64
# How much of a weight is looked at: each row is waited for; neighbours in it are not. One row of eight takes one
# percent of a prompt's time, and finds adapters that change one number of a thousand. What makes logits has a row for
# each word, and all are looked at.
_FEW_ROWS, _ONE_OF, _RUN = 64, 8, 16

_packing = ThreadLock()


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
        rounded: whether the contents have fewer digits than the layers' weights. They are for inference: activation
            checkpointing may record no gradients where it first calls a layer, and calls its own code later.
    """

    layers: Sequence[nn.Module]
    contents: Contents
    order: Tensor | None = None
    dtype: torch.dtype
    device: torch.device
    held: Snapshot
    rounded: bool = False

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

    def pack(self, arena: Arena, weights: Weights) -> None:
        """Make the contents, in the arena."""
        raise NotImplementedError

    def doubt(self) -> None:
        """The parameters may have been changed without torch's counting it, through ``.data``."""
        raise NotImplementedError

    def follow(self, look: Look) -> bool:
        """Make sure that the contents are those of the layers; False if they cannot be."""
        raise NotImplementedError


class PlainMatrix(Matrix):
    """That of plain layers.

    Parameters are moved into the matrix, not copied, so that whatever changes them changes the matrix. Quantized
    weights are copies, and so are those that do not lie by rows, as `Conv1D`'s: a parameter with other strides would
    not fit what optimizers and data parallelism hold for it. `follow` makes copies again when parameters have changed.

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
        self._copied = self._doubted = False
        self._samples = Samples()
        self._divided: list[int] | None = None  # rows of the layers: who made one of several relies on them
        for layer in layers:
            if type(layer) not in (nn.Linear, Conv1D):
                raise NotUnderstoodError(f"{name_of(layer)} is no plain linear layer")
            check_own_code(layer)
        self._check()
        self._divided = self.rows

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
        return None if weights is None else bits_of(_rows(self.layers[0]).shape[1], weights, self._sensitive)

    def pack(self, arena: Arena, weights: Weights) -> None:
        """Move the parameters into the arena, or the biases and copies of the weights."""
        rows = [_rows(layer) for layer in self.layers]
        self._weights, self.rounded = weights, weights is not None
        self._copied = self.rounded or not all(each.is_contiguous() for each in rows)
        bias = self._move_biases(arena)
        if weights:
            self.contents = self._quantize(arena, bias)
        else:
            self.contents = Contents(_move(arena, rows, None if self._copied else self._set_rows), bias)
        copied = map(_weight, self.layers) if self._copied else ()
        self._samples = Samples(copied, one_of=1 if self._sensitive else _ONE_OF)
        self.held = Snapshot(self._place(layer, name) for layer in self.layers for name in layer._parameters)
        self._doubted = False

    def _place(self, layer: nn.Module, name: str) -> Place:
        """The one bias of one layer is read where it is; weights may be copies; all else was moved."""
        weight = name == "weight"
        return Place(layer._parameters, name, weight or len(self.layers) > 1, weight and self._copied)

    def doubt(self) -> None:
        self._doubted = self._copied

    def follow(self, look: Look) -> bool:
        if not self._doubted and self.held.holds() and not (self._copied and self._differs(look)):
            return True
        return self._pack_again()

    def _pack_again(self) -> bool:
        with _packing:
            try:
                self._check()
            except NotUnderstoodError:
                return False
            with torch.inference_mode(False), torch.no_grad():
                self.pack(Arena(self.bytes(self._weights), self.device), self._weights)
        return True

    def _check(self) -> None:
        for layer in self.layers:
            _check_parameters(layer)
        self.dtype, self.device = _weight(self.layers[0]).dtype, _weight(self.layers[0]).device
        ours = set(self.held.addresses)
        stays = self.layers[0]._parameters["bias"] if len(self.layers) == 1 else None  # it is read where it is
        for parameter in self.parameters:
            if parameter.dtype != self.dtype or parameter.device != self.device:
                raise NotUnderstoodError("its parameters are of several dtypes, or on several devices")
            if parameter is not stays and parameter.data_ptr() not in ours:
                _check_memory(parameter)
        if len({_rows(layer).shape[1] for layer in self.layers}) != 1:
            raise NotUnderstoodError("its products have inputs of several sizes")
        if len(self.layers) > 1 and self._divided not in (None, self.rows):
            raise NotUnderstoodError("its layers have other numbers of rows than they had")

    def _differs(self, look: Look) -> bool:
        return self._samples.differ(map(_weight, self.layers), look)

    def _quantize(self, arena: Arena, bias: Tensor | None) -> Contents:
        whole = torch.cat([_rows(layer) for layer in self.layers])
        weight, scales = quantize(whole, self._bits(self._weights) or 8)
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
        self._claimed: set[int] = set()

    @property
    def is_empty(self) -> bool:
        """Whether no layer's weights are to be packed."""
        return not self._matrices

    def add(self, *matrices: Matrix) -> None:
        """Plan to pack these, or none, with `NotUnderstoodError`: a parameter can be moved into one matrix only."""
        parameters = [id(parameter) for matrix in matrices for parameter in matrix.parameters]
        if len(set(parameters)) != len(parameters) or not self._claimed.isdisjoint(parameters):
            raise NotUnderstoodError("it shares a parameter with another layer")
        self._claimed.update(parameters)
        self._matrices += matrices

    def pack(self) -> list[Callable[[], None]]:
        """Fill every matrix.

        Returns:
            What undoes it.
        """
        with torch.inference_mode(False), torch.no_grad(), _packing:
            for device in {matrix.device for matrix in self._matrices}:
                matrices = [matrix for matrix in self._matrices if matrix.device == device]
                arena = Arena(sum(matrix.bytes(self._weights) for matrix in matrices), device)
                for matrix in matrices:
                    matrix.pack(arena, self._weights)
        return [functools.partial(_give_back, matrix) for matrix in self._matrices]


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
    # Such as what `fully_shard` gathers into, again and again, without torch's counting it.
    if _users(parameter) > _users(torch.empty(0, device="cpu")):
        raise NotUnderstoodError("its memory is also another tensor's, which may be written to: a state_dict's, say")


def _users(tensor: Tensor) -> int:
    """How many tensors hold its memory, and what asks."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _weight(layer: nn.Module) -> nn.Parameter:
    weight = layer._parameters["weight"]
    assert weight is not None
    return weight


def _rows(layer: nn.Module) -> Tensor:
    """``[out, in]``, whichever way the layer keeps it."""
    weight = _weight(layer).detach()
    return weight.t() if type(layer) is Conv1D else weight


def bits_of(columns: int, weights: Quantized, sensitive: bool = False) -> Literal[4, 8]:
    """Of a quantized weight. Columns that are no whole blocks of int4 weights take 8."""
    return 4 if weights == "int4" and columns % _LEAST_INT4_GROUP == 0 and not sensitive else 8


def quantize(rows: Tensor, bits: Literal[4, 8]) -> tuple[Tensor, Tensor]:
    """The weight and its scales, ``[out, groups]``, of ``[out, in]``; groups of about `_GROUP` columns."""
    columns, unit = rows.shape[1], _LEAST_INT4_GROUP if bits == 4 else 1
    sizes = itertools.chain(range(_GROUP, _LEAST_GROUP - 1, -1), range(_GROUP + 1, columns))
    return quantize_weight(rows, next((s for s in sizes if columns % s == 0 and s % unit == 0), columns), bits)


class Look(enum.Enum):
    """How closely the layers' tensors are looked at for changes that torch does not count: through ``.data``.

    Attributes:
        NONE: not at all.
        FEW_ROWS: at a run of numbers in each of 64 rows.
        MANY_ROWS: at one in each row of what makes logits, of others in one row of eight, and in 64 at least.
    """

    NONE = enum.auto()
    FEW_ROWS = enum.auto()
    MANY_ROWS = enum.auto()


class Looks:
    """How closely one who has copies of tensors looks at these before it reads the copies: at many rows in a prompt,
    and once after anybody's prompt, of which it may see the last token alone; else at a few.
    """

    _prompts: ClassVar[int] = 0

    def __init__(self) -> None:
        self._last = -1

    def at(self, tokens: int) -> Look:
        """In a call with so many tokens; several are a prompt."""
        if tokens > 1:
            self.count_prompt()
        seen, self._last = self._last == Looks._prompts, Looks._prompts
        return Look.FEW_ROWS if seen else Look.MANY_ROWS

    @staticmethod
    def count_prompt() -> None:
        """Let all others look at many rows when they are called next."""
        Looks._prompts += 1


class Samples:
    """Some numbers of tensors, which tell whether they have changed.

    Args:
        tensors: any.
        one_of: a close look is at one row of so many.
    """

    def __init__(self, tensors: Iterable[Tensor] = (), one_of: int = _ONE_OF) -> None:
        kept, self._one_of = [*tensors], one_of
        self._found = {look: self._of(kept, look) for look in (Look.FEW_ROWS, Look.MANY_ROWS)}

    def differ(self, tensors: Iterable[Tensor], look: Look = Look.MANY_ROWS) -> bool:
        """Whether these have others."""
        if look is Look.NONE:
            return False
        now, then = self._of([*tensors], look), self._found[look]
        if isinstance(now, bytes) or isinstance(then, bytes):
            return now != then
        return len(now) != len(then) or not all(map(torch.equal, now, then))

    def _of(self, tensors: list[Tensor], look: Look) -> bytes | list[Tensor]:
        one_of = self._one_of if look is Look.MANY_ROWS else 0
        found = None if decoder_layer.samples is None else decoder_layer.samples(tensors, one_of)
        return [_sample(each.detach(), one_of) for each in tensors] if found is None else found


def _sample(tensor: Tensor, one_of: int) -> Tensor:
    """Runs of rows, ``[rows, run]``, each in another place of its row. As ``kernels/host/as_found.h``."""
    rows = tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() > 1 and tensor.numel() else tensor.reshape(-1, 1)
    run = math.gcd(rows.shape[1], _RUN)
    places = rows.shape[1] // run
    count = max(-(-rows.shape[0] // one_of) if one_of else 0, min(rows.shape[0], _FEW_ROWS))
    turns = torch.arange(count, device=rows.device)
    which = turns * (rows.shape[0] - 1) // max(count - 1, 1)
    return torch.unflatten(rows, 1, (places, run))[which, turns * _step_of(places) % places]


@functools.cache
def _step_of(places: int) -> int:
    """From one place to the next. All have their turn, and of few turns no part of a matrix has none: multiples of the
    golden ratio, without their whole parts, lie evenly.
    """
    steps = range(max(places * 618 // 1000, 1), places + 2)
    return next(step for step in steps if math.gcd(step, places) == 1)


def _move(arena: Arena, parts: Sequence[Tensor], set_part: Callable[[int, Tensor], None] | None) -> Tensor:
    """One tensor of the arena with all parts, one after the other; `set_part` is given each."""
    sizes = [part.shape[0] for part in parts]
    whole = arena.empty((sum(sizes), *parts[0].shape[1:]), parts[0].dtype)
    for index, view in enumerate(torch.split(whole, sizes)):
        view.copy_(parts[index])
        if set_part is not None:
            set_part(index, _by_itself(view))
    return whole


def _by_itself(part: Tensor) -> Tensor:
    """The same memory as a storage of its own: of several parameters in one storage, what saves models keeps one."""
    start = part.storage_offset() * part.itemsize
    storage = part.untyped_storage()[start : start + part.nbytes]  # which keeps the whole
    return part.new_empty(0).set_(storage, 0, part.shape, part.stride())  # type: ignore[call-overload, unused-ignore]  # torch takes an untyped storage


def _give_back(matrix: Matrix) -> None:
    """Memory of its own for each parameter that was moved and still is where it was moved to."""
    held = matrix.held
    with torch.inference_mode(False), torch.no_grad():  # whose tensors could not be trained
        for parameter, address in zip(held.moved, held.addresses, strict=True):
            if not held.counts(parameter) and parameter.data_ptr() == address:
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)


__all__ = [
    "Arena",
    "Contents",
    "Look",
    "Looks",
    "Matrix",
    "Packer",
    "PlainMatrix",
    "Quantized",
    "Samples",
    "Weights",
    "bits_of",
    "padded",
    "quantize",
]
