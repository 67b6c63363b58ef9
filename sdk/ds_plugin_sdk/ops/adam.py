"""Adam and AdamW over lists of tensors: ``ds_plugin::adam_`` and its inverse ``ds_plugin::adam_rollback_``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._multi_tensor import (
    check_dtypes,
    check_lists,
    check_memory,
    check_steps,
    mark_modified,
    one_each,
    text,
)

_STATES = "Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, int[] steps"
_NUMBERS = "float lr, float beta1, float beta2, float eps, float weight_decay"
_WRITTEN = ("params", "exp_avgs", "exp_avg_sqs")


def adam_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: int | Sequence[int],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adamw: bool = True,
    bias_correction: bool = True,
) -> None:
    """One step of Adam or AdamW on every tensor of a list, in place.

    With gradient g, step number t, c1 = 1 - beta1^t and c2 = 1 - beta2^t (both 1 without bias correction)::

        g <- g + weight_decay * p                       only if not adamw
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        p <- p - lr * weight_decay * p                  only if adamw
        p <- p - lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)

    after Kingma & Ba 2015 (Adam) and Loshchilov & Hutter 2019 (AdamW). Arithmetic is in float32 (float64 for float64
    tensors) and rounded to the tensors' dtypes once. NaN and infinity spread as the formula says. Autograd does not
    record the step; tensors that it writes count as modified.

    Args:
        params: the parameters p, any shapes: float32, bfloat16, float16 (float64 by the reference alone).
        grads: the gradients g, shapes of params: the dtype of params, or float32. Not modified.
        exp_avgs: the first moments m, shapes of params: the dtype of params, or float32.
        exp_avg_sqs: the second moments v, as exp_avgs.
        steps: the step number t, counted from 1: one for all tensors, or one each.
        lr: learning rate.
        betas: decay of the moments, beta1 and beta2.
        eps: added to the denominator.
        weight_decay: decay of the parameters; nothing is added if it is 0.
        adamw: decay the parameter itself (AdamW), or add the decay to the gradient (Adam with L2 regularisation).
        bias_correction: divide by c1 and c2.

    Raises:
        InvalidTensorError: lengths, shapes, dtypes, devices or memory do not fit; nothing was modified.
    """
    numbers = (lr, *betas, eps, weight_decay, adamw, bias_correction)
    _library.call("adam_", params, grads, exp_avgs, exp_avg_sqs, _as_list(steps), *numbers)
    mark_modified(params, exp_avgs, exp_avg_sqs)


def adam_rollback_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: int | Sequence[int],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> None:
    """Undo the AdamW step that was made last, with bias correction, up to rounding::

        p <- (p + lr / c1 * m / (sqrt(v) / sqrt(c2) + eps)) / (1 - lr * weight_decay)      0 unless finite
        m <- (m - (1 - beta1) * g) / beta1
        v <- max((v - (1 - beta2) * g^2) / beta2, 0)

    Args:
        params: the parameters after the step; float32, as all tensors here, because a step that was rounded to fewer
            bits cannot be undone.
        grads: the gradients of the step.
        exp_avgs: the first moments after the step.
        exp_avg_sqs: the second moments after the step.
        steps: the number of the step to undo.
        lr: learning rate of the step.
        betas: as in the step.
        eps: as in the step.
        weight_decay: as in the step.

    Raises:
        InvalidTensorError: as `adam_`, or a tensor is not float32; nothing was modified.
    """
    numbers = (lr, *betas, eps, weight_decay)
    _library.call("adam_rollback_", params, grads, exp_avgs, exp_avg_sqs, _as_list(steps), *numbers)
    mark_modified(params, exp_avgs, exp_avg_sqs)


@torch.no_grad()
def adam_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[int],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw: bool,
    bias_correction: bool,
) -> None:
    """``ds_plugin::adam_`` in plain torch, on any device; arguments as in `adam_`, in the schema's order."""
    lists = _named(params, grads, exp_avgs, exp_avg_sqs)
    _check("adam_", lists, steps)
    check_memory("adam_", lists, _WRITTEN)
    for p, grad, m, v, step in zip(params, grads, exp_avgs, exp_avg_sqs, one_each(steps, len(params)), strict=True):
        c1 = 1 - beta1**step if bias_correction else 1.0
        c2 = 1 - beta2**step if bias_correction else 1.0
        working = torch.promote_types(p.dtype, torch.float32)
        param, g = p.to(working), grad.to(working)
        if weight_decay and not adamw:
            g = g + weight_decay * param
        first = beta1 * m.to(working) + (1 - beta1) * g
        second = beta2 * v.to(working) + (1 - beta2) * g * g
        change = lr / c1 * first / (second.sqrt() / c2**0.5 + eps)
        if weight_decay and adamw:
            change = change + lr * weight_decay * param
        p.copy_(param - change)
        m.copy_(first)
        v.copy_(second)


@torch.no_grad()
def adam_rollback_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[int],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """``ds_plugin::adam_rollback_`` in plain torch; arguments as in `adam_rollback_`, in the schema's order."""
    lists = _named(params, grads, exp_avgs, exp_avg_sqs)
    _check_rollback(lists, steps)
    check_memory("adam_rollback_", lists, _WRITTEN)
    for p, g, m, v, step in zip(params, grads, exp_avgs, exp_avg_sqs, one_each(steps, len(params)), strict=True):
        c1, c2 = 1 - beta1**step, 1 - beta2**step
        change = lr / c1 * m / (v.sqrt() / c2**0.5 + eps)
        param = (p + change) / (1 - lr * weight_decay)
        p.copy_(torch.where(param.isfinite(), param, 0.0))
        m.copy_((m - (1 - beta1) * g) / beta1)
        v.copy_(((v - (1 - beta2) * g * g) / beta2).clamp_(min=0))


def _fake_adam(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[int],
    *numbers: float,
) -> None:
    _check("adam_", _named(params, grads, exp_avgs, exp_avg_sqs), steps)


def _fake_rollback(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[int],
    *numbers: float,
) -> None:
    _check_rollback(_named(params, grads, exp_avgs, exp_avg_sqs), steps)


def _named(*lists: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
    return dict(zip(("params", "grads", "exp_avgs", "exp_avg_sqs"), lists, strict=True))


def _check(op: str, lists: dict[str, Sequence[Tensor]], steps: Sequence[int]) -> None:
    check_lists(op, lists)
    check_dtypes(op, lists)
    check_steps(op, steps, len(lists["params"]))


def _check_rollback(lists: dict[str, Sequence[Tensor]], steps: Sequence[int]) -> None:
    op = "adam_rollback_"
    _check(op, lists, steps)
    for name, tensors in lists.items():
        if tensors and tensors[0].dtype != torch.float32:
            raise _library.invalid(
                op,
                f"{name} are {text(tensors[0].dtype)}; expected float32: "
                "a step that was rounded to fewer bits cannot be undone",
            )


def _as_list(steps: int | Sequence[int]) -> Sequence[int]:
    return [steps] if isinstance(steps, int) else steps


_library.define(
    f"adam_({_STATES}, {_NUMBERS}, bool adamw, bool bias_correction) -> ()",
    reference=adam_reference,
    fake=_fake_adam,
)
_library.define(f"adam_rollback_({_STATES}, {_NUMBERS}) -> ()", reference=adam_rollback_reference, fake=_fake_rollback)

__all__ = ["adam_", "adam_reference", "adam_rollback_", "adam_rollback_reference"]
