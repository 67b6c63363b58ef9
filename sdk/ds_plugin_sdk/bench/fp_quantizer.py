"""Quantizing to small floating-point numbers and back, against the same in torch and against copying."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ds_plugin_sdk.bench.timing import Case, Step
from ds_plugin_sdk.ops import fp_quantizer

GROUP = 512  # DeepSpeed's default
SIZES = {"64 k": 64 << 10, "4 M": 4 << 20}
FORMATS = ((8, 3), (12, 7), (6, 2), (4, 1))  # bits, and those of the mantissa, as DeepSpeed chooses them


def cases(dtype: torch.dtype, compile: bool) -> Iterator[Case]:
    """Both directions beside the reference in plain torch, to 8 bits also beside torch's own type of 8 bits.

    `compile` changes nothing: DeepSpeed's own op is CUDA's.
    """
    for size, elements in SIZES.items():
        for bits, mantissa in FORMATS:
            yield from _both(torch.randn(elements).to(dtype), bits, mantissa, f"{size}, {bits} bits")


def _both(x: Tensor, bits: int, mantissa: int, setting: str) -> Iterator[Case]:
    reference = torch.ops.ds_plugin_reference
    stored = fp_quantizer.fp_quantize(x, group_size=GROUP, bits=bits, mantissa_bits=mantissa)
    moved, theirs = x.nbytes + stored.nbytes, _torch_type(x) if bits == 8 else ({}, {})
    yield Case(
        "quantize",
        setting,
        lambda: fp_quantizer.fp_quantize(x, group_size=GROUP, bits=bits, mantissa_bits=mantissa),
        {"plain torch": lambda: reference.fp_quantize(x, None, GROUP, bits, mantissa), **theirs[0]},
        moved,
    )
    yield Case(
        "dequantize",
        setting,
        lambda: fp_quantizer.fp_dequantize(stored, group_size=GROUP, bits=bits, mantissa_bits=mantissa, dtype=x.dtype),
        {"plain torch": lambda: reference.fp_dequantize(stored, GROUP, bits, mantissa, x.dtype), **theirs[1]},
        moved,
    )


def _torch_type(x: Tensor) -> tuple[Mapping[str, Step], Mapping[str, Step]]:
    """To ``torch.float8_e4m3fn`` and back with a scale for each group: other numbers, the same purpose."""
    form = torch.float8_e4m3fn
    largest = torch.finfo(form).max

    def quantize() -> tuple[Tensor, Tensor]:
        groups = x.view(-1, GROUP).float()
        scales = groups.abs().amax(1, keepdim=True) / largest
        return (groups / scales).to(form), scales

    numbers, scales = quantize()
    return {"torch float8": quantize}, {"torch float8": lambda: (numbers.float() * scales).to(x.dtype)}
