"""Adam's step against torch's fused and foreach AdamW and DeepSpeed's CPU Adam."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.bench.timing import Case, Step
from ds_plugin_sdk.ops.adam import adam_
from ds_plugin_sdk.optim import FusedAdam

LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01
VALUES = 7  # moved for an element: p, g, m, v are read, p, m, v are written

_LAYER = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,)]
_MLP = [(768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)]
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "2,000 of 1 k": [(1024,)] * 2000,
    "GPT-2's layer": [*_LAYER, *_MLP],
    "GPT-2 small": [(50257, 768), (1024, 768), *(_LAYER + _MLP) * 12, (768,), (768,)],
}


def cases(dtype: torch.dtype, compile: bool) -> Iterator[Case]:
    """The op, and the optimizer on it. All steps share parameters and gradients, and have states of their own."""
    for setting, shapes in SHAPES.items():
        params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        moved = elements(shapes) * VALUES * dtype.itemsize
        deepspeed = compile and dtype == torch.float32
        ours = FusedAdam(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)
        yield Case("adam_", setting, _op_step(params), _peers(params, deepspeed), moved)
        yield Case("FusedAdam.step", setting, ours.step, _peers(params, deepspeed), moved)


def elements(shapes: Sequence[tuple[int, ...]]) -> int:
    """How many there are in tensors of these shapes."""
    return sum(torch.Size(shape).numel() for shape in shapes)


def _peers(params: Sequence[Tensor], deepspeed: bool) -> dict[str, Step]:
    def torchs(**how: bool) -> Step:
        return torch.optim.AdamW(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **how).step

    peers = {"torch fused": torchs(fused=True), "torch foreach": torchs(foreach=True)}
    return {**peers, "DeepSpeed": _deepspeed_step(params)} if deepspeed else peers


def _op_step(params: Sequence[Tensor]) -> Step:
    grads = [_grad(param) for param in params]
    first, second = ([torch.zeros_like(param) for param in params] for _ in range(2))
    return lambda: adam_(params, grads, first, second, 3, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def _deepspeed_step(params: Sequence[Tensor]) -> Step:
    """The loop of DeepSpeedCPUAdam.step: one call for each parameter."""
    grads = [_grad(param) for param in params]
    data = [param.data for param in params]
    first, second = ([torch.zeros_like(param) for param in params] for _ in range(2))

    def step() -> None:
        update = _deepspeed_op().adam_update
        for p, g, m, v in zip(data, grads, first, second, strict=True):
            update(0, 3, LR, *BETAS, EPS, DECAY, True, p, g, m, v)

    return step


@functools.cache
def _deepspeed_op() -> Any:
    """DeepSpeed's own module, whatever accelerator it has adopted; compiled first, for a minute."""
    from deepspeed.ops.op_builder.cpu.cpu_adam import CPUAdamBuilder

    op = CPUAdamBuilder().load(verbose=False)
    op.create_adam(0, LR, *BETAS, EPS, DECAY, True, False)
    return op


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad
