"""LAMB's step against what a torch user would write, eager and compiled, and against our Adam's."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ds_plugin_sdk.bench.adam import SHAPES, elements
from ds_plugin_sdk.bench.timing import Case, Step, compiled
from ds_plugin_sdk.ops.adam import adam_
from ds_plugin_sdk.ops.lamb import lamb_

LR, BETAS, EPS, DECAY, STEP = 1e-4, (0.9, 0.999), 1e-8, 0.01, 3
VALUES = 10  # moved for an element: g, p, m, v read and m, v written, then p, m, v read and p written
SETTINGS = ("2,000 of 1 k", "GPT-2's layer", "GPT-2 small")
# torch.compile of what is there takes time in proportion to the number of tensors: a minute for a layer's 12.
COMPILED = ("GPT-2's layer",)


def cases(dtype: torch.dtype, compile: bool) -> Iterator[Case]:
    """The op; all steps are on the same tensors, and states have the parameters' dtype."""
    for setting in SETTINGS:
        yield _case(setting, dtype, compile and setting in COMPILED)


def _case(setting: str, dtype: torch.dtype, compile: bool) -> Case:
    shapes = SHAPES[setting]
    params, grads = ([torch.randn(shape).to(dtype) for shape in shapes] for _ in range(2))
    first, second = ([torch.zeros_like(param) for param in params] for _ in range(2))
    lists = (params, grads, first, second)
    peers: dict[str, Step] = {
        "torch foreach": lambda: foreach_lamb(*lists),
        "adam_": lambda: adam_(*lists, STEP, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY),
    }
    if compile:
        step = compiled(foreach_lamb)
        peers["torch.compile"] = lambda: step(*lists)

    def ours() -> Tensor:
        return lamb_(*lists, STEP, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY)

    return Case("lamb_", setting, ours, peers, elements(shapes) * VALUES * dtype.itemsize)


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
