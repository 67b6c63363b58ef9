"""The worst error of every optimizer op against its formula in float64, for each dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.optimizers import DTYPES, OPS, Dtypes, OptimizerInfo, random_lists

SHAPES: Sequence[tuple[int, ...]] = ((0,), (1,), (3,), (15,), (16,), (17,), (63,), (64,), (65,), (10_007,))


@dataclass(frozen=True)
class Row:
    """One op in one combination of dtypes, over all its modes.

    Attributes:
        op: name in torch's namespace ``ds_plugin``.
        implementation: ``kernel`` (native where there is one) or ``reference``.
        params, grads, states: dtypes.
        params_ulp: worst error of a parameter, in units in the last place of its dtype at the larger of its values
            before and after. Rounding a correct result to the dtype makes 0.5.
        states_ulp: the same of the states.
    """

    op: str
    implementation: str
    params: str
    grads: str
    states: str
    params_ulp: float
    states_ulp: float


def run() -> list[Row]:
    """Measure kernels and references on the CPU."""
    return [
        measure(op, dtypes, implementation)
        for op in OPS
        for dtypes in DTYPES
        if dtypes[0] in op.dtypes
        for implementation in ("kernel", "reference")
    ]


def measure(op: OptimizerInfo, dtypes: Dtypes, implementation: str) -> Row:
    """The worst errors over all of the op's modes."""
    function = op.function if implementation == "kernel" else op.run_reference
    params_ulp = states_ulp = 0.0
    for seed, options in enumerate(op.variants):
        lists = random_lists(op.lists, SHAPES, dtypes, seed)
        before = [[tensor.double() for tensor in tensors] for tensors in lists]
        function(*lists, **options)
        written = [tensors for name, tensors in zip(op.lists, lists, strict=True) if name in op.written]
        old = [tensors for name, tensors in zip(op.lists, before, strict=True) if name in op.written]
        for i in range(len(SHAPES)):
            expected = op.update(*(tensors[i] for tensors in before), options)
            errors = [ulps(new[i], want, was[i]) for new, want, was in zip(written, expected, old, strict=True)]
            params_ulp = max(params_ulp, errors[0])
            states_ulp = max(states_ulp, *errors[1:])
    params, grads, states = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return Row(op.name, implementation, params, grads, states, params_ulp, states_ulp)


def ulps(actual: Tensor, expected: Tensor, before: Tensor) -> float:
    """The worst error of `actual`, in units in the last place of its dtype.

    Args:
        actual: what was computed.
        expected: what the formula gives, float64.
        before: the values that were updated, float64: a unit is that of the larger of old and new, because a
            difference of close numbers has the error of the numbers.
    """
    if actual.numel() == 0:
        return 0.0
    info = torch.finfo(actual.dtype)
    scale = torch.maximum(expected.abs(), before.abs()).clamp_(min=info.smallest_normal)
    unit = torch.exp2(scale.log2().floor()) * info.eps
    return float(((actual.double() - expected).abs() / unit).max())
