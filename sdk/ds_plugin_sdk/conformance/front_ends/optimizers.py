"""DeepSpeed's optimizers: some steps on one parameter, with the formulas in float64."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.front_ends.front_end import FrontEnd, Result

_LR, _BETA1, _BETA2, _EPS, _DECAY, _STEPS = 1e-2, 0.9, 0.99, 1e-8, 0.1, 4

Formula = Callable[[Tensor, Sequence[Tensor]], Tensor]


def _adam(p: Tensor, grads: Sequence[Tensor]) -> Tensor:
    m = v = torch.zeros_like(p)
    for step, g in enumerate(grads, 1):
        m, v = _BETA1 * m + (1 - _BETA1) * g, _BETA2 * v + (1 - _BETA2) * g * g
        m_hat, v_hat = m / (1 - _BETA1**step), v / (1 - _BETA2**step)
        p = p - _LR * _DECAY * p - _LR * m_hat / (v_hat.sqrt() + _EPS)
    return p


def _adagrad(p: Tensor, grads: Sequence[Tensor]) -> Tensor:
    s = torch.zeros_like(p)
    for grad in grads:
        g = grad + _DECAY * p
        s = s + g * g
        p = p - _LR * g / (s.sqrt() + _EPS)
    return p


def _lion(p: Tensor, grads: Sequence[Tensor]) -> Tensor:
    m = torch.zeros_like(p)
    for g in grads:
        p = p - _LR * _DECAY * p - _LR * (_BETA1 * m + (1 - _BETA1) * g).sign()
        m = _BETA2 * m + (1 - _BETA2) * g
    return p


def _run(path: str, options: dict[str, Any], formula: Formula, on_host: bool, device: torch.device) -> Iterator[Result]:
    module, _, name = path.rpartition(".")
    optimizer_class = getattr(importlib.import_module(f"deepspeed.ops.{module}"), name)
    device = torch.device("cpu") if on_host else device
    generator = torch.Generator().manual_seed(0)
    for shape in ((1003,), (7, 19)):
        start = torch.randn(shape, generator=generator)
        grads = [torch.randn(shape, generator=generator) for _ in range(_STEPS)]
        param = torch.nn.Parameter(start.clone().to(device))
        optimizer = optimizer_class([param], lr=_LR, weight_decay=_DECAY, **options)
        for grad in grads:
            param.grad = grad.to(device)
            optimizer.step()
        expected = formula(start.double(), [grad.double() for grad in grads])
        yield Result(f"a parameter of shape {list(shape)} after {_STEPS} steps", param.detach(), expected, 1e-5)


def _optimizer(path: str, builder: str, formula: Formula, *, on_host: bool = False, **options: Any) -> FrontEnd:
    run = functools.partial(_run, path, options, formula, on_host)
    return FrontEnd(path.rpartition(".")[2], builder, run)


_BETAS: dict[str, Any] = {"betas": (_BETA1, _BETA2)}

OPTIMIZERS = (
    _optimizer("adam.DeepSpeedCPUAdam", "CPUAdamBuilder", _adam, on_host=True, eps=_EPS, **_BETAS),
    _optimizer("adam.FusedAdam", "FusedAdamBuilder", _adam, eps=_EPS, **_BETAS),
    _optimizer("adagrad.DeepSpeedCPUAdagrad", "CPUAdagradBuilder", _adagrad, on_host=True, eps=_EPS),
    _optimizer("lion.DeepSpeedCPULion", "CPULionBuilder", _lion, on_host=True, **_BETAS),
    _optimizer("lion.FusedLion", "FusedLionBuilder", _lion, **_BETAS),
)
