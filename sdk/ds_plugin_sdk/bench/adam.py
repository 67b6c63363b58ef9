"""Adam's step against torch's fused and foreach AdamW and DeepSpeed's CPU Adam, and against the memory's speed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.bench.timing import Step
from ds_plugin_sdk.bench.timing import copy_rate as _copy_rate
from ds_plugin_sdk.bench.timing import take_turns as _take_turns
from ds_plugin_sdk.op_builder import load_kernels
from ds_plugin_sdk.ops.adam import adam_
from ds_plugin_sdk.optim import FusedAdam

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
BYTES = 28  # an element: p, g, m, v are read, p, m, v are written, 4 bytes each
PEER = "torch fused"

_LAYER = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,)]
_MLP = [(768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
CASES: dict[str, list[tuple[int, ...]]] = {
    "one of 64 M": [(64 << 20,)],
    "2,000 of 1 k": [(1024,)] * 2000,
    "GPT-2 small": [(50257, 768), (1024, 768), *(_LAYER + _MLP) * 12, (768,), (768,)],
}


@dataclass(frozen=True)
class Row:
    """One implementation on one set of tensors, float32.

    Attributes:
        tensors: which tensors.
        implementation: whose step.
        milliseconds: median wall time of a step.
        gigabytes_per_second: bytes that Adam must move, over that time.
        times_copy: that rate, over the rate of copying one large tensor here (8 bytes an element).
        times_torch_fused: speed, in multiples of torch's fused step.
    """

    tensors: str
    implementation: str
    milliseconds: float
    gigabytes_per_second: float
    times_copy: float
    times_torch_fused: float


def run(seconds: float = 6.0, deepspeed: bool = True) -> list[Row]:
    """Measure every case; the implementations take turns, so that noise falls on all alike.

    Args:
        seconds: time to spend on each case.
        deepspeed: compare with DeepSpeed's own op too; it is compiled first, which takes about a minute.
    """
    load_kernels("adam", "cpu")
    theirs = _deepspeed_op() if deepspeed else None
    copy_rate = _copy_rate()
    rows: list[Row] = []
    for name, shapes in CASES.items():
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        medians = _take_turns(_steps(shapes, theirs), seconds)
        for implementation, median in medians.items():
            rate = elements * BYTES / median / 1e9
            rows.append(Row(name, implementation, median * 1e3, rate, rate / copy_rate, medians[PEER] / median))
    return rows


def _steps(shapes: Sequence[tuple[int, ...]], deepspeed: Any) -> dict[str, Step]:
    """A step of each implementation. They share parameters and gradients, and have states of their own."""
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    options = {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    fused, foreach = ({"fused": True}, {"foreach": True})
    steps: dict[str, Step] = {
        "ds_plugin::adam_": _op_step(params),
        "FusedAdam": FusedAdam(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY).step,
        PEER: torch.optim.AdamW(params, **options, **fused).step,  # type: ignore[arg-type]  # options of mixed types
        "torch foreach": torch.optim.AdamW(params, **options, **foreach).step,  # type: ignore[arg-type]  # options of mixed types
    }
    if deepspeed is not None:
        steps["DeepSpeed cpu_adam"] = _deepspeed_step(params, deepspeed)
    return steps


def _op_step(params: Sequence[Tensor]) -> Step:
    grads = [_grad(param) for param in params]
    first, second = ([torch.zeros_like(param) for param in params] for _ in range(2))
    return lambda: adam_(params, grads, first, second, 3, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def _deepspeed_op() -> Any:
    """DeepSpeed's own compiled module, whatever accelerator it has adopted; None where it cannot be had."""
    try:
        from deepspeed.ops.op_builder.cpu.cpu_adam import CPUAdamBuilder

        return CPUAdamBuilder().load(verbose=False)
    except Exception as error:
        warnings.warn(f"DeepSpeed's cpu_adam is not compared: {error}", RuntimeWarning, stacklevel=2)
        return None


def _deepspeed_step(params: Sequence[Tensor], op: Any) -> Step:
    """The loop of DeepSpeedCPUAdam.step: one call for each parameter."""
    grads = [_grad(param) for param in params]
    data = [param.data for param in params]
    first, second = ([torch.zeros_like(param) for param in params] for _ in range(2))
    op.create_adam(0, LR, *BETAS, EPS, DECAY, True, False)

    def step() -> None:
        for p, g, m, v in zip(data, grads, first, second, strict=True):
            op.adam_update(0, 3, LR, *BETAS, EPS, DECAY, True, p, g, m, v)

    return step


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad
