"""Linear layers that came in 4 bits, from GPTQ, AWQ or torchao, in our op's layout.

The code of these layers is not known here. So names, dtypes and shapes must be a layout's (`int4_layouts`), and then
a copy of the layer is called on a few inputs: it is taken over if that has computed what its tensors stand for. A copy,
for layers may lay out their tensors anew when they are called, for inputs of that dtype alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ds_plugin_sdk.integrations.transformers.as_found import Place, Snapshot
from ds_plugin_sdk.integrations.transformers.int4_layouts import (
    DTYPES,
    OF_TORCHAO,
    Int4,
    candidates_of,
    is_int4,
    is_of_torchao,
    order_of,
    plain,
)
from ds_plugin_sdk.integrations.transformers.understood import NotUnderstoodError, check_only_its_class
from ds_plugin_sdk.integrations.transformers.weights import (
    Arena,
    Contents,
    Look,
    Matrix,
    PlainMatrix,
    Samples,
    Weights,
    padded,
)
from ds_plugin_sdk.ops.linear import pack_int4


def matrix_of(*layers: nn.Module, dtype: torch.dtype, sensitive: bool = False) -> Matrix:
    """The weights of linear layers as one matrix; arguments and errors as for `PlainMatrix` and `Int4Matrix`."""
    if not any(map(is_int4, layers)):
        return PlainMatrix(*layers, sensitive=sensitive)
    with torch.inference_mode(False), torch.no_grad():
        return Int4Matrix(*layers, dtype=dtype)


class Int4Matrix(Matrix):
    """That of layers that came in 4 bits: copies, which serve as long as no tensor of the layers changes.

    Groups of whole blocks of our layout stay in 4 bits. Others, of 32 inputs, are kept in 8, with the same numbers.

    Args:
        layers: each with the layout of one of the makers.
        dtype: of the inputs that they are given, which may not be that of their scales.

    Raises:
        NotUnderstoodError: the layout of a layer is not known, or the layer does not compute what its tensors say.
    """

    def __init__(self, *layers: nn.Module, dtype: torch.dtype) -> None:
        if dtype not in DTYPES:
            raise NotUnderstoodError(f"its inputs are {dtype}")
        self.layers, self.dtype = layers, dtype
        candidates = [candidates_of(layer) for layer in layers]
        self.device = _device_of(layers[0])
        biases = [_bias_of(layer) for layer in layers]
        sizes = {(each.levels.shape[1], each.scales.shape[1]) for each, *_ in candidates}
        if len(sizes) != 1:
            raise NotUnderstoodError("its layers in 4 bits have inputs, or groups, of several sizes")
        order = _order_of_all(layers, *sizes.pop())
        if order is not None:
            candidates = [_in_order(each, order) for each in candidates]
        found = [_that_it_computes(*each, order, dtype) for each in zip(layers, candidates, biases, strict=True)]
        self.order = None if order is None else order.to(self.device)
        self._rows = [each.levels.shape[0] for each in found]
        self.contents = self._packed(found, biases)
        self.held = Snapshot(place for layer in layers for place in _places_of(layer))
        if any(tensor.device != self.device for tensor in self.held.moved):
            raise NotUnderstoodError("its tensors are on several devices")
        self._samples = Samples(self.held.moved)
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

    def follow(self, look: Look) -> bool:
        """As `Matrix.follow`; False for good after a change."""
        look, self._doubted = Look.MANY_ROWS if self._doubted else look, False
        self._changed = self._changed or not self.held.holds() or self._samples.differ(self.held.moved, look)
        return not self._changed and not any(layer.training for layer in self.layers)

    def _packed(self, found: Sequence[Int4], biases: Sequence[Tensor | None]) -> Contents:
        whole = Int4(*(torch.cat(parts) for parts in zip(*found, strict=True)))
        weight, scales, offsets = pack_int4(*whole) if whole.in_blocks else (whole.steps(), whole.scales, None)
        arena = Arena(padded(weight.nbytes), self.device)
        bias = None
        if any(each is not None for each in biases):
            parts = [
                torch.zeros(rows, dtype=self.dtype, device="cpu") if each is None else each.to(self.dtype)
                for rows, each in zip(self._rows, biases, strict=True)
            ]
            bias = torch.cat(parts).to(self.device)
        return Contents(
            arena.empty(weight.shape, weight.dtype).copy_(weight),
            bias,
            scales.contiguous().to(self.device),
            None if offsets is None else offsets.contiguous().to(self.device),
        )


def _places_of(layer: nn.Module) -> list[Place]:
    """Of all tensors that a layer's results may depend on."""
    places = [Place(layer._buffers, name, True, True) for name in layer._buffers]
    for name, parameter in layer._parameters.items():
        of_torchao = is_of_torchao(parameter)
        places.append(Place(layer._parameters, name, not of_torchao, not of_torchao))
        if of_torchao:
            places += [Place(vars(parameter), inner, True, True) for inner in OF_TORCHAO]
    if any(place.counted and place.tensor is not None and place.tensor.is_inference() for place in places):
        raise NotUnderstoodError("it makes tensors in inference mode, where torch does not count changes")
    return places


def _order_of_all(layers: Sequence[nn.Module], columns: int, groups: int) -> Tensor | None:
    """In which their inputs are to be, which is one."""
    first, *others = (order_of(layer, columns, groups) for layer in layers)
    if not all(other is first if other is None or first is None else torch.equal(first, other) for other in others):
        raise NotUnderstoodError("its layers in 4 bits have inputs in several orders (desc_act)")
    return first


def _in_order(candidates: Sequence[Int4], order: Tensor) -> list[Int4]:
    """With their columns by group; they differ in their zero points alone."""
    levels = candidates[0].levels[:, order]
    return [each._replace(levels=levels) for each in candidates]


def _device_of(layer: nn.Module) -> torch.device:
    device: torch.device = next(place.tensor.device for place in _places_of(layer) if place.tensor is not None)
    return device


def _bias_of(layer: nn.Module) -> Tensor | None:
    bias: Tensor | None = layer._parameters.get("bias")
    if bias is None:
        bias = layer._buffers.get("bias")
    return None if bias is None else plain(bias, "bias")


# ---------------------------------------------------------------------- what a layer computes
# A one among zeros is that large, so that a bias does not hide a weight.
_ONE = 64.0
_RANDOM_INPUTS = 4


def _that_it_computes(
    layer: nn.Module, candidates: Sequence[Int4], bias: Tensor | None, order: Tensor | None, dtype: torch.dtype
) -> Int4:
    """Of what a layer may stand for, that which it computes.

    Inputs with a one in each group show every zero point and scale of every output, within what `dtype` may round;
    random ones show all levels at their places, and by their large elements whether the layer rounds its inputs.

    Raises:
        NotUnderstoodError: it computes something else.
    """
    check_only_its_class(layer)
    first = candidates[0]
    inputs = _inputs(first, dtype)
    outputs = _outputs(layer, inputs if order is None else inputs[:, order.argsort()])
    if outputs.dtype != dtype or outputs.shape != (len(inputs), len(first.levels)):
        raise NotUnderstoodError(f"it gives {outputs.dtype} {list(outputs.shape)}, as no linear layer does")
    inputs, shift = inputs.to(torch.float64), torch.zeros((), device="cpu") if bias is None else bias.to(torch.float64)
    # Candidates differ in their zero points, which count by the sums of the inputs over each group.
    without_zeros = first._replace(zeros=torch.zeros_like(first.zeros)).products(inputs) + shift
    sums = inputs.reshape(len(inputs), first.scales.shape[1], -1).sum(2)
    for each in candidates:
        expected = without_zeros - sums @ (each.scales.to(torch.float64) * each.zeros).t()
        if _agree(outputs, expected, each.scales, shift):
            return each
    raise NotUnderstoodError("it does not compute what its tensors stand for in the layouts that are known")


def _inputs(weights: Int4, dtype: torch.dtype) -> Tensor:
    """A one in each group, at another place in each; and random ones, of which two have a large element."""
    columns, groups = weights.levels.shape[1], weights.scales.shape[1]
    width = columns // groups
    inputs = torch.zeros(groups + _RANDOM_INPUTS, columns, dtype=torch.float32, device="cpu")
    for group in range(groups):
        inputs[group, group * width + 7 * group % width] = _ONE
    generator = torch.Generator("cpu").manual_seed(0)
    inputs[groups:] = torch.randn(inputs[groups:].shape, dtype=torch.float32, device="cpu", generator=generator)
    inputs[groups + _RANDOM_INPUTS // 2 :, 0] = 32
    return inputs.to(dtype)


def _outputs(layer: nn.Module, inputs: Tensor) -> Tensor:
    """What the layer's own code makes of inputs. The layer stays as it is."""
    device = _device_of(layer)
    try:
        outputs = type(layer).forward(copy.deepcopy(layer), inputs.to(device))
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


__all__ = ["Int4Matrix", "matrix_of"]
