"""Defects of ops in some of their options, masks and shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.target import Target
from mutants.kernels import Kernel, kernel
from mutants.mutant import SIMULATED, mutant


# ---- ops: options that no call had -----------------------------------------------------------------------------------
@mutant("attention.own_scale", "O1.1", "ops", only="/cached_attention/")
def own_scale(target: Target) -> Target:
    """The scale is not looked at: the kernel's own is the root of the head's size."""

    def function(original: Kernel, q: Tensor, *a: Any) -> Tensor:
        result: Tensor = original(q, *a[:5], max(q.shape[-1], 1) ** -0.5, *a[6:])
        return result

    return kernel(target, "cached_attention", function)


@mutant("attention.bool_mask_added", "O1.1", "ops", only="/cached_attention/")
def bool_mask_added(target: Target) -> Target:
    """A mask of four dimensions is added, bool or not."""

    def function(original: Kernel, *a: Any) -> Tensor:
        mask = a[7]
        if mask is not None and mask.dim() == 4 and mask.dtype == torch.bool:
            mask = mask.to(a[0].dtype)
        result: Tensor = original(*a[:7], mask, *a[8:])
        return result

    return kernel(target, "cached_attention", function)


@mutant("attention.wide_mask", "O1.1", "ops", only="/cached_attention/")
def wide_mask(target: Target) -> Target:
    """Rows of a mask are as long as what is attended to: of a longer one, as a static cache has it, others are read."""

    def function(original: Kernel, *a: Any) -> Tensor:
        mask, total = a[7], a[5] + a[1].shape[2]
        if mask is not None and mask.shape[-1] > total and mask.is_contiguous():
            shape = (*mask.shape[:-1], total)
            mask = mask.flatten()[: torch.Size(shape).numel()].view(shape)
        result: Tensor = original(*a[:7], mask, *a[8:])
        return result

    return kernel(target, "cached_attention", function)


@mutant("attention.queries_after_the_cache", "O1.1", "ops", only="/cached_attention/")
def queries_after_the_cache(target: Target) -> Target:
    """Queries without new keys stand after the last position, and see all of them."""

    def function(original: Kernel, *a: Any) -> Tensor:
        result: Tensor = original(*a[:10], a[10] and a[1].shape[2] > 0)
        return result

    return kernel(target, "cached_attention", function)


@mutant("attention.scores_in_float16", "O1.1", "ops", target=SIMULATED, only="/cached_attention/float16")
def scores_in_float16(target: Target) -> Target:
    """Products of float16 are float16 before they are scaled: those above 65,504 are infinite, and give NaN."""

    def function(original: Kernel, q: Tensor, k: Tensor, *a: Any) -> Tensor:
        result: Tensor = original(q, k, *a)
        if q.dtype == torch.float16 and q.numel() and k.shape[2]:
            keys = a[1][:, :, : a[3] + k.shape[2]].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            overflows = (q.float() @ keys.float().mT).abs().amax(-1, keepdim=True) > 65504
            result.masked_fill_(overflows, float("nan"))
        return result

    return kernel(target, "cached_attention", function)


@mutant("norm.own_eps", "O1.1", "ops", only="/rms_norm/")
def own_eps(target: Target) -> Target:
    """Epsilon is 1e-5 whatever is asked for."""
    return kernel(target, "rms_norm", lambda original, x, weight, eps, *rest: original(x, weight, 1e-5, *rest))


@mutant("linear.bias_of_another", "O1.1", "ops", only="/linear/")
def bias_of_another(target: Target) -> Target:
    """Without a bias, that of the call before is added."""
    last: dict[Any, Tensor] = {}

    def function(original: Kernel, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
        if bias is None:
            bias = last.get(x.dtype, x.new_ones(1))[:1].expand(weight.shape[0])
        else:
            last[x.dtype] = bias.clone()
        return original(x, weight, bias, *rest)

    return kernel(target, "linear", function)


@mutant("linear.residual_of_gated", "O1.1", "ops", only="/linear/")
def residual_of_gated(target: Target) -> Target:
    """A residual is added to what is gated alone."""
    return kernel(
        target,
        "linear",
        lambda original, *a: original(*a[:5], a[5] if len(a) > 7 and a[7] else None, *a[6:]),
    )


@mutant("linear.first_of_a_batch", "O1.1", "ops", only="/linear/")
def first_of_a_batch(target: Target) -> Target:
    """The rows of a batch are counted by its second last dimension: of three, the first matrix is multiplied."""

    def function(original: Kernel, x: Tensor, *rest: Any) -> Any:
        result = original(x, *rest)
        if x.dim() > 2:
            result.view(-1, *result.shape[-2:])[1:] = 0
        return result

    return kernel(target, "linear", function)


@mutant("rotary.angles_of_each", "O1.1", "ops", only="/rotary/")
def angles_of_each(target: Target) -> Target:
    """Angles that a batch has in common are those of its first sequence."""

    def function(original: Kernel, x: Tensor, cos: Tensor, sin: Tensor, *rest: Any) -> Tensor:
        if len(cos) < len(x):
            none = len(x) - len(cos)
            cos = torch.cat([cos, torch.ones_like(cos).repeat(none, 1, 1)])
            sin = torch.cat([sin, torch.zeros_like(sin).repeat(none, 1, 1)])
        result: Tensor = original(x, cos, sin, *rest)
        return result

    return kernel(target, "rotary", function)


@mutant("lamb.ends_at_an_empty_tensor", "O1.1", "ops", only="/lamb_")
def ends_at_an_empty_tensor(target: Target) -> Target:
    """A tensor without elements is taken for the end of the list."""

    def function(original: Kernel, params: list[Tensor], *a: Any) -> Tensor:
        end = next((i for i, p in enumerate(params) if not p.numel()), len(params))
        if end == len(params):
            whole: Tensor = original(params, *a)
            return whole
        ratios = params[0].new_ones(len(params), dtype=torch.float32)
        if end:
            steps = a[4] if len(a[4]) == 1 else a[4][:end]
            ratios[:end] = original(params[:end], *(each[:end] for each in a[:4]), steps, *a[5:])
        return ratios

    return kernel(target, "lamb_", function)


@mutant("lamb.step_of_the_first", "O1.7", "ops", only="/lamb_")
def lamb_step_of_the_first(target: Target) -> Target:
    """All tensors of a list are corrected for the step of the first."""
    return kernel(target, "lamb_", lambda original, *a: original(*a[:5], a[5][:1], *a[6:]))


@mutant("softmax.mask_by_row", "O1.1", "ops", only="/masked_softmax_dropout/")
def mask_by_row(target: Target) -> Target:
    """A mask for each sequence of a batch goes to the rows in turn."""

    def function(original: Kernel, scores: Tensor, mask: Tensor | None, *rest: Any) -> Any:
        if mask is not None and mask.dim() == 4 and mask.shape[0] > 1 and mask.shape[1:3] == (1, 1):
            rows = scores.numel() // scores.shape[-1]
            mask = mask.view(-1, mask.shape[-1]).repeat(-(-rows // len(mask)), 1)[:rows].view(scores.shape)
        return original(scores, mask, *rest)

    return kernel(target, "masked_softmax_dropout", function)


@mutant("gradient.frozen_input", "O4.1", "ops", only="linear_cross_entropy/")
def frozen_input(target: Target) -> Target:
    """Where the input wants no gradient, that of the weight is not computed either."""

    def function(original: Kernel, *a: Any) -> tuple[Tensor, ...]:
        loss, of_input, of_weight, of_bias = original(*a)
        if not a[8]:
            of_weight.zero_()
        return loss, of_input, of_weight, of_bias

    return kernel(target, "linear_cross_entropy", function)


@mutant("linear.narrow_sums", "O1.7", "ops", only="/linear")
def narrow_sums(target: Target) -> Target:
    """Sums of products in bfloat16 are bfloat16, from one block of 32 columns to the next."""

    def function(original: Kernel, x: Tensor, weight: Tensor, bias: Any, scales: Any, *rest: Any) -> Any:
        if x.dtype != torch.bfloat16 or scales is not None or len(weight) > 4096:
            return original(x, weight, bias, scales, *rest)
        total = x.new_zeros(*x.shape[:-1], weight.shape[0])
        for a, b in zip(torch.split(x, 32, -1), torch.split(weight, 32, -1), strict=True):
            total = (total.float() + a.float() @ b.float().T).bfloat16()
        exact: Tensor = original(x, weight, bias, scales, *rest)
        if not bool(total.isfinite().all()):
            return exact
        # the rest of the op, of a product that is rounded
        return original(total, torch.eye(weight.shape[0], dtype=x.dtype), bias, None, *rest)

    return kernel(target, "linear", function)
