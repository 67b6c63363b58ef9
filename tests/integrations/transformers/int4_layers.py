"""Linear layers in 4 bits as their makers define them, written from the layouts' definitions, for the tests.

None of this is the SDK's: levels are put into words one by one, and forwards take them out again one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# The outputs of eight that a word of AWQ has, from its lowest bits up.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IN_ORDER = tuple(range(8))


def words_of(levels: Tensor, dim: int, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """Eight levels along a dimension in each int32."""
    parts = levels.to(torch.int64).movedim(dim, 0).unflatten(0, (-1, 8)) & 15
    words = sum(parts[:, which] << 4 * place for place, which in enumerate(order))
    return torch.as_tensor(words).to(torch.int32).movedim(0, dim).contiguous()


def levels_of(words: Tensor, dim: int, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """The inverse."""
    moved = words.movedim(dim, 0)
    levels = torch.empty(moved.shape[0], 8, *moved.shape[1:], dtype=torch.int32)
    for place, which in enumerate(order):
        levels[:, which] = moved >> 4 * place & 15
    return levels.flatten(0, 1).movedim(0, dim)


class Drawn:
    """Levels, scales and zero points of a layer, ``[in, out]`` and ``[groups, out]``."""

    def __init__(self, columns: int, rows: int, group: int, *, symmetric: bool = False, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        groups = columns // group
        self.group = group
        self.levels = torch.randint(0, 16, (columns, rows), generator=generator)
        self.scales = (torch.rand(groups, rows, generator=generator) + 0.5).half().float() * 2**-5
        self.zeros = torch.randint(1, 16, (groups, rows), generator=generator)
        if symmetric:
            self.zeros.fill_(8)

    def weight(self, order: Tensor | None = None) -> Tensor:
        """``[out, in]``, float64: the definition. `order` is the group of each input, if it is not its place's."""
        of = torch.arange(len(self.levels)) // self.group if order is None else order.long()
        return (self.scales.double()[of] * (self.levels - self.zeros[of])).t()


class Int4Linear(nn.Module):
    """What the layers of both makers have in common."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, drawn: Drawn, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.in_features, self.out_features = drawn.levels.shape
        self.register_buffer("scales", drawn.scales.to(dtype))
        self.register_buffer("bias", None if bias is None else bias.to(dtype))


class GptqLinear(Int4Linear):
    """GPTQ's, whose zero points are as they are (format 2) or less one (format 1)."""

    g_idx: Tensor

    def __init__(
        self,
        drawn: Drawn,
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        format: int = 1,
        order: Tensor | None = None,
    ) -> None:
        super().__init__(drawn, bias, dtype)
        self.format = format
        self.register_buffer("qweight", words_of(drawn.levels, 0))
        self.register_buffer("qzeros", words_of(drawn.zeros - (1 if format == 1 else 0), 1))
        of = torch.arange(self.in_features) // drawn.group if order is None else order
        self.register_buffer("g_idx", of.to(torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        zeros = levels_of(self.qzeros, 1) + (1 if self.format == 1 else 0)
        of = self.g_idx.long()
        weight = self.scales[of] * (levels_of(self.qweight, 0) - zeros[of]).to(self.scales.dtype)
        result = x @ weight.to(x.dtype)
        return result if self.bias is None else result + self.bias.to(x.dtype)


class RepackingLinear(GptqLinear):
    """As gptqmodel's layers for CPUs: the first call lays out the tensors anew, for inputs of its dtype alone."""

    def forward(self, x: Tensor) -> Tensor:
        of = self.g_idx.long()
        if self.qweight.dtype == torch.int32:
            zeros = levels_of(self.qzeros, 1) + (1 if self.format == 1 else 0)
            self.scales = self.scales.to(x.dtype)
            self.qzeros = (8 - zeros).to(x.dtype) * self.scales
            self.qweight = levels_of(self.qweight, 0).to(torch.uint8)
        if x.dtype != self.scales.dtype:
            raise RuntimeError(f"it was transformed for {self.scales.dtype} but received {x.dtype}")
        result = x @ (self.scales[of] * (self.qweight.to(x.dtype) - 8) + self.qzeros[of])
        return result if self.bias is None else result + self.bias.to(x.dtype)


class AwqLinear(Int4Linear):
    """AWQ's."""

    def __init__(
        self,
        drawn: Drawn,
        bias: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        order: tuple[int, ...] = AWQ_ORDER,
    ) -> None:
        super().__init__(drawn, bias, dtype)
        self.group_size, self.order = drawn.group, order
        self.register_buffer("qweight", words_of(drawn.levels, 1, order))
        self.register_buffer("qzeros", words_of(drawn.zeros, 1, order))

    def forward(self, x: Tensor) -> Tensor:
        levels, zeros = levels_of(self.qweight, 1, self.order), levels_of(self.qzeros, 1, self.order)
        groups = levels.unflatten(0, (-1, self.group_size)) - zeros.unsqueeze(1)
        result = x @ (groups.to(self.scales.dtype) * self.scales.unsqueeze(1)).flatten(0, 1).to(x.dtype)
        return result if self.bias is None else result + self.bias.to(x.dtype)


def put_into(
    model: Any, make: Callable[[Drawn, Tensor | None], nn.Module], group: int, symmetric: bool = False
) -> None:
    """Give a model layers in 4 bits in the place of all linear ones but the one that makes logits."""
    head = model.get_output_embeddings()
    kinds = (nn.Linear, Int4Linear)
    found = [(name, each) for name, each in model.named_modules() if isinstance(each, kinds) and each is not head]
    for seed, (name, layer) in enumerate(found):
        drawn = Drawn(layer.in_features, layer.out_features, group, symmetric=symmetric, seed=seed)
        bias = None if layer.bias is None else layer.bias.detach()
        model.set_submodule(name, make(drawn, bias).eval())
