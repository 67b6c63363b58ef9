"""Optimizers beside torch's and DeepSpeed's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from gpu_check import cases, deepspeed_cuda_ops
from gpu_check.cases import Call, Case


def gpt2_xl() -> list[tuple[int, ...]]:
    """GPT-2 XL: 1.56 G elements in 580 tensors."""
    h = 1600
    layer = [(h,), (h,), (h, 3 * h), (3 * h,), (h, h), (h,), (h,), (h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,)]
    return [(50257, h), (1024, h), *layer * 48, (h,), (h,)]


def llama_7b() -> list[tuple[int, ...]]:
    """LLaMA-7B: 6.74 G elements in 291 tensors."""
    h, m = 4096, 11008
    layer = [(h, h)] * 4 + [(m, h), (m, h), (h, m), (h,), (h,)]
    return [(32000, h), *layer * 32, (h,), (32000, h)]


MODELS = {
    "GPT-2 XL float32": (gpt2_xl, torch.float32),
    "LLaMA-7B bfloat16": (llama_7b, torch.bfloat16),
    "2,000 of 1 k float32": (lambda: [(1024,)] * 2000, torch.float32),
}


def optimizer_cases(own: Path | None) -> Iterator[Case]:
    """FusedAdam and FusedLamb beside torch's and DeepSpeed's own, on the same parameters and gradients."""
    from ds_plugin_sdk.optim import FusedAdam, FusedLamb

    for name, (shapes, dtype) in MODELS.items():
        params = [torch.nn.Parameter(torch.randn(shape, device=cases.DEVICE, dtype=dtype) * 0.02) for shape in shapes()]
        for param in params:
            param.grad = torch.randn_like(param) * 0.01
        elements = sum(param.numel() for param in params)
        size = params[0].element_size()
        adam = {
            "FusedAdam": FusedAdam(params, lr=1e-4, weight_decay=0.01),
            "torch AdamW fused": torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, fused=True),
        }
        if elements < 2e9:
            adam["torch AdamW foreach"] = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, foreach=True)
        calls: dict[str, list[Call]] = {n: [o.step] for n, o in adam.items()}
        calls |= _deepspeed("fused_adam", own, _deepspeed_adam, params)
        yield Case(f"Adam {name}", 7 * size * elements, calls, in_graph=False)
        del calls, adam
        lamb: dict[str, list[Call]] = {"FusedLamb": [FusedLamb(params, lr=1e-4).step]}
        if elements < 2e9:
            lamb["torch foreach"] = [_foreach_lamb(params)]
        lamb |= _deepspeed("fused_lamb", own, _deepspeed_lamb, params)
        # p, g, m, v are read and m, v written; then p, m, v are read and p is written
        yield Case(f"LAMB {name}", 10 * size * elements, lamb, in_graph=False)
        del lamb, params


def _deepspeed(
    op: str, own: Path | None, call_of: Callable[..., Call], params: Sequence[Tensor]
) -> dict[str, list[Call]]:
    """DeepSpeed's own op as one more implementation, if it was built."""
    module = deepspeed_cuda_ops.load(op, own) if own else None
    return {"DeepSpeed's own": [call_of(module, params)]} if module else {}


def _deepspeed_adam(module: ModuleType, params: Sequence[Tensor]) -> Call:
    flag = torch.zeros(1, dtype=torch.int, device=cases.DEVICE)
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
    lists = [[p.grad for p in params], [p.data for p in params], first, second]
    return lambda: module.multi_tensor_adam(2048 * 32, flag, lists, 1e-4, 0.9, 0.999, 1e-8, 3, 1, 1, 0.01)


def _deepspeed_lamb(module: ModuleType, params: Sequence[Tensor]) -> Call:
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
    none = torch.empty(0, device=cases.DEVICE)

    def step() -> None:
        for p, m, v in zip(params, first, second, strict=True):
            module.lamb(p.data, none, m, v, p.grad, 1e-4, 0.9, 0.999, 10.0, 0.01, 1e-8, 1.0, 3, 1, 1, 0.0)

    return step


def _foreach_lamb(params: Sequence[Tensor]) -> Call:
    """DeepSpeed's LAMB in torch's foreach functions: how it would be written without a kernel."""
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
    grads = [p.grad for p in params]

    @torch.no_grad()
    def step() -> None:
        torch._foreach_lerp_(first, grads, 0.1)
        torch._foreach_mul_(second, 0.999)
        torch._foreach_addcmul_(second, grads, grads, 0.001)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_add_(denominators, 1e-8)
        updates = torch._foreach_div(first, denominators)
        ratios = torch._foreach_div(torch._foreach_norm(list(params)), torch._foreach_norm(updates))
        torch._foreach_clamp_min_(ratios, 0.01)
        torch._foreach_clamp_max_(ratios, 10.0)
        torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(list(params), updates, alpha=-1e-4)

    return step
