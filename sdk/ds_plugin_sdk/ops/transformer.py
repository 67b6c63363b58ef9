"""What a transformer layer does between its matrix products, forward and backward, each in one pass over memory.

``ds_plugin::dropout_add``, ``dropout_add_layer_norm``, ``fused_bias_gelu``, ``masked_softmax_dropout``, and the
derivative of each, ``<name>_backward``. They can be differentiated once.

All arithmetic is in float32 (float64 for float64 tensors) and rounded once, but that a norm is taken of its sum as it
is stored. Dropout is that of `ds_plugin_sdk.ops._philox`: with one seed it drops the same elements on every device and
again in the backward pass, so that no mask is kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.ops import _library, _philox
from ds_plugin_sdk.ops._library import Autograd, invalid
from ds_plugin_sdk.ops._tensors import check, check_first, working


def new_seed(count: int = 1, device: torch.device | str = "cpu") -> Tensor:
    """Seeds for dropouts, drawn from torch's default CPU generator: ``torch.manual_seed`` repeats them.

    Recomputation under `torch.utils.checkpoint` and DeepSpeed's checkpointing restores that generator, and so draws the
    same seeds and the same masks again.

    Args:
        count: how many; each dropout of a step wants one of its own.
        device: where the tensors that are dropped lie.

    Returns:
        int64, ``[count]``.
    """
    return torch.randint(2**63 - 1, (count,), dtype=torch.int64).to(device)


# ---------------------------------------------------------------------------------- faces


def dropout_add(
    input: Tensor,
    residual: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """``residual + dropout(input + bias)``; dropout sets to zero, or divides by ``1 - p``.

    Args:
        input: ``[..., columns]``: float32, bfloat16, float16 (float64 by the reference alone).
        residual: shape and dtype of input; nothing is added if None.
        bias: ``[columns]``, the dtype of input.
        p: the share that is dropped, at least 0 and less than 1.
        seed: int64, one element (`new_seed`); None only if `p` is 0.

    Returns:
        A new contiguous tensor of input's shape and dtype.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or `p` is out of range.
    """
    result: Tensor = _library.call("dropout_add", input, bias, residual, seed, p)
    return result


def dropout_add_layer_norm(
    input: Tensor,
    weight: Tensor,
    norm_bias: Tensor,
    residual: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    p: float = 0.0,
    seed: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Layer norm of ``sum = residual + dropout(input + bias)``.

    That is ``(sum - mean) / sqrt(variance + eps) * weight + norm_bias`` with mean and variance of each row (Ba et al.
    2016). The sum is rounded to input's dtype before. With input alone this is layer norm.

    Args:
        input, residual, bias, p, seed: as in `dropout_add`.
        weight, norm_bias: ``[columns]``, the dtype of input.
        eps: added to the variance.

    Returns:
        The normalised rows, and the sum, both of input's shape and dtype; the sum is `input` itself where nothing is
        done to it. Both can be differentiated.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or `p` is out of range.
    """
    output, total, _, _ = _library.call(
        "dropout_add_layer_norm", input, bias, residual, weight, norm_bias, seed, p, eps
    )
    plain = bias is None and residual is None and p == 0
    return output, input if plain else total


def fused_bias_gelu(input: Tensor, bias: Tensor | None = None, *, tanh: bool = True) -> Tensor:
    """``gelu(input + bias)`` (Hendrycks & Gimpel 2016): with s the sum,

    ``s/2 (1 + tanh(sqrt(2/pi) (s + 0.044715 s^3)))``, the form of DeepSpeed's layer, or ``s/2 (1 + erf(s / sqrt 2))``.

    Args:
        input: ``[..., columns]``: float32, bfloat16, float16 (float64 by the reference alone).
        bias: ``[columns]``, the dtype of input; nothing is added if None.
        tanh: the first form, or the second.

    Returns:
        A new contiguous tensor of input's shape and dtype.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit.
    """
    result: Tensor = _library.call("fused_bias_gelu", input, bias, tanh)
    return result


def masked_softmax_dropout(
    scores: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float = 1.0,
    p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """``dropout(softmax(scale * scores + mask))`` over the last dimension. A row that is all -inf gives zeros.

    Args:
        scores: ``[..., columns]``, at most 5 dimensions: float32, bfloat16, float16 (float64 by the reference alone).
        mask: what is added, of the dtype of scores; broadcasts to the shape of scores. It gets no gradient.
        scale: of the scores.
        p, seed: as in `dropout_add`.

    Returns:
        A new contiguous tensor of scores' shape and dtype.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, `p` is out of range, or `mask` wants a gradient.
    """
    if mask is not None and mask.requires_grad and torch.is_grad_enabled():
        raise invalid("masked_softmax_dropout", "mask requires a gradient; expected one that does not: it gets none")
    output: Tensor = _library.call("masked_softmax_dropout", scores, mask, scale, seed, p)[0]
    return output


# ---------------------------------------------------------------------------------- dropout_add


def dropout_add_reference(
    input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float
) -> Tensor:
    """``ds_plugin::dropout_add`` in plain torch; arguments as in `dropout_add`, in the schema's order."""
    _check_sum("dropout_add", input, bias, residual, seed, p)
    return _sum(input, bias, residual, seed, p)


def dropout_add_backward_reference(
    grad_output: Tensor, seed: Tensor | None, p: float, bias: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of input and of bias; of `residual` it is `grad_output`.

    Args:
        grad_output: of the result.
        seed, p: as in `dropout_add`.
        bias: whether there was one; its gradient has no elements otherwise.
    """
    _check_dropout("dropout_add_backward", grad_output, seed, p)
    grad = _dropped(grad_output.to(working(grad_output)), seed, p)
    return _contiguous(grad, grad_output), _columns(grad, grad_output, bias)


def _fake_dropout_add(
    input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float
) -> Tensor:
    _check_sum("dropout_add", input, bias, residual, seed, p)
    return _empty(input)


def _fake_dropout_add_backward(grad_output: Tensor, seed: Tensor | None, p: float, bias: bool) -> tuple[Tensor, Tensor]:
    _check_dropout("dropout_add_backward", grad_output, seed, p)
    return _empty(grad_output), _empty_columns(grad_output, bias)


def _save_dropout_add(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, residual, seed, ctx.p = inputs
    ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
    ctx.save_for_backward(seed)


def _derive_dropout_add(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    (seed,) = ctx.saved_tensors
    grad_input, grad_bias = _library.call("dropout_add_backward", grad_output, seed, ctx.p, ctx.has_bias)
    return grad_input, grad_bias if ctx.has_bias else None, grad_output if ctx.has_residual else None, None, None


# ---------------------------------------------------------------------------------- dropout_add_layer_norm


def dropout_add_layer_norm_reference(
    input: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor,
    seed: Tensor | None,
    p: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``ds_plugin::dropout_add_layer_norm`` in plain torch, on any device.

    Arguments as in `dropout_add_layer_norm`, in the schema's order.

    Returns:
        The normalised rows; the sum, without elements where it is `input` itself; mean and ``1 / sqrt(variance + eps)``
        of each row, float32 (float64 for float64), of input's shape without its last dimension.
    """
    _check_norm(input, bias, residual, weight, norm_bias, seed, p)
    plain = bias is None and residual is None and p == 0
    total = input if plain else _sum(input, bias, residual, seed, p)
    s = total.to(working(input))
    mean = s.mean(dim=-1, keepdim=True) if s.numel() else s.new_zeros((*s.shape[:-1], 1))
    rstd = ((s - mean).square().sum(dim=-1, keepdim=True) / max(s.shape[-1], 1) + eps).rsqrt()
    normed = (s - mean) * rstd * weight.to(s.dtype) + norm_bias.to(s.dtype)
    kept = input.new_empty(0) if plain else total
    return _contiguous(normed, input), kept, mean.squeeze(-1), rstd.squeeze(-1)


def dropout_add_layer_norm_backward_reference(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    rows: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    seed: Tensor | None,
    p: float,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `dropout_add_layer_norm`, in plain torch.

    With n the rows before weight and bias, and g the gradient of the result times weight, the gradient of the sum is
    ``rstd (g - mean(g) - n mean(g n))`` (+ `grad_sum`). Where the sum was not kept, n is regained from the result as
    ``(result - norm_bias) / weight``: no weight may be zero then.

    Args:
        grad_output: of the normalised rows.
        grad_sum: of the sum, as far as it comes from elsewhere.
        rows: the sum; or the normalised rows, if `mean` is None.
        mean, rstd: as the op returned them.
        weight: as given to the op.
        norm_bias: as given to the op; used only if `mean` is None.
        seed, p: as in `dropout_add`.
        bias: whether there was one.

    Returns:
        The gradients of residual (that is, of the sum), input, weight, norm_bias, bias. That of input has no elements
        if `p` is 0, since it is that of residual; that of bias has none if there was no bias.
    """
    _check_norm_backward(grad_output, grad_sum, rows, mean, rstd, weight, norm_bias, seed, p)
    dtype = working(grad_output)
    grad, gamma, factor = grad_output.to(dtype), weight.to(dtype), rstd.unsqueeze(-1)
    if mean is None:
        assert norm_bias is not None
        normed = (rows.to(dtype) - norm_bias.to(dtype)) / gamma
    else:
        normed = (rows.to(dtype) - mean.unsqueeze(-1)) * factor
    scaled = grad * gamma
    columns = max(weight.numel(), 1)
    first, second = (term.sum(dim=-1, keepdim=True) / columns for term in (scaled, scaled * normed))
    total = factor * (scaled - first - normed * second)
    if grad_sum is not None:
        total = total + grad_sum.to(dtype)
    dropped = _dropped(total, seed, p)
    return (
        _contiguous(total, grad_output),
        _contiguous(dropped, grad_output) if p else grad_output.new_empty(0),
        _columns(grad * normed, grad_output, True),
        _columns(grad, grad_output, True),
        _columns(dropped, grad_output, bias),
    )


def _fake_norm(
    input: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor,
    seed: Tensor | None,
    p: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_norm(input, bias, residual, weight, norm_bias, seed, p)
    plain = bias is None and residual is None and p == 0
    mean, rstd = (input.new_empty(input.shape[:-1], dtype=working(input)) for _ in range(2))
    return _empty(input), input.new_empty(0) if plain else _empty(input), mean, rstd


def _fake_norm_backward(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    rows: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    seed: Tensor | None,
    p: float,
    bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _check_norm_backward(grad_output, grad_sum, rows, mean, rstd, weight, norm_bias, seed, p)
    return (
        _empty(grad_output),
        _empty(grad_output) if p else grad_output.new_empty(0),
        _empty_columns(grad_output, True),
        _empty_columns(grad_output, True),
        _empty_columns(grad_output, bias),
    )


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    input, bias, residual, weight, _, seed, ctx.p, _ = inputs
    _, total, mean, rstd = output
    ctx.has_bias, ctx.has_residual = bias is not None, residual is not None
    ctx.plain = not (ctx.has_bias or ctx.has_residual or ctx.p)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd, *([total] if ctx.plain else []))
    ctx.save_for_backward(input if ctx.plain else total, mean, rstd, weight, seed)


def _derive_norm(
    ctx: Any, grad_output: Tensor | None, grad_sum: Tensor | None, *others: None
) -> tuple[Tensor | None, ...]:
    total, mean, rstd, weight, seed = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(total)
    if ctx.plain:
        grad_sum = None
    residual, grad_input, grad_weight, norm_bias, bias = _library.call(
        "dropout_add_layer_norm_backward",
        *(grad_output, grad_sum, total, mean, rstd, weight, None, seed, ctx.p, ctx.has_bias),
    )
    grad_input = grad_input if ctx.p else residual
    grad_bias, grad_residual = bias if ctx.has_bias else None, residual if ctx.has_residual else None
    return grad_input, grad_bias, grad_residual, grad_weight, norm_bias, None, None, None


# ---------------------------------------------------------------------------------- fused_bias_gelu


def fused_bias_gelu_reference(input: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """``ds_plugin::fused_bias_gelu`` in plain torch, on any device; arguments as in `fused_bias_gelu`."""
    _check_gelu("fused_bias_gelu", input, bias)
    s = _biased(input, bias)
    return _contiguous(functional.gelu(s, approximate="tanh" if tanh else "none"), input)


def fused_bias_gelu_backward_reference(
    grad_output: Tensor, input: Tensor, bias: Tensor | None, tanh: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of input and of bias; that of bias has no elements if there was none."""
    _check_gelu("fused_bias_gelu_backward", grad_output, bias)
    check("fused_bias_gelu_backward", "input", input, grad_output, grad_output.shape)
    grad = grad_output.to(working(grad_output)) * _gelu_slope(_biased(input, bias), tanh)
    return _contiguous(grad, grad_output), _columns(grad, grad_output, bias is not None)


def _gelu_slope(s: Tensor, tanh: bool) -> Tensor:
    """The derivative of either form of gelu."""
    if tanh:
        t = torch.tanh(math.sqrt(2 / math.pi) * (s + 0.044715 * s**3))
        inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * s**2)
        # Far out, where tanh is 1, the other factors may be infinite.
        return 0.5 * (1 + t) + torch.where(t.abs() == 1, 0.0, 0.5 * s * (1 - t * t) * inner)
    density = torch.exp(-0.5 * s**2) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(s / math.sqrt(2))) + torch.where(density == 0, 0.0, s * density)


def _fake_gelu(input: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    _check_gelu("fused_bias_gelu", input, bias)
    return _empty(input)


def _fake_gelu_backward(grad_output: Tensor, input: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
    _check_gelu("fused_bias_gelu_backward", grad_output, bias)
    check("fused_bias_gelu_backward", "input", input, grad_output, grad_output.shape)
    return _empty(grad_output), _empty_columns(grad_output, bias is not None)


def _save_gelu(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, bias, ctx.tanh = inputs
    ctx.save_for_backward(input, bias)


def _derive_gelu(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    input, bias = ctx.saved_tensors
    grad_input, grad_bias = _library.call("fused_bias_gelu_backward", grad_output, input, bias, ctx.tanh)
    return grad_input, None if bias is None else grad_bias, None


# ---------------------------------------------------------------------------------- masked_softmax_dropout


def masked_softmax_dropout_reference(
    scores: Tensor, mask: Tensor | None, scale: float, seed: Tensor | None, p: float
) -> tuple[Tensor, Tensor]:
    """``ds_plugin::masked_softmax_dropout`` in plain torch, on any device; arguments as in `masked_softmax_dropout`.

    Returns:
        The result, and what it was before dropout, which has no elements if `p` is 0, since it is the result.
    """
    _check_softmax(scores, mask, seed, p)
    x = scores.to(working(scores)) * scale
    if mask is not None:
        x = x + mask.to(x.dtype)
    top = x.amax(dim=-1, keepdim=True) if x.numel() else x
    weights = torch.exp(x - torch.where(top == -torch.inf, 0.0, top))
    sums = weights.sum(dim=-1, keepdim=True)
    probs = weights / torch.where(sums == 0, 1.0, sums)
    if p == 0:
        return _contiguous(probs, scores), scores.new_empty(0)
    return _contiguous(_dropped(probs, seed, p), scores), _contiguous(probs, scores)


def masked_softmax_dropout_backward_reference(
    grad_output: Tensor, probs: Tensor, scale: float, seed: Tensor | None, p: float
) -> Tensor:
    """The gradient of scores, from `probs`, the softmax before dropout."""
    _check_dropout("masked_softmax_dropout_backward", grad_output, seed, p)
    check("masked_softmax_dropout_backward", "probs", probs, grad_output, grad_output.shape)
    weights = probs.to(working(probs))
    grad = _dropped(grad_output.to(weights.dtype), seed, p)
    return _contiguous(scale * weights * (grad - (grad * weights).sum(dim=-1, keepdim=True)), grad_output)


def _fake_softmax(
    scores: Tensor, mask: Tensor | None, scale: float, seed: Tensor | None, p: float
) -> tuple[Tensor, Tensor]:
    _check_softmax(scores, mask, seed, p)
    return _empty(scores), _empty(scores) if p else scores.new_empty(0)


def _fake_softmax_backward(grad_output: Tensor, probs: Tensor, scale: float, seed: Tensor | None, p: float) -> Tensor:
    _check_dropout("masked_softmax_dropout_backward", grad_output, seed, p)
    check("masked_softmax_dropout_backward", "probs", probs, grad_output, grad_output.shape)
    return _empty(grad_output)


def _save_softmax(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, ctx.scale, seed, ctx.p = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1] if ctx.p else output[0], seed)


def _derive_softmax(ctx: Any, grad_output: Tensor, _: None) -> tuple[Tensor | None, ...]:
    probs, seed = ctx.saved_tensors
    grad = _library.call("masked_softmax_dropout_backward", grad_output, probs, ctx.scale, seed, ctx.p)
    return grad, None, None, None, None


# ---------------------------------------------------------------------------------- parts of the references


def _biased(input: Tensor, bias: Tensor | None) -> Tensor:
    x = input.to(working(input))
    return x if bias is None else x + bias.to(x.dtype)


def _sum(input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float) -> Tensor:
    x = _dropped(_biased(input, bias), seed, p)
    return _contiguous(x if residual is None else x + residual.to(x.dtype), input)


def _dropped(x: Tensor, seed: Tensor | None, p: float) -> Tensor:
    if p == 0:
        return x
    assert seed is not None
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    kept = _philox.keep(seed, rows, x.shape[-1], p).view(x.shape)
    return torch.where(kept, x / (1 - p), 0.0)


def _columns(x: Tensor, like: Tensor, wanted: bool) -> Tensor:
    """The sum of all rows, or nothing."""
    if not wanted:
        return like.new_empty(0)
    return x.flatten(0, -2).sum(dim=0).to(like.dtype) if x.dim() > 1 else x.to(like.dtype, copy=True)


def _contiguous(x: Tensor, like: Tensor) -> Tensor:
    """A new contiguous tensor of the dtype of `like`."""
    return torch.empty_like(x, dtype=like.dtype, memory_format=torch.contiguous_format).copy_(x)


def _empty(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _empty_columns(like: Tensor, wanted: bool) -> Tensor:
    return like.new_empty(like.shape[-1] if wanted else 0)


# ---------------------------------------------------------------------------------- checks


def _check_dropout(op: str, first: Tensor, seed: Tensor | None, p: float, name: str = "grad_output") -> None:
    check_first(op, name, first)
    if not 0 <= p < 1:
        raise invalid(op, f"p is {p}; expected at least 0 and less than 1")
    if p == 0:
        return
    if seed is None:
        raise invalid(op, "seed is missing; expected one, since p is not 0")
    if seed.dtype != torch.int64 or seed.numel() != 1 or seed.device != first.device:
        raise invalid(
            op,
            f"seed is {seed.dtype} {list(seed.shape)} on {seed.device}; expected int64, one element, on {first.device}",
        )


def _check_sum(
    op: str, input: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, p: float
) -> None:
    _check_dropout(op, input, seed, p, "input")
    check(op, "bias", bias, input, input.shape[-1:])
    check(op, "residual", residual, input, input.shape)


def _check_norm(
    input: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    weight: Tensor,
    norm_bias: Tensor,
    seed: Tensor | None,
    p: float,
) -> None:
    op = "dropout_add_layer_norm"
    _check_sum(op, input, bias, residual, seed, p)
    check(op, "weight", weight, input, input.shape[-1:])
    check(op, "norm_bias", norm_bias, input, input.shape[-1:])


def _check_norm_backward(
    grad_output: Tensor,
    grad_sum: Tensor | None,
    rows: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    seed: Tensor | None,
    p: float,
) -> None:
    op = "dropout_add_layer_norm_backward"
    _check_dropout(op, grad_output, seed, p)
    check(op, "grad_sum", grad_sum, grad_output, grad_output.shape)
    check(op, "rows", rows, grad_output, grad_output.shape)
    check(op, "weight", weight, grad_output, grad_output.shape[-1:])
    check(op, "norm_bias", norm_bias, grad_output, grad_output.shape[-1:])
    for name, statistic in (("mean", mean), ("rstd", rstd)):
        if statistic is None:
            continue
        wanted = (working(grad_output), grad_output.shape[:-1], grad_output.device)
        if (statistic.dtype, statistic.shape, statistic.device) != wanted:
            raise invalid(
                op,
                f"{name} is {statistic.dtype} {list(statistic.shape)} on {statistic.device}; "
                f"expected {wanted[0]} {list(wanted[1])} on {wanted[2]}",
            )
    if mean is None and norm_bias is None:
        raise invalid(op, "mean and norm_bias are missing; expected one of them")


def _check_gelu(op: str, input: Tensor, bias: Tensor | None) -> None:
    check_first(op, "input", input)
    check(op, "bias", bias, input, input.shape[-1:])


def _check_softmax(scores: Tensor, mask: Tensor | None, seed: Tensor | None, p: float) -> None:
    op = "masked_softmax_dropout"
    _check_dropout(op, scores, seed, p, "scores")
    if scores.dim() > 5:
        raise invalid(op, f"scores has {scores.dim()} dimensions; expected at most 5")
    if mask is None:
        return
    fits = mask.dim() <= scores.dim() and all(
        size in (1, wanted) for size, wanted in zip(reversed(mask.shape), reversed(scores.shape), strict=False)
    )
    if not fits or mask.dtype != scores.dtype or mask.device != scores.device:
        raise invalid(
            op,
            f"mask is {mask.dtype} {list(mask.shape)} on {mask.device}; "
            f"expected {scores.dtype} on {scores.device} that broadcasts to {list(scores.shape)}",
        )


_library.define(
    "dropout_add_backward(Tensor grad_output, Tensor? seed, float p, bool bias) -> (Tensor, Tensor)",
    reference=dropout_add_backward_reference,
    fake=_fake_dropout_add_backward,
)
_library.define(
    "dropout_add(Tensor input, Tensor? bias, Tensor? residual, Tensor? seed, float p) -> Tensor",
    reference=dropout_add_reference,
    fake=_fake_dropout_add,
    autograd=Autograd(_derive_dropout_add, _save_dropout_add),
)
_library.define(
    "dropout_add_layer_norm_backward(Tensor grad_output, Tensor? grad_sum, Tensor rows, Tensor? mean, Tensor rstd, "
    "Tensor weight, Tensor? norm_bias, Tensor? seed, float p, bool bias) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=dropout_add_layer_norm_backward_reference,
    fake=_fake_norm_backward,
)
_library.define(
    "dropout_add_layer_norm(Tensor input, Tensor? bias, Tensor? residual, Tensor weight, Tensor norm_bias, "
    "Tensor? seed, float p, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=dropout_add_layer_norm_reference,
    fake=_fake_norm,
    autograd=Autograd(_derive_norm, _save_norm),
)
_library.define(
    "fused_bias_gelu_backward(Tensor grad_output, Tensor input, Tensor? bias, bool tanh) -> (Tensor, Tensor)",
    reference=fused_bias_gelu_backward_reference,
    fake=_fake_gelu_backward,
)
_library.define(
    "fused_bias_gelu(Tensor input, Tensor? bias, bool tanh) -> Tensor",
    reference=fused_bias_gelu_reference,
    fake=_fake_gelu,
    autograd=Autograd(_derive_gelu, _save_gelu),
)
_library.define(
    "masked_softmax_dropout_backward(Tensor grad_output, Tensor probs, float scale, Tensor? seed, float p) -> Tensor",
    reference=masked_softmax_dropout_backward_reference,
    fake=_fake_softmax_backward,
)
_library.define(
    "masked_softmax_dropout(Tensor scores, Tensor? mask, float scale, Tensor? seed, float p) -> (Tensor, Tensor)",
    reference=masked_softmax_dropout_reference,
    fake=_fake_softmax,
    autograd=Autograd(_derive_softmax, _save_softmax),
)

__all__ = [
    "dropout_add",
    "dropout_add_layer_norm",
    "fused_bias_gelu",
    "masked_softmax_dropout",
    "new_seed",
]
