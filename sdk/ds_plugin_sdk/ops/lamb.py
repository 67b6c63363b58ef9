"""LAMB over lists of tensors: ``ds_plugin::lamb_``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_dtypes, check_lists, check_memory, check_steps, text
from ds_plugin_sdk.ops._references import one_each, working

_LOW = (torch.bfloat16, torch.float16)
_CHUNK = 4096  # elements whose squares the reference adds in one go


def lamb_(
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
    min_coeff: float = 0.01,
    max_coeff: float = 10.0,
    grad_scale: float = 1.0,
    eps_inside_sqrt: bool = False,
    bias_correction: bool = True,
    correct_inside: bool = False,
    copies: Sequence[Tensor] = (),
) -> Tensor:
    """One step of LAMB on every tensor of a list, in place.

    For each tensor with gradient g and step number t, with c1 = 1 - beta1^t and c2 = 1 - beta2^t (both 1 without bias
    correction), L2 norms over the whole tensor, and p as it was before::

        g <- g / grad_scale
        m <- beta1 * m + (1 - beta1) * g
        v <- beta2 * v + (1 - beta2) * g^2
        u  = m / (sqrt(v) + eps) + weight_decay * p
        r  = clamp(||p|| / ||u||, min_coeff, max_coeff)           1 if a norm is 0
        p <- p - lr * sqrt(c2) / c1 * r * u

    which is DeepSpeed's LAMB. With `correct_inside`, m / c1 and v / c2 stand for m and v in u, and lr for
    lr * sqrt(c2) / c1: that is algorithm 2 of You et al. 2020, whose r (with the identity for its function phi) has no
    limits: 0 and infinity. The ratios differ: early in training c2 is small, so is v, and DeepSpeed's u is larger.

    Arithmetic is in float32 (float64 for float64 tensors); moments are rounded to their dtype before u is computed, so
    that r belongs to the u that is applied. Native kernels add squares in float64: the relative error of a norm is less
    than 1e-10 for up to 1e9 elements, and results do not depend on the number of threads. NaN and infinity spread as
    the formula says. Autograd does not record the step; tensors that it writes count as modified.

    Args:
        params: the parameters p, any shapes: float32, bfloat16, float16 (float64: reference only).
        grads: the gradients g, shapes of params: the dtype of params, or float32; any of the dtypes if params are
            float32. Not modified.
        exp_avgs: the first moments m, shapes of params: the dtype of params, or float32.
        exp_avg_sqs: the second moments v, as exp_avgs.
        steps: the step number t, counted from 1: one for all tensors, or one each.
        lr: learning rate.
        betas: decay of the moments, beta1 and beta2.
        eps: added to the denominator.
        weight_decay: decay of the parameters; nothing is added if it is 0.
        min_coeff: lower limit of the trust ratio r.
        max_coeff: upper limit of the trust ratio r.
        grad_scale: what gradients are divided by: a loss scale, times what clips their norm.
        eps_inside_sqrt: divide by sqrt(v + eps) rather than by sqrt(v) + eps.
        bias_correction: correct for c1 and c2.
        correct_inside: correct the moments inside of u, as the paper does.
        copies: empty, or tensors that get the new parameters too, in the same pass over memory: shapes of params, one
            of the dtypes. They may be leaves that require grad.

    Returns:
        The trust ratios, one for each tensor: float32 ``[len(params)]`` (float64 for float64 tensors).

    Raises:
        InvalidTensorError: lengths, shapes, dtypes, devices or memory do not fit; nothing was modified.
    """
    numbers = (lr, *betas, eps, weight_decay, min_coeff, max_coeff, grad_scale)
    switches = (eps_inside_sqrt, bias_correction, correct_inside)
    steps = [steps] if isinstance(steps, int) else steps
    ratios: Tensor = _library.call("lamb_", params, grads, exp_avgs, exp_avg_sqs, copies, steps, *numbers, *switches)
    _library.mark_modified(params, exp_avgs, exp_avg_sqs, copies)
    return ratios


def _lists(*lists: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
    *others, copies = lists
    named = dict(zip(("params", "grads", "exp_avgs", "exp_avg_sqs"), others, strict=True))
    return named | {"copies": copies} if copies else named


def _check(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[int],
) -> None:
    check_lists(_lists(params, grads, exp_avgs, exp_avg_sqs, copies))
    # Float32 parameters take gradients of the model that they are the masters of.
    low_grads = bool(params and grads) and params[0].dtype == torch.float32 and grads[0].dtype in _LOW
    check_dtypes(_lists(params, params if low_grads else grads, exp_avgs, exp_avg_sqs, []))
    if copies and copies[0].dtype not in (*_LOW, torch.float32, params[0].dtype):
        raise CheckError(f"copies are {text(copies[0].dtype)}; expected float32, bfloat16 or float16")
    check_steps(steps, len(params))


def _new_ratios(params: Sequence[Tensor]) -> Tensor:
    return params[0].new_empty(len(params), dtype=working(params[0])) if params else torch.empty(0)


@_library.op(
    "lamb_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] copies, int[] steps, float lr, float beta1, float beta2, float eps, float weight_decay, "
    "float min_coeff, float max_coeff, float grad_scale, bool eps_inside_sqrt, bool bias_correction, "
    "bool correct_inside) -> Tensor",
    check=_check,
    outputs=_new_ratios,
)
def lamb_reference(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    steps: Sequence[int],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    min_coeff: float,
    max_coeff: float,
    grad_scale: float,
    eps_inside_sqrt: bool,
    bias_correction: bool,
    correct_inside: bool,
) -> Tensor:
    """``ds_plugin::lamb_`` in plain torch, on any device; arguments as in `lamb_`, in the schema's order."""
    lists = _lists(params, grads, exp_avgs, exp_avg_sqs, copies)
    check_memory(lists, [name for name in lists if name != "grads"])
    ratios = []
    for i, step in enumerate(one_each(steps, len(params))):
        p, m, v = params[i], exp_avgs[i], exp_avg_sqs[i]
        c1 = 1 - beta1**step if bias_correction else 1.0
        c2 = 1 - beta2**step if bias_correction else 1.0
        dtype = working(p)
        param, grad = p.to(dtype), grads[i].to(dtype) / grad_scale
        m.copy_(beta1 * m.to(dtype) + (1 - beta1) * grad)
        v.copy_(beta2 * v.to(dtype) + (1 - beta2) * grad * grad)
        first, second = m.to(dtype), v.to(dtype)
        if correct_inside:
            first, second = first / c1, second / c2
        update = first / ((second + eps).sqrt() if eps_inside_sqrt else second.sqrt() + eps)
        if weight_decay:
            update = update + weight_decay * param
        ratio = _trust_ratio(_norm(param), _norm(update), min_coeff, max_coeff)
        ratios.append(ratio)
        new = param - (lr if correct_inside else lr * c2**0.5 / c1) * ratio * update
        p.copy_(new)
        if copies:
            copies[i].copy_(new)
    return torch.stack(ratios) if ratios else torch.empty(0)


def _trust_ratio(param_norm: Tensor, update_norm: Tensor, least: float, most: float) -> Tensor:
    ratio = (param_norm / update_norm).clamp(least, most)
    return torch.where((param_norm == 0) | (update_norm == 0), torch.ones_like(ratio), ratio)


def _norm(x: Tensor) -> Tensor:
    """The L2 norm, by way of those of chunks: its error grows with the root of what a plain sum's would."""
    flat = x.flatten()
    whole = flat.numel() - flat.numel() % _CHUNK
    chunks = torch.linalg.vector_norm(flat[:whole].view(-1, _CHUNK), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    norm: Tensor = torch.linalg.vector_norm(torch.cat([chunks, rest.view(1)]))
    return norm


__all__ = ["lamb_", "lamb_reference"]
