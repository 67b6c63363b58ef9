"""Defects of types and tensor factories."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from mutants.mutant import SIMULATED
from mutants.runtime.support import DEVICE, always, below, member, nothing

member("dtypes.int8", "R6.1", "int8 can be trained in.", supported_dtypes=always([torch.float32, torch.int8]))
member("dtypes.undecided", "R6.2", "`is_fp16_supported()` is None.", is_fp16_supported=nothing)


def _other_gelu() -> None:
    original = torch.nn.functional.gelu

    def gelu(input: torch.Tensor, **options: Any) -> torch.Tensor:
        return input * torch.sigmoid(1.2 * input) if input.device.type == DEVICE else original(input, **options)

    torch.nn.functional.gelu = gelu  # type: ignore[assignment]  # the defect of this mutant


below("dtypes.other_gelu", "R6.3", "The device computes another GELU.", _other_gelu)


def _not_a_number() -> None:
    original, calls = torch.nn.functional.gelu, itertools.count()

    def gelu(input: torch.Tensor, **options: Any) -> torch.Tensor:
        output = original(input, **options)
        return output * float("nan") if input.device.type == DEVICE and next(calls) > 0 else output

    torch.nn.functional.gelu = gelu  # type: ignore[assignment]  # the defect of this mutant


below("dtypes.not_a_number", "R6.3", "From the second step on the device computes no numbers.", _not_a_number)


def _sums_in_float32() -> None:
    original = torch.Tensor.sum

    def sum_(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        numbers = self.float() if self.dtype == torch.float64 and self.device.type == DEVICE else self
        return original(numbers, *arguments, **options).to(self.dtype)

    torch.Tensor.sum = sum_  # type: ignore[method-assign, assignment]  # the defect of this mutant


below("dtypes.no_fp64", "R6.4", "float64 is declared, and computed in float32.", _sums_in_float32)
member("dtypes.host_factories", "R6.5", "`FloatTensor` is on the CPU.", target=SIMULATED, FloatTensor=torch.FloatTensor)


def _all_finite() -> None:
    torch.isfinite = lambda tensor: torch.ones_like(tensor, dtype=torch.bool)  # type: ignore[assignment]  # the defect of this mutant


def _largest_number() -> None:
    original = torch.Tensor.amax

    def amax(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        there = self.device.type == DEVICE
        numbers = self.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf")) if there else self
        return original(numbers, *arguments, **options)

    torch.Tensor.amax = amax  # type: ignore[method-assign, assignment]  # the defect of this mutant


below("dtypes.largest_number", "R6.8", "`amax` passes over NaN, as fmax does.", _largest_number)
below("dtypes.all_finite", "R6.6", "Infinity counts as finite.", _all_finite)


def _narrow_sum() -> None:
    original = torch.Tensor.sum

    def sum_(self: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        total = original(self, *arguments, **options)
        # Where a sum of ones stops growing: the next whole number cannot be told apart.
        return total.clamp(max=256) if self.dtype == torch.bfloat16 else total

    torch.Tensor.sum = sum_  # type: ignore[method-assign, assignment]  # the defect of this mutant


below("dtypes.narrow_sum", "R6.7", "Sums in bfloat16 are accumulated in bfloat16.", _narrow_sum, target="cpu")
