"""Linear layers that came in 4 bits, from GPTQ, AWQ or torchao: what their tensors stand for, in our op's layout.

Weights are ``scale * (level - zero)``, with a scale and a zero point for each group of inputs. Eight levels are in an
int32; the first of them is in its lowest bits:

- GPTQ (gptqmodel, AutoGPTQ): ``qweight`` ``[in / 8, out]``, ``qzeros`` ``[groups, out / 8]``, ``scales``
  ``[groups, out]``, ``g_idx`` ``[in]``, the group of each input: of its place, or of any where the inputs that count
  most were quantized first (desc_act). Format 2 of ``qzeros`` has the zero points, format 1 what is one less, and no
  tensor says which it is.
- AWQ (gptqmodel, AutoAWQ; "gemm"): ``qweight`` ``[in, out / 8]``, the others alike, without ``g_idx``. Of eight outputs
  a word has 0, 2, 4, 6, 1, 3, 5, 7.
- torchao's `IntxUnpackedToInt8Tensor` of ``torch.int4``, as a plain layer's weight: levels -8 to 7 in bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ds_plugin_sdk.integrations.transformers.understood import NotUnderstoodError, name_of

_BUFFERS = ("qweight", "qzeros", "scales")
OF_TORCHAO = ("qdata", "scale", "zero_point")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OF_A_WORD = 8
# Where in a word of AWQ's output j of eight is.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# Of the layout in 4 bits, and of what is taken over: groups of an odd multiple of this are kept in 8 bits.
_BLOCK, _LEAST_GROUP = 64, 32
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

    @property
    def in_blocks(self) -> bool:
        """Whether groups are of whole blocks, as `pack_int4` takes them."""
        return self.levels.shape[1] % (_BLOCK * self.scales.shape[1]) == 0

    def steps(self) -> Tensor:
        """``levels - zeros``, ``[rows, columns]``, int8: the same weights with no zero points.

        Raises:
            NotUnderstoodError: zero points are no integers.
        """
        if not torch.equal(self.zeros, self.zeros.round()):
            raise NotUnderstoodError(f"its groups are no multiples of {_BLOCK} inputs, and its zero points no integers")
        groups = self.levels.to(torch.int8).reshape(*self.scales.shape, -1)
        return (groups - self.zeros.to(torch.int8).unsqueeze(2)).flatten(1)

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


def is_int4(layer: nn.Module) -> bool:
    """Whether a layer has the tensors of one that came in 4 bits; what is in them may still not be known."""
    return all(name in layer._buffers for name in _BUFFERS) or is_of_torchao(layer._parameters.get("weight"))


def is_of_torchao(weight: Tensor | None) -> bool:
    """Whether a parameter is torchao's `IntxUnpackedToInt8Tensor`, of any number of bits."""
    kind = type(weight)
    return kind.__module__.startswith("torchao.") and kind.__name__ == "IntxUnpackedToInt8Tensor"


def order_of(layer: nn.Module, columns: int, groups: int) -> Tensor | None:
    """The inputs of a layer by group, ``[columns]``, int64 on the host; None if their groups are those of their places.

    Raises:
        NotUnderstoodError: not every group has as many inputs.
    """
    g_idx = layer._buffers.get("g_idx")
    if g_idx is None or not g_idx.numel():
        return None
    of = plain(g_idx, "g_idx").to(torch.int64).flatten()
    sorted_groups, order = of.sort(stable=True)
    in_place = torch.arange(columns, device="cpu") // (columns // groups)
    if not torch.equal(sorted_groups, in_place):
        raise NotUnderstoodError("its g_idx (desc_act) does not give each group as many inputs")
    return None if torch.equal(of, in_place) else order


def candidates_of(layer: nn.Module) -> list[Int4]:
    """What a layer's tensors may stand for, one of which is right; all have groups of the same size.

    Columns are in the layer's own order, see `order_of`.

    Raises:
        NotUnderstoodError: they are in no layout that is known.
    """
    if is_of_torchao(layer._parameters.get("weight")):
        return _torchao(layer)
    if is_int4(layer):
        return _gptq_or_awq(layer)
    raise NotUnderstoodError(f"{name_of(layer)} is beside layers in 4 bits and is none")


def _gptq_or_awq(layer: nn.Module) -> list[Int4]:
    buffers = layer._buffers
    tensors = [plain(buffers[name], name) for name in _BUFFERS]
    qweight, qzeros, scales = tensors
    if qweight.dtype != torch.int32 or qzeros.dtype != torch.int32 or any(each.dim() != 2 for each in tensors):
        # Layers of gptqmodel for CPUs do so when they are called for the first time.
        raise NotUnderstoodError(
            "its qweight and qzeros are no matrices of int32; if its first call has laid them out anew, accelerate the "
            "model before that"
        )
    groups, rows = scales.shape
    of_gptq, of_awq = qweight.shape[1] == rows, qweight.shape[1] * _OF_A_WORD == rows
    if not (of_gptq or of_awq) or rows % _OF_A_WORD or qzeros.shape != (groups, rows // _OF_A_WORD):
        raise NotUnderstoodError("the shapes of its qweight, qzeros and scales are in no layout that is known")
    read, columns = (read_gptq, qweight.shape[0] * _OF_A_WORD) if of_gptq else (read_awq, qweight.shape[0])
    _check_groups(columns, groups)
    return read(*tensors)


def _torchao(layer: nn.Module) -> list[Int4]:
    weight = layer._parameters["weight"]
    assert weight is not None
    own = vars(weight)
    tensors = [plain(own.get(name), f"weight's {name}") for name in OF_TORCHAO]
    qdata, scale, zero_point = tensors
    if str(own.get("target_dtype")) != "torch.int4" or own.get("activation_quantization") is not None:
        raise NotUnderstoodError("its weights are not in 4 bits, or its inputs are quantized too")
    if qdata.dtype != torch.int8 or qdata.dim() != 2 or scale.dim() != 2 or scale.shape != zero_point.shape:
        raise NotUnderstoodError("the tensors of its weight are not as torchao has them")
    if scale.shape[0] != qdata.shape[0]:
        raise NotUnderstoodError("several of its outputs share a scale")
    _check_groups(qdata.shape[1], scale.shape[1])
    return read_torchao(*tensors)


def plain(tensor: object, name: str) -> Tensor:
    """The tensor on the host; `NotUnderstoodError` if it is no plain one of a dtype that is known."""
    if type(tensor) not in (Tensor, nn.Parameter) or not isinstance(tensor, Tensor) or tensor.is_meta:
        raise NotUnderstoodError(f"its {name} is {type(tensor).__name__}, no plain tensor")
    if tensor.is_inference():
        raise NotUnderstoodError(f"its {name} was made in inference mode, where torch does not count changes")
    if tensor.is_floating_point() and tensor.dtype not in DTYPES:
        raise NotUnderstoodError(f"its {name} is {tensor.dtype}")
    return tensor.detach().cpu()


def _check_groups(columns: int, groups: int) -> None:
    if groups == 0 or columns == 0 or columns % (_LEAST_GROUP * groups):
        raise NotUnderstoodError(
            f"its {columns} inputs are in {groups} groups, which are no multiples of {_LEAST_GROUP}"
        )


__all__ = [
    "DTYPES",
    "OF_TORCHAO",
    "Int4",
    "candidates_of",
    "is_int4",
    "is_of_torchao",
    "order_of",
    "plain",
    "read_awq",
    "read_gptq",
    "read_torchao",
]
