"""LAMB's step against what a torch user would write, eager and compiled, against our Adam's, and the memory's speed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_plugin_sdk.bench.adam import CASES
from ds_plugin_sdk.bench.timing import Step, copy_rate, take_turns
from ds_plugin_sdk.op_builder import load_kernels
from ds_plugin_sdk.ops.adam import adam_
from ds_plugin_sdk.ops.lamb import lamb_

LR, BETAS, EPS, DECAY, STEP = 1e-4, (0.9, 0.999), 1e-8, 0.01, 3
VALUES = 10  # moved for an element: g, p, m, v read and m, v written, then p, m, v read and p written
PEER, COMPILED, ADAM, OURS = "torch foreach", "torch.compile of it", "ds_plugin::adam_", "ds_plugin::lamb_"


@dataclass(frozen=True)
class Row:
    """One implementation on one set of tensors; states have the parameters' dtype.

    Attributes:
        tensors: which tensors.
        dtype: of all of them.
        threads: torch's threads.
        implementation: whose step.
        milliseconds: median wall time of a step.
        times_copy: bytes that two passes of LAMB must move over that time, over the rate of copying one large tensor.
        times_foreach: speed, in multiples of the foreach formulation's.
        adam_steps: time, in multiples of our Adam's.
    """

    tensors: str
    dtype: str
    threads: int
    implementation: str
    milliseconds: float
    times_copy: float
    times_foreach: float
    adam_steps: float


def run(seconds: float = 10.0, compiled: bool = True, threads: Sequence[int] = (1, 2)) -> list[Row]:
    """Measure GPT-2 small's tensors, float32 and bfloat16.

    Args:
        seconds: time to spend on each case.
        compiled: compare with `torch.compile` too, which takes minutes to compile.
        threads: torch's threads.
    """
    load_kernels("lamb", "cpu")
    load_kernels("adam", "cpu")
    before = torch.get_num_threads()
    try:
        return [
            row
            for dtype in (torch.float32, torch.bfloat16)
            for count in threads
            for row in _measure("GPT-2 small", dtype, count, seconds, compiled)
        ]
    finally:
        torch.set_num_threads(before)


def _measure(name: str, dtype: torch.dtype, threads: int, seconds: float, compiled: bool) -> list[Row]:
    torch.set_num_threads(threads)
    rate = copy_rate()
    shapes = CASES[name]
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    medians = take_turns(_steps(shapes, dtype, compiled), seconds)
    return [
        Row(
            name,
            str(dtype).removeprefix("torch."),
            threads,
            implementation,
            median * 1e3,
            elements * VALUES * dtype.itemsize / median / 1e9 / rate,
            medians[PEER] / median,
            median / medians[ADAM],
        )
        for implementation, median in medians.items()
    ]


def _steps(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, compiled: bool) -> dict[str, Step]:
    """A step of each implementation, all on the same tensors."""
    params, grads = ([torch.randn(shape).to(dtype) for shape in shapes] for _ in range(2))
    first, second = ([torch.zeros_like(param) for param in params] for _ in range(2))
    lists = (params, grads, first, second)
    steps: dict[str, Step] = {
        OURS: lambda: lamb_(*lists, STEP, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY),
        ADAM: lambda: adam_(*lists, STEP, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY),
        PEER: lambda: foreach_lamb(*lists),
    }
    if compiled:
        torch.compiler.reset()  # what was compiled for another number of threads keeps to it
        step = torch.compile(foreach_lamb, options={"cpp.threads": torch.get_num_threads()})
        try:
            step(*lists)
            steps[COMPILED] = lambda: step(*lists)
        except Exception as error:
            warnings.warn(f"torch.compile is not compared: {error}", RuntimeWarning, stacklevel=2)
    return steps


@torch.no_grad()
def foreach_lamb(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor]
) -> Tensor:
    """`lamb_` as a torch user would write it. The trust ratios."""
    beta1, beta2 = BETAS
    torch._foreach_lerp_(exp_avgs, grads, 1 - beta1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - beta2)
    roots = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_add_(roots, EPS)
    updates = torch._foreach_div(exp_avgs, roots)
    torch._foreach_add_(updates, params, alpha=DECAY)
    param_norms, update_norms = (torch.stack(torch._foreach_norm(tensors)) for tensors in (params, updates))
    ratios = (param_norms / update_norms).clamp(0.01, 10.0)
    ratios = torch.where((param_norms == 0) | (update_norms == 0), 1.0, ratios)
    step_size = LR * math.sqrt(1 - beta2**STEP) / (1 - beta1**STEP)
    torch._foreach_mul_(updates, list((-step_size * ratios).to(params[0].dtype).unbind()))
    torch._foreach_add_(params, updates)
    return ratios
