"""DeepSpeed's optimizers: some steps on one parameter, with the formulas in float64."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.front_ends.front_end import FrontEnd, Result

_LR, _BETA1, _BETA2, _EPS = 1e-2, 0.9, 0.99, 1e-8
# Of each step: schedules change it.
_RATES = (_LR, _LR, _LR / 4, _LR / 2)


@dataclass(frozen=True)
class _Variant:
    """What an optimizer is made with.

    Attributes:
        decay: weight decay.
        decoupled: whether it decays the parameter itself; else it is added to the gradient.
        corrected: whether moments are corrected for their start.
    """

    decay: float = 0.1
    decoupled: bool = True
    corrected: bool = True

    def __str__(self) -> str:
        words = f"weight decay {self.decay}", "" if self.decoupled else "in the gradient"
        return " ".join(filter(None, (*words, "" if self.corrected else "without bias correction")))


Formula = Callable[[Tensor, Sequence[Tensor], _Variant], Tensor]


def _adam(p: Tensor, grads: Sequence[Tensor], variant: _Variant) -> Tensor:
    m = v = torch.zeros_like(p)
    for step, (grad, lr) in enumerate(zip(grads, _RATES, strict=True), 1):
        g = grad if variant.decoupled else grad + variant.decay * p
        m, v = _BETA1 * m + (1 - _BETA1) * g, _BETA2 * v + (1 - _BETA2) * g * g
        c1, c2 = (1 - _BETA1**step, 1 - _BETA2**step) if variant.corrected else (1.0, 1.0)
        p = p - (lr * variant.decay * p if variant.decoupled else 0) - lr * m / c1 / ((v / c2).sqrt() + _EPS)
    return p


def _adagrad(p: Tensor, grads: Sequence[Tensor], variant: _Variant) -> Tensor:
    s = torch.zeros_like(p)
    for grad, lr in zip(grads, _RATES, strict=True):
        g = grad + variant.decay * p
        s = s + g * g
        p = p - lr * g / (s.sqrt() + _EPS)
    return p


def _lion(p: Tensor, grads: Sequence[Tensor], variant: _Variant) -> Tensor:
    m = torch.zeros_like(p)
    for g, lr in zip(grads, _RATES, strict=True):
        p = p - lr * variant.decay * p - lr * (_BETA1 * m + (1 - _BETA1) * g).sign()
        m = _BETA2 * m + (1 - _BETA2) * g
    return p


def _run(
    path: str,
    variants: Sequence[_Variant],
    options: Callable[[_Variant], dict[str, Any]],
    formula: Formula,
    on_host: bool,
    device: torch.device,
) -> Iterator[Result]:
    module, _, name = path.rpartition(".")
    optimizer_class = getattr(importlib.import_module(f"deepspeed.ops.{module}"), name)
    device = torch.device("cpu") if on_host else device
    generator = torch.Generator().manual_seed(0)
    shapes = ((1003,), (7, 19))
    for variant in variants:
        starts = [torch.randn(shape, generator=generator) for shape in shapes]
        grads = [[torch.randn(shape, generator=generator) for _ in _RATES] for shape in shapes]
        params = [torch.nn.Parameter(start.clone().to(device)) for start in starts]
        idle = torch.nn.Parameter(torch.ones(5, device=device))  # in no graph, so without a gradient
        groups = [{"params": [params[0], idle]}, {"params": params[1:]}]
        optimizer = optimizer_class(groups, lr=_LR, weight_decay=variant.decay, **options(variant))
        for step, lr in enumerate(_RATES):
            for group in optimizer.param_groups:
                group["lr"] = lr
            for param, each in zip(params, grads, strict=True):
                param.grad = each[step].to(device)
            optimizer.step()
        yield Result(f"a parameter without a gradient, {variant}", idle.detach(), torch.ones(5).double(), 0.0)
        for param, start, each in zip(params, starts, grads, strict=True):
            expected = formula(start.double(), [grad.double() for grad in each], variant)
            what = f"a parameter of shape {list(start.shape)} after {len(_RATES)} steps, {variant}"
            yield Result(what, param.detach(), expected, 1e-5)


def _optimizer(
    path: str,
    builder: str,
    formula: Formula,
    options: Callable[[_Variant], dict[str, Any]],
    variants: Sequence[_Variant] = (_Variant(), _Variant(decay=0.0)),
    *,
    on_host: bool = False,
) -> FrontEnd:
    run = functools.partial(_run, path, variants, options, formula, on_host)
    return FrontEnd(path.rpartition(".")[2], builder, run)


_ADAM = (_Variant(), _Variant(decay=0.0), _Variant(decoupled=False), _Variant(corrected=False))


def _betas(variant: _Variant) -> dict[str, Any]:
    return {"betas": (_BETA1, _BETA2)}


def _of_adam(mode: str) -> Callable[[_Variant], dict[str, Any]]:
    """The options of an Adam whose argument `mode` says whether the decay is decoupled."""
    return lambda variant: {
        **_betas(variant),
        "eps": _EPS,
        mode: variant.decoupled,
        "bias_correction": variant.corrected,
    }


OPTIMIZERS = (
    _optimizer("adam.DeepSpeedCPUAdam", "CPUAdamBuilder", _adam, _of_adam("adamw_mode"), _ADAM, on_host=True),
    _optimizer("adam.FusedAdam", "FusedAdamBuilder", _adam, _of_adam("adam_w_mode"), _ADAM),
    _optimizer(
        "adagrad.DeepSpeedCPUAdagrad", "CPUAdagradBuilder", _adagrad, lambda variant: {"eps": _EPS}, on_host=True
    ),
    _optimizer("lion.DeepSpeedCPULion", "CPULionBuilder", _lion, _betas, on_host=True),
    _optimizer("lion.FusedLion", "FusedLionBuilder", _lion, _betas),
)
