"""Adam's step against torch's fused and foreach AdamW and DeepSpeed's CPU Adam."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from ds_plugin_sdk.bench.eager import fused_adamw
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
        yield Case("adam_", setting, _op_step(params), _op_peers(params, deepspeed), moved)
        yield Case("FusedAdam.step", setting, ours.step, _peers(params, deepspeed), moved)


def elements(shapes: Sequence[tuple[int, ...]]) -> int:
    """How many there are in tensors of these shapes."""
    return sum(torch.Size(shape).numel() for shape in shapes)


def _op_peers(params: Sequence[Tensor], deepspeed: bool) -> dict[str, Step]:
    """What is below torch's optimizers, on lists that are made once."""
    beta1, beta2 = BETAS
    fused, foreach = _lists(params), _lists(params)
    fused_steps, foreach_steps = ([torch.tensor(3.0) for _ in params] for _ in range(2))

    def fused_step() -> None:
        fused_adamw(*fused, fused_steps, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)

    def foreach_step() -> None:
        adamw(
            *foreach,
            [],
            foreach_steps,
            foreach=True,
            fused=False,
            amsgrad=False,
            maximize=False,
            beta1=beta1,
            beta2=beta2,
            lr=LR,
            eps=EPS,
            weight_decay=DECAY,
        )

    peers: dict[str, Step] = {"torch fused": fused_step, "torch foreach": foreach_step}
    return {**peers, "DeepSpeed": _deepspeed_step(params)} if deepspeed else peers


def _peers(params: Sequence[Tensor], deepspeed: bool) -> dict[str, Step]:
    def torchs(**how: bool) -> Step:
        return torch.optim.AdamW(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **how).step

    peers = {"torch fused": torchs(fused=True), "torch foreach": torchs(foreach=True)}
    return {**peers, "DeepSpeed": _deepspeed_step(params)} if deepspeed else peers


def _op_step(params: Sequence[Tensor]) -> Step:
    lists = _lists(params)
    return lambda: adam_(*lists, 3, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)


def _deepspeed_step(params: Sequence[Tensor]) -> Step:
    """The loop of DeepSpeedCPUAdam.step: one call for each parameter."""
    lists = _lists(params)

    def step() -> None:
        update = _deepspeed_op().adam_update
        for p, g, m, v in zip(*lists, strict=True):
            update(0, 3, LR, *BETAS, EPS, DECAY, True, p, g, m, v)

    return step


@functools.cache
def _deepspeed_op() -> Any:
    """DeepSpeed's own module, whatever accelerator it has adopted; compiled first, for a minute."""
    from deepspeed.ops.op_builder.cpu.cpu_adam import CPUAdamBuilder

    op = CPUAdamBuilder().load(verbose=False)
    op.create_adam(0, LR, *BETAS, EPS, DECAY, True, False)
    return op


def _lists(params: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Parameters and gradients, and states of their own."""
    data, grads = [param.data for param in params], [_grad(param) for param in params]
    return data, grads, [torch.zeros_like(each) for each in data], [torch.zeros_like(each) for each in data]


def _grad(param: Tensor) -> Tensor:
    assert param.grad is not None
    return param.grad
