"""Linear layers that came in 4 bits, from GPTQ, AWQ or torchao: what their tensors stand for, in our op's layout.

Weights are ``scale * (level - zero)``, with a scale and a zero point for each group of inputs. Eight levels are in an
int32; the first of them is in its lowest bits:

- GPTQ (gptqmodel, AutoGPTQ): ``qweight`` ``[in / 8, out]``, ``qzeros`` ``[groups, out / 8]``, ``scales``
  ``[groups, out]``, ``g_idx`` ``[in]``, the group of each input. Format 2 of ``qzeros`` has the zero points, format 1
  what is one less, and no tensor says which it is.
- AWQ (gptqmodel, AutoAWQ; "gemm"): ``qweight`` ``[in, out / 8]``, the others alike, without ``g_idx``. Of eight outputs
  a word has 0, 2, 4, 6, 1, 3, 5, 7.
- torchao's `IntxUnpackedToInt8Tensor` of ``torch.int4``, as a plain layer's weight: levels -8 to 7 in bytes.

The code of these layers is not known here. So names, dtypes and shapes must be a layout's, and then the layer itself is
called on a few inputs: it is taken over if it has computed what its tensors stand for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ds_plugin_sdk.integrations.transformers.understood import (
    NotUnderstoodError,
    Place,
    Snapshot,
    check_only_its_class,
    name_of,
)
from ds_plugin_sdk.integrations.transformers.weights import (
    Arena,
    Contents,
    Matrix,
    PlainMatrix,
    Weights,
    padded,
    sample,
)
from ds_plugin_sdk.ops.linear import pack_int4

_BUFFERS = ("qweight", "qzeros", "scales")
_OF_TORCHAO = ("qdata", "scale", "zero_point")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OF_A_WORD = 8
# Where in a word of AWQ's output j of eight is.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_BLOCK = 64
_ROWS_AT_ONCE = 512


class Int4(NamedTuple):
    """Weights of 4 bits: ``scales * (levels - zeros)``.

    Attributes:
        levels: ``[rows, columns]``, uint8, 0 to 15.
        scales, zeros: ``[rows, groups]``, float32.
    """

    levels: Tensor
    scales: Tensor
    zeros: Tensor

    def dequantized(self) -> Tensor:
        """``[rows, columns]``, float64."""
        (rows, columns), groups = self.levels.shape, self.scales.shape[1]
        levels = self.levels.to(torch.float64).reshape(rows, groups, columns // groups)
        return (self.scales.to(torch.float64).unsqueeze(2) * (levels - self.zeros.unsqueeze(2))).flatten(1)

    def products(self, inputs: Tensor) -> Tensor:
        """``inputs @ weights.T``, float64; some rows of weights at a time are in memory."""
        some = zip(*(torch.split(each, _ROWS_AT_ONCE) for each in self), strict=True)
        return torch.cat([inputs @ Int4(*parts).dequantized().t() for parts in some], dim=1)


def read_gptq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> list[Int4]:
    """What a layer of GPTQ may stand for.

    Args:
        qweight: ``[in / 8, out]``, int32.
        qzeros: ``[groups, out / 8]``, int32.
        scales: ``[groups, out]``.

    Returns:
        For format 2; for format 1, where 15 stands for 0, as gptqmodel has it; and for 16, as others have it.
    """
    levels = _nibbles(qweight).permute(1, 0, 2).flatten(1)
    zeros, wide = _nibbles(qzeros).flatten(1).t(), scales.t().to(torch.float32)
    return [Int4(levels, wide, each.to(torch.float32)) for each in (zeros, (zeros + 1) & 15, zeros + 1)]


def read_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> list[Int4]:
    """What a layer of AWQ stands for.

    Args:
        qweight: ``[in, out / 8]``, int32.
        qzeros: ``[groups, out / 8]``, int32.
        scales: ``[groups, out]``.
    """
    levels, zeros = (_nibbles(words)[..., _AWQ_PLACES].flatten(1).t() for words in (qweight, qzeros))
    return [Int4(levels, scales.t().to(torch.float32), zeros.to(torch.float32))]


def read_torchao(qdata: Tensor, scale: Tensor, zero_point: Tensor) -> list[Int4]:
    """What torchao's `IntxUnpackedToInt8Tensor` stands for.

    Args:
        qdata: ``[out, in]``, int8, -8 to 7.
        scale: ``[out, groups]``.
        zero_point: the same, int8 or a floating-point dtype.
    """
    return [Int4((qdata + 8).to(torch.uint8), scale.to(torch.float32), zero_point.to(torch.float32) + 8)]


def _nibbles(words: Tensor) -> Tensor:
    """``[..., 8]``, uint8, of int32."""
    return torch.stack([(words >> shift & 15).to(torch.uint8) for shift in range(0, 32, 4)], dim=-1)


# ---------------------------------------------------------------------- layers
def is_int4(layer: nn.Module) -> bool:
    """Whether a layer has the tensors of one that came in 4 bits; what is in them may still not be known."""
    return all(name in layer._buffers for name in _BUFFERS) or _is_of_torchao(layer._parameters.get("weight"))


def matrix_of(*layers: nn.Module, sensitive: bool = False) -> Matrix:
    """The weights of linear layers as one matrix; arguments and errors as for `PlainMatrix`."""
    if not any(map(is_int4, layers)):
        return PlainMatrix(*layers, sensitive=sensitive)
    with torch.inference_mode(False), torch.no_grad():
        return Int4Matrix(*layers)


def _is_of_torchao(weight: Tensor | None) -> bool:
    kind = type(weight)
    return kind.__module__.startswith("torchao.") and kind.__name__ == "IntxUnpackedToInt8Tensor"


class _Source(NamedTuple):
    """What a layer's tensors may stand for, one of which is right; the dtype of its scales, and of its inputs."""

    candidates: list[Int4]
    dtype: torch.dtype

    def kind(self) -> tuple[Any, ...]:
        """What is the same for layers in one matrix."""
        first = self.candidates[0]
        return self.dtype, first.levels.shape[1], first.scales.shape[1]


def _source_of(layer: nn.Module) -> _Source:
    if _is_of_torchao(layer._parameters.get("weight")):
        return _torchao(layer)
    if is_int4(layer):
        return _gptq_or_awq(layer)
    raise NotUnderstoodError(f"{name_of(layer)} is beside layers in 4 bits and is none")


def _gptq_or_awq(layer: nn.Module) -> _Source:
    buffers = layer._buffers
    tensors = [_checked(buffers[name], name) for name in _BUFFERS]
    qweight, qzeros, scales = tensors
    if qweight.dtype != torch.int32 or qzeros.dtype != torch.int32 or any(each.dim() != 2 for each in tensors):
        raise NotUnderstoodError("its qweight and qzeros are no matrices of int32")
    groups, rows = scales.shape
    of_gptq, of_awq = qweight.shape[1] == rows, qweight.shape[1] * _OF_A_WORD == rows
    if not (of_gptq or of_awq) or rows % _OF_A_WORD or qzeros.shape != (groups, rows // _OF_A_WORD):
        raise NotUnderstoodError("the shapes of its qweight, qzeros and scales are in no layout that is known")
    read, columns = (read_gptq, qweight.shape[0] * _OF_A_WORD) if of_gptq else (read_awq, qweight.shape[0])
    _check_groups(columns, groups)
    order = buffers.get("g_idx")
    if order is not None and order.numel() and not _is_in_order(order, columns // groups, columns):
        raise NotUnderstoodError("its inputs are in another order than its groups (desc_act)")
    return _Source(read(*tensors), scales.dtype)


def _torchao(layer: nn.Module) -> _Source:
    weight = layer._parameters["weight"]
    assert weight is not None
    own = vars(weight)
    tensors = [_checked(own.get(name), f"weight's {name}") for name in _OF_TORCHAO]
    qdata, scale, zero_point = tensors
    if str(own.get("target_dtype")) != "torch.int4" or own.get("activation_quantization") is not None:
        raise NotUnderstoodError("its weights are not in 4 bits, or its inputs are quantized too")
    if qdata.dtype != torch.int8 or qdata.dim() != 2 or scale.dim() != 2 or scale.shape != zero_point.shape:
        raise NotUnderstoodError("the tensors of its weight are not as torchao has them")
    if scale.shape[0] != qdata.shape[0]:
        raise NotUnderstoodError("several of its outputs share a scale")
    _check_groups(qdata.shape[1], scale.shape[1])
    return _Source(read_torchao(*tensors), weight.dtype)


def _checked(tensor: object, name: str) -> Tensor:
    """The tensor on the host, if it is a plain one."""
    if type(tensor) not in (Tensor, nn.Parameter) or not isinstance(tensor, Tensor) or tensor.is_meta:
        raise NotUnderstoodError(f"its {name} is {type(tensor).__name__}, no plain tensor")
    if tensor.is_inference():
        raise NotUnderstoodError(f"its {name} was made in inference mode, where torch does not count changes")
    if tensor.is_floating_point() and tensor.dtype not in _DTYPES:
        raise NotUnderstoodError(f"its {name} is {tensor.dtype}")
    return tensor.detach().cpu()


def _check_groups(columns: int, groups: int) -> None:
    if groups == 0 or columns == 0 or columns % (_BLOCK * groups):
        raise NotUnderstoodError(f"its {columns} inputs are in {groups} groups, which are no multiples of {_BLOCK}")


def _is_in_order(g_idx: Tensor, width: int, columns: int) -> bool:
    return torch.equal(g_idx.cpu().to(torch.int64), torch.arange(columns) // width)


# ---------------------------------------------------------------------- matrices
class Int4Matrix(Matrix):
    """That of layers that came in 4 bits: copies, which serve as long as no tensor of the layers changes.

    Args:
        layers: each with the layout of one of the makers.

    Raises:
        NotUnderstoodError: the layout of a layer is not known, or the layer does not compute what its tensors say.
    """

    def __init__(self, *layers: nn.Module) -> None:
        self.layers = layers
        sources = [_source_of(layer) for layer in layers]
        self.dtype = sources[0].dtype
        self.device = _device_of(layers[0])
        biases = [_bias_of(layer) for layer in layers]
        if len({source.kind() for source in sources}) != 1:
            raise NotUnderstoodError("its layers in 4 bits have several dtypes, or groups of several sizes")
        if any(bias is not None and bias.dtype != self.dtype for bias in biases):
            raise NotUnderstoodError(f"its bias is not {self.dtype}, as its scales are")
        # A layer may change its tensors when it is called: what was read before is what counts.
        found = [_that_it_computes(layer, source) for layer, source in zip(layers, sources, strict=True)]
        self._rows = [each.levels.shape[0] for each in found]
        self.contents = self._packed(found, biases)
        self.held = Snapshot(place for layer in layers for place in _places_of(layer))
        if any(tensor.device != self.device for tensor in self.held.moved):
            raise NotUnderstoodError("its tensors are on several devices")
        self._samples = [sample(tensor) for tensor in self.held.moved]
        self._doubted = self._changed = False

    @property
    def parameters(self) -> Sequence[Tensor]:
        return self.held.moved

    @property
    def rows(self) -> list[int]:
        return self._rows

    def bytes(self, weights: Weights) -> int:
        return 0

    def pack(self, arena: Arena, weights: Weights) -> None:
        """The contents have memory of their own since they were read."""

    def doubt(self) -> None:
        self._doubted = True

    def follow(self, compare: bool) -> bool:
        """As `Matrix.follow`; False for good after a change."""
        compare, self._doubted = compare or self._doubted, False
        self._changed = self._changed or not self.held.holds() or (compare and self._differs())
        return not self._changed and not any(layer.training for layer in self.layers)

    def _differs(self) -> bool:
        return not all(torch.equal(sample(now), then) for now, then in zip(self.held.moved, self._samples, strict=True))

    def _packed(self, found: Sequence[Int4], biases: Sequence[Tensor | None]) -> Contents:
        pairs, scales, offsets = pack_int4(*(torch.cat(parts) for parts in zip(*found, strict=True)))
        arena = Arena(padded(pairs.nbytes), self.device)
        bias = None
        if any(each is not None for each in biases):
            parts = [
                torch.zeros(rows, dtype=self.dtype) if each is None else each.detach().cpu()
                for rows, each in zip(self._rows, biases, strict=True)
            ]
            bias = torch.cat(parts).to(self.device)
        return Contents(
            arena.empty(pairs.shape, pairs.dtype).copy_(pairs),
            bias,
            scales.contiguous().to(self.device),
            None if offsets is None else offsets.contiguous().to(self.device),
        )


def _places_of(layer: nn.Module) -> list[Place]:
    """Of all tensors that a layer's results may depend on."""
    places = [Place(layer._buffers, name, True, True) for name in layer._buffers]
    for name, parameter in layer._parameters.items():
        of_torchao = _is_of_torchao(parameter)
        places.append(Place(layer._parameters, name, not of_torchao, not of_torchao))
        if of_torchao:
            places += [Place(vars(parameter), inner, True, True) for inner in _OF_TORCHAO]
    if any(place.counted and place.tensor is not None and place.tensor.is_inference() for place in places):
        raise NotUnderstoodError("it makes tensors in inference mode, where torch does not count changes")
    return places


def _device_of(layer: nn.Module) -> torch.device:
    device: torch.device = next(place.tensor.device for place in _places_of(layer) if place.tensor is not None)
    return device


def _bias_of(layer: nn.Module) -> Tensor | None:
    bias = layer._parameters.get("bias")
    return layer._buffers.get("bias") if bias is None else bias


# ---------------------------------------------------------------------- what a layer computes
# A one among zeros is that large, so that a bias does not hide a weight.
_ONE = 64.0
_RANDOM_INPUTS = 4


def _that_it_computes(layer: nn.Module, source: _Source) -> Int4:
    """Of what a layer may stand for, that which it computes.

    Inputs with a one in each group show every zero point and scale of every output, within what the layer's dtype may
    round; random ones show all levels at their places, and by their large elements whether the layer rounds its inputs.

    Raises:
        NotUnderstoodError: it computes something else.
    """
    check_only_its_class(layer)
    bias, first = _bias_of(layer), source.candidates[0]
    inputs = _inputs(first, source.dtype)
    outputs = _outputs(layer, inputs)
    if outputs.dtype != source.dtype or outputs.shape != (len(inputs), len(first.levels)):
        raise NotUnderstoodError(f"it gives {outputs.dtype} {list(outputs.shape)}, as no linear layer does")
    inputs, shift = inputs.to(torch.float64), torch.zeros(()) if bias is None else bias.detach().cpu().to(torch.float64)
    # Candidates differ in their zero points, which count by the sums of the inputs over each group.
    without_zeros = first._replace(zeros=torch.zeros_like(first.zeros)).products(inputs) + shift
    sums = inputs.reshape(len(inputs), first.scales.shape[1], -1).sum(2)
    for each in source.candidates:
        expected = without_zeros - sums @ (each.scales.to(torch.float64) * each.zeros).t()
        if _agree(outputs, expected, each.scales, shift):
            return each
    raise NotUnderstoodError("it does not compute what its tensors stand for in the layouts that are known")


def _inputs(weights: Int4, dtype: torch.dtype) -> Tensor:
    """A one in each group, at another place in each; and random ones, of which two have a large element."""
    columns, groups = weights.levels.shape[1], weights.scales.shape[1]
    width = columns // groups
    inputs = torch.zeros(groups + _RANDOM_INPUTS, columns)
    for group in range(groups):
        inputs[group, group * width + 7 * group % width] = _ONE
    inputs[groups:] = torch.randn(_RANDOM_INPUTS, columns, generator=torch.Generator().manual_seed(0))
    inputs[groups + _RANDOM_INPUTS // 2 :, 0] = 32
    return inputs.to(dtype)


def _outputs(layer: nn.Module, inputs: Tensor) -> Tensor:
    """What the layer's own code makes of inputs."""
    device = _device_of(layer)
    try:
        outputs = type(layer).forward(layer, inputs.to(device))
    except Exception as error:  # others' code; the layer stays as it was
        raise NotUnderstoodError(f"it could not be called: {error}") from error
    if type(outputs) is not Tensor:
        raise NotUnderstoodError(f"it gives a {type(outputs).__name__}")
    return outputs.cpu()


def _agree(outputs: Tensor, expected: Tensor, scales: Tensor, bias: Tensor) -> bool:
    """Whether a layer's outputs are what is expected, but for its dtype's rounding of weights, sums and results."""
    groups, eps = scales.shape[1], torch.finfo(outputs.dtype).eps
    error = outputs.to(torch.float64) - expected
    # A level, a zero point and their difference are at most 16 scales each.
    sizes = 32 * _ONE * scales.to(torch.float64).abs().t() + bias.abs()
    of_ones = error[:groups].abs() <= eps * sizes
    of_random = error[groups:].norm() <= (2 * eps + 2**-16) * expected[groups:].norm()
    return bool(of_ones.all() and of_random)


__all__ = ["Int4", "Int4Matrix", "is_int4", "matrix_of", "read_awq", "read_gptq", "read_torchao"]
