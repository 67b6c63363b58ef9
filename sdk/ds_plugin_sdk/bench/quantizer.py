"""Quantizing a large tensor and back, against the same in torch and against copying."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_plugin_sdk.bench.timing import Step, copy_rate, take_turns
from ds_plugin_sdk.op_builder import load_kernels
from ds_plugin_sdk.ops import quantizer

ELEMENTS, GROUP = 16 << 20, 8192  # a group is of the size that ZeRO++ chooses


@dataclass(frozen=True)
class Row:
    """One op on 16 M elements in symmetric groups of 8192.

    Attributes:
        dtype: of the values.
        op: what is done.
        bits: of the levels.
        milliseconds: median wall time of the kernel.
        gigabytes_per_second: bytes read and written once, over that time.
        times_copy: that rate, over the rate of copying one large tensor here.
        times_reference: speed, in multiples of the reference in plain torch.
    """

    dtype: str
    op: str
    bits: int
    milliseconds: float
    gigabytes_per_second: float
    times_copy: float
    times_reference: float


def run(seconds: float = 3.0) -> list[Row]:
    """Measure every case; kernel and reference take turns.

    Args:
        seconds: time to spend on each case.
    """
    load_kernels("quantizer", "cpu")
    copying = copy_rate()
    rows: list[Row] = []
    for dtype in (torch.float32, torch.bfloat16):
        for bits in (8, 4):
            for op, steps in _steps(torch.randn(ELEMENTS).to(dtype), bits).items():
                medians = take_turns(steps, seconds)
                kernel, reference = medians["kernel"], medians["reference"]
                rate = ELEMENTS * (dtype.itemsize + bits / 8) / kernel / 1e9
                text = str(dtype).removeprefix("torch.")
                rows.append(Row(text, op, bits, kernel * 1e3, rate, rate / copying, reference / kernel))
    return rows


def _steps(x: Tensor, bits: int) -> dict[str, dict[str, Step]]:
    """Kernel and reference of each op."""
    groups, reference = ELEMENTS // GROUP, torch.ops.ds_plugin_reference
    levels, params = quantizer.quantize(x, groups=groups, bits=bits)
    return {
        "quantize": {
            "kernel": lambda: quantizer.quantize(x, groups=groups, bits=bits),
            "reference": lambda: reference.quantize(x, groups, bits, True),
        },
        "dequantize": {
            "kernel": lambda: quantizer.dequantize(levels, params, bits=bits, dtype=x.dtype),
            "reference": lambda: reference.dequantize(levels, params, bits, True, x.dtype),
        },
    }
