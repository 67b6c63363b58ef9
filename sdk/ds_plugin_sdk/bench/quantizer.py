"""Quantizing a tensor and back, against the same in torch and against copying."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ds_plugin_sdk.bench.timing import Case
from ds_plugin_sdk.ops import quantizer

GROUP = 8192  # symmetric groups, of the size that ZeRO++ chooses
SIZES = {"64 k": 64 << 10, "16 M": 16 << 20}


def cases(dtype: torch.dtype, compile: bool) -> Iterator[Case]:
    """Both directions, to 8 and 4 bits, beside the reference in plain torch, which `compile` does not change."""
    for size, elements in SIZES.items():
        for bits in (8, 4):
            yield from _both(torch.randn(elements).to(dtype), bits, f"{size}, {bits} bits")


def _both(x: Tensor, bits: int, setting: str) -> Iterator[Case]:
    reference, groups = torch.ops.ds_plugin_reference, x.numel() // GROUP
    levels, params = quantizer.quantize(x, groups=groups, bits=bits)
    moved = x.nbytes + levels.nbytes
    yield Case(
        "quantize",
        setting,
        lambda: quantizer.quantize(x, groups=groups, bits=bits),
        {"plain torch": lambda: reference.quantize(x, groups, bits, True)},
        moved,
    )
    yield Case(
        "dequantize",
        setting,
        lambda: quantizer.dequantize(levels, params, bits=bits, dtype=x.dtype),
        {"plain torch": lambda: reference.dequantize(levels, params, bits, True, x.dtype)},
        moved,
    )
