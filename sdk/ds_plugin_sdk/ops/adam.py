"""Adam and AdamW over lists of tensors: ``ds_plugin::adam_`` and its inverse ``ds_plugin::adam_rollback_``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._c_function import CFunction
from ds_plugin_sdk.ops._checks import (
    CheckError,
    TensorLists,
    check_dtypes,
    check_lists,
    check_memory,
    check_steps,
    text,
)
from ds_plugin_sdk.ops._references import one_each, working

_STATES = "Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, int[] steps"
_NUMBERS = "float lr, float beta1, float beta2, float eps, float weight_decay"
_WRITTEN = ("params", "exp_avgs", "exp_avg_sqs")

# param, grad, exp_avg, exp_avg_sq, or lists of them; lr, beta1, beta2, eps, weight_decay, adamw, bias_correction, step.
# DeepSpeed's optimizers on the host call for each tensor.
c_function = CFunction("adam")


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
        params: the parameters p, any shapes: float32, bfloat16, float16 (float64: reference only).
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
    steps = [steps] if isinstance(steps, int) else steps
    lists, numbers = (params, grads, exp_avgs, exp_avg_sqs), (lr, *betas, eps, weight_decay, adamw, bias_correction)
    alike = len(set(steps)) == 1 and len(steps) in (1, len(params))
    if not (alike and c_function.update(lists, *numbers, steps[0])):
        _library.call("adam_", *lists, steps, *numbers)
    _library.mark_modified(params, exp_avgs, exp_avg_sqs)


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
    steps = [steps] if isinstance(steps, int) else steps
    _library.call("adam_rollback_", params, grads, exp_avgs, exp_avg_sqs, steps, lr, *betas, eps, weight_decay)
    _library.mark_modified(params, exp_avgs, exp_avg_sqs)


def _lists(*lists: Sequence[Tensor]) -> TensorLists:
    return dict(zip(("params", "grads", "exp_avgs", "exp_avg_sqs"), lists, strict=True))


def _check(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[int],
) -> None:
    lists = _lists(params, grads, exp_avgs, exp_avg_sqs)
    check_lists(lists)
    check_dtypes(lists)
    check_steps(steps, len(params))


@_library.op(f"adam_({_STATES}, {_NUMBERS}, bool adamw, bool bias_correction) -> ()", check=_check)
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
    check_memory(_lists(params, grads, exp_avgs, exp_avg_sqs), _WRITTEN)
    for p, grad, m, v, step in zip(params, grads, exp_avgs, exp_avg_sqs, one_each(steps, len(params)), strict=True):
        c1 = 1 - beta1**step if bias_correction else 1.0
        c2 = 1 - beta2**step if bias_correction else 1.0
        dtype = working(p)
        param, g = p.to(dtype), grad.to(dtype)
        if weight_decay and not adamw:
            g = g + weight_decay * param
        first = beta1 * m.to(dtype) + (1 - beta1) * g
        second = beta2 * v.to(dtype) + (1 - beta2) * g * g
        change = lr / c1 * first / (second.sqrt() / c2**0.5 + eps)
        if weight_decay and adamw:
            change = change + lr * weight_decay * param
        p.copy_(param - change)
        m.copy_(first)
        v.copy_(second)


def _check_rollback(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[int],
) -> None:
    _check(params, grads, exp_avgs, exp_avg_sqs, steps)
    for name, tensors in _lists(params, grads, exp_avgs, exp_avg_sqs).items():
        if tensors and tensors[0].dtype != torch.float32:
            raise CheckError(
                f"{name} are {text(tensors[0].dtype)}; expected float32: "
                "a step that was rounded to fewer bits cannot be undone"
            )


@_library.op(f"adam_rollback_({_STATES}, {_NUMBERS}) -> ()", check=_check_rollback)
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
    check_memory(_lists(params, grads, exp_avgs, exp_avg_sqs), _WRITTEN)
    for p, g, m, v, step in zip(params, grads, exp_avgs, exp_avg_sqs, one_each(steps, len(params)), strict=True):
        c1, c2 = 1 - beta1**step, 1 - beta2**step
        change = lr / c1 * m / (v.sqrt() / c2**0.5 + eps)
        param = (p + change) / (1 - lr * weight_decay)
        p.copy_(torch.where(param.isfinite(), param, 0.0))
        m.copy_((m - (1 - beta1) * g) / beta1)
        v.copy_(((v - (1 - beta2) * g * g) / beta2).clamp_(min=0))


__all__ = ["adam_", "adam_reference", "adam_rollback_", "adam_rollback_reference"]
