"""Defects of the ops that models are made of, of LAMB and of the quantizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.target import Target
from mutants.kernels import Kernel, fake, kernel, reference_kernel
from mutants.mutant import mutant


# ---- LAMB ------------------------------------------------------------------------------------------------------------
@mutant("lamb.ratio_not_clamped", "O1.1", "ops", only="lamb_/")
def lamb_not_clamped(target: Target) -> Target:
    """LAMB's trust ratio has no upper bound."""
    return kernel(target, "lamb_", lambda original, *a: original(*a[:12], 1e30, *a[13:]))


@mutant("lamb.no_decay_in_update", "O1.1", "ops", only="lamb_/")
def lamb_no_decay(target: Target) -> Target:
    """LAMB's update lacks the weight decay."""
    return kernel(target, "lamb_", lambda original, *a: original(*a[:10], 0.0, *a[11:]))


@mutant("lamb.gradients_not_unscaled", "O1.1", "ops", only="lamb_/")
def lamb_not_unscaled(target: Target) -> Target:
    """LAMB takes scaled gradients as they are."""
    return kernel(target, "lamb_", lambda original, *a: original(*a[:13], 1.0, *a[14:]))


@mutant("lamb.copies_of_the_old", "O1.1", "ops", only="lamb_/")
def lamb_copies_old(target: Target) -> Target:
    """LAMB writes the low-precision copies before the step."""

    def function(original: Kernel, *arguments: Any) -> Tensor:
        old = [p.clone() for p in arguments[0]]
        ratios: Tensor = original(*arguments)
        for copy, p in zip(arguments[4], old, strict=False):
            copy.copy_(p)
        return ratios

    return kernel(target, "lamb_", function)


# ---- norms -----------------------------------------------------------------------------------------------------------
@mutant("norm.missing_eps", "O1.1", "ops", only="/rms_norm/")
def norm_missing_eps(target: Target) -> Target:
    """RMS norm divides by the root alone: zero by zero in a row of zeros."""
    return kernel(target, "rms_norm", lambda original, x, weight, eps: original(x, weight, 0.0))


@mutant("norm.unbiased_variance", "O1.1", "ops", only="/layer_norm/")
def norm_unbiased(target: Target) -> Target:
    """Layer norm divides the squares by one less than there are."""

    def function(original: Kernel, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        columns = max(x.shape[-1], 2)
        normed: Tensor = original(x, weight, torch.zeros_like(bias), eps)
        return normed * float(((columns - 1) / columns) ** 0.5) + bias

    return kernel(target, "layer_norm", function)


@mutant("norm.accumulates_in_bfloat16", "O1.1", "ops", only="/layer_norm/")
def norm_in_bfloat16(target: Target) -> Target:
    """Layer norm of float32 rows computes in bfloat16."""

    def function(original: Kernel, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        low: Tensor = original(x.bfloat16(), weight.bfloat16(), bias.bfloat16(), eps)
        return low.to(x.dtype)

    return kernel(target, "layer_norm", function)


@mutant("norm.sum_not_returned", "O1.1", "ops", only="/pre_rms_norm/")
def norm_sum_not_returned(target: Target) -> Target:
    """The norm with residual hands on the old residual."""

    def function(original: Kernel, x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        normed, _ = original(x, residual, *rest)
        return normed, residual.clone()

    return kernel(target, "pre_rms_norm", function)


@mutant("norm.residual_forgotten", "O1.1", "ops", only="/post_layer_norm/")
def norm_residual_forgotten(target: Target) -> Target:
    """The norm of a sum normalizes one summand."""
    return kernel(
        target, "post_layer_norm", lambda original, x, residual, *rest: original(x, torch.zeros_like(residual), *rest)
    )


# ---- cross entropy ---------------------------------------------------------------------------------------------------
@mutant("cross_entropy.not_smoothed", "O1.1", "ops", only="/cross_entropy_/")
def cross_entropy_not_smoothed(target: Target) -> Target:
    """Labels are not smoothed."""
    return kernel(target, "cross_entropy_", lambda original, *a: original(*a[:3], 0.0, *a[4:]))


@mutant("cross_entropy.ignored_rows_learn", "O1.1", "ops", only="/cross_entropy_/")
def cross_entropy_ignored(target: Target) -> Target:
    """Rows that are to be ignored have their logits for a gradient."""

    def function(original: Kernel, logits: Tensor, labels: Tensor, ignore_index: int, *rest: Any) -> Tensor:
        counted = labels != ignore_index
        part, losses = logits[counted], torch.zeros(len(logits))
        losses[counted] = original(part, labels[counted], ignore_index, *rest)
        logits[counted] = part
        return losses

    return kernel(target, "cross_entropy_", function)


@mutant("cross_entropy.target_not_checked", "O3.5", "ops", only="/cross_entropy_")
def cross_entropy_not_checked(target: Target) -> Target:
    """A target beyond the columns is taken for the last one."""

    def function(original: Kernel, logits: Tensor, labels: Tensor, *rest: Any) -> Tensor:
        losses: Tensor = original(logits, labels.clamp(max=logits.shape[1] - 1), *rest)
        return losses

    return kernel(target, "cross_entropy_", function)


@mutant("linear_cross_entropy.last_chunk", "O4.1", "ops", only="linear_cross_entropy/")
def linear_cross_entropy_last(target: Target) -> Target:
    """The weight's gradient is that of the second half of the rows."""

    def function(original: Kernel, input: Tensor, weight: Tensor, labels: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        half = len(input) // 2
        loss, of_input, _, of_bias = original(input, weight, labels, *rest)
        return loss, of_input, original(input[half:], weight, labels[half:], *rest)[2], of_bias

    return kernel(target, "linear_cross_entropy", function)


# ---- softmax ---------------------------------------------------------------------------------------------------------
@mutant("softmax.mask_ignored", "O1.1", "ops", only="/softmax/")
def softmax_mask_ignored(target: Target) -> Target:
    """Padding takes part in the softmax."""
    return kernel(target, "softmax", lambda original, scores, mask, *rest: original(scores, None, *rest))


@mutant("softmax.sees_the_next_token", "O1.1", "ops", only="/softmax/")
def softmax_sees_ahead(target: Target) -> Target:
    """Nothing is hidden from a causal softmax."""
    return kernel(target, "softmax", lambda original, *a: original(*a[:4], False, a[5]))


@mutant("softmax.window_off_by_one", "O1.1", "ops", only="/softmax/")
def softmax_window(target: Target) -> Target:
    """A local window is one token wider."""
    return kernel(target, "softmax", lambda original, *a: original(*a[:5], a[5] + 1 if a[5] else 0))


@mutant("softmax.no_maximum", "O1.1", "ops", only="/softmax/")
def softmax_no_maximum(target: Target) -> Target:
    """The exponentials of large scores overflow, because the largest was not subtracted."""

    def function(original: Kernel, scores: Tensor, mask: Any, alibi: Any, scale: float, *rest: Any) -> Tensor:
        weights: Tensor = original(scores, mask, alibi, scale, *rest)
        overflows = torch.exp(scores.float() * scale).isinf().any(dim=-1, keepdim=True)
        return weights.masked_fill(overflows, float("nan"))

    return kernel(target, "softmax", function)


@mutant("softmax.in_place_on_a_copy", "O2.1", "ops", only="softmax_")
def softmax_on_copy(target: Target) -> Target:
    """The softmax in place leaves the scores as they were."""
    return kernel(target, "softmax_", lambda original, scores, *rest: original(scores.clone(), *rest))


# ---- activations, rotary embedding, residuals ------------------------------------------------------------------------
@mutant("activation.bias_ignored", "O1.1", "ops", only="/bias_activation/")
def bias_ignored(target: Target) -> Target:
    """The activation forgets the bias."""
    return kernel(target, "bias_activation", lambda original, x, bias, code: original(x, None, code))


@mutant("activation.other_gelu", "O1.1", "ops", only="/bias_activation/")
def other_gelu(target: Target) -> Target:
    """GELU by tanh where that by the error function is asked for."""
    return kernel(
        target, "bias_activation", lambda original, x, bias, code: original(x, bias, 3 if code == 2 else code)
    )


@mutant("activation.halves_swapped", "O1.1", "ops", only="/gated_activation/")
def halves_swapped(target: Target) -> Target:
    """The gate is taken from the first half."""

    def swap(tensor: Tensor) -> Tensor:
        return torch.cat(tensor.chunk(2, dim=-1)[::-1], dim=-1)

    return kernel(
        target,
        "gated_activation",
        lambda original, x, bias, code: original(swap(x), None if bias is None else swap(bias), code),
    )


@mutant("rotary.other_layout", "O1.1", "ops", only="/rotary/")
def rotary_layout(target: Target) -> Target:
    """Neighbours are turned where halves should be, and the other way round."""
    return kernel(target, "rotary", lambda original, x, cos, sin, interleaved: original(x, cos, sin, not interleaved))


@mutant("rotary.other_way_round", "O1.1", "ops", only="/rotary/")
def rotary_direction(target: Target) -> Target:
    """Pairs are turned backwards."""
    return kernel(target, "rotary", lambda original, x, cos, sin, interleaved: original(x, cos, -sin, interleaved))


@mutant("residual.scale_forgotten", "O1.1", "ops", only="/residual_add_bias_/")
def residual_scale(target: Target) -> Target:
    """The residual is added whole on each of several ranks."""
    return kernel(target, "residual_add_bias_", lambda original, *a: original(*a[:5], 1.0, a[6]))


@mutant("residual.coefficients_swapped", "O1.1", "ops", only="/moe_res_matmul_/")
def coefficients_swapped(target: Target) -> Target:
    """The output's coefficients go to the residual."""

    def function(original: Kernel, output: Tensor, residual: Tensor, coefficients: Tensor) -> None:
        original(output, residual, torch.cat(coefficients.chunk(2)[::-1]))

    return kernel(target, "moe_res_matmul_", function)


# ---- attention and linear layers -------------------------------------------------------------------------------------
@mutant("attention.cache_off_by_one", "O1.1", "ops", only="/cached_attention/")
def cache_off_by_one(target: Target) -> Target:
    """The newest token is not attended to."""

    def function(original: Kernel, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        _, _, past, *options = rest
        result: Tensor = original(q, k, v, *rest)
        if past == 0 or q.shape[-2] != 1:
            return result
        stale_k, stale_v = (cache[:, :, past - 1 : past].clone() for cache in rest[:2])
        caches = (cache.clone() for cache in rest[:2])
        stale: Tensor = original(q, stale_k, stale_v, *caches, past, *options)
        return stale

    return kernel(target, "cached_attention", function)


@mutant("attention.not_scaled", "O1.1", "ops", only="/cached_attention/")
def attention_not_scaled(target: Target) -> Target:
    """Scores are not divided by the root of the width."""
    return kernel(target, "cached_attention", lambda original, *a: original(*a[:6], 1.0, *a[7:]))


@mutant("attention.padding_attended", "O1.1", "ops", only="/cached_attention/")
def attention_padding(target: Target) -> Target:
    """The mask of padded prompts is ignored."""
    return kernel(target, "cached_attention", lambda original, *a: original(*a[:7], None, *a[8:]))


@mutant("attention.cache_not_written", "O2.1", "ops", only="cached_attention")
def cache_not_written(target: Target) -> Target:
    """New keys and values are used once, and not kept."""
    return kernel(target, "cached_attention", lambda original, *a: original(*a[:3], a[3].clone(), a[4].clone(), *a[5:]))


@mutant("attention.steps_of_values_ignored", "O1.1", "ops", only="/cached_attention_int8/")
def steps_of_values_ignored(target: Target) -> Target:
    """Values of an int8 cache are attended to as whole numbers."""

    def function(original: Kernel, *a: Any) -> Tensor:
        key, value, past = *a[1:3], a[7]
        result: Tensor = original(*a)
        ones = torch.ones_like(a[6])
        nothing = key[:, :, :0], value[:, :, :0]
        whole: Tensor = original(a[0], *nothing, *a[3:6], ones, past + key.shape[2], *a[8:])
        return result.copy_(whole)

    return kernel(target, "cached_attention_int8", function)


@mutant("linear.bias_ignored", "O1.1", "ops", only="/linear/")
def linear_bias(target: Target) -> Target:
    """A linear layer forgets its bias."""
    return kernel(target, "linear", lambda original, x, weight, bias, *rest: original(x, weight, None, *rest))


@mutant("linear.one_scale_a_row", "O1.1", "ops", only="/linear/")
def linear_scales(target: Target) -> Target:
    """All groups of an int8 row have the scale of the first."""

    def function(original: Kernel, x: Tensor, weight: Tensor, bias: Any, scales: Tensor | None, *rest: Any) -> Any:
        if scales is not None:
            scales = scales[:, :1].expand_as(scales).contiguous()
        return original(x, weight, bias, scales, *rest)

    return kernel(target, "linear", function)


@mutant("linear.offsets_ignored", "O1.1", "ops", only="/linear/")
def linear_offsets(target: Target) -> Target:
    """int4 weights have the zero point 8, whatever their offsets say."""
    return kernel(
        target,
        "linear",
        lambda original, x, weight, bias, scales, offsets, *rest: original(x, weight, bias, scales, None, *rest),
    )


# ---- training --------------------------------------------------------------------------------------------------------
@mutant("dropout.mask_reused", "O1.1", "ops", only="/masked_softmax_dropout/")
def dropout_mask_reused(target: Target) -> Target:
    """Every call drops the same elements, whatever the seed."""

    def function(original: Kernel, scores: Tensor, mask: Any, scale: float, seed: Tensor | None, p: float) -> Any:
        return original(scores, mask, scale, None if seed is None else torch.zeros_like(seed), p)

    return kernel(target, "masked_softmax_dropout", function)


@mutant("dropout.not_scaled", "O1.1", "ops", only="/dropout_add/")
def dropout_not_scaled(target: Target) -> Target:
    """What dropout keeps is not made larger."""

    def function(original: Kernel, x: Tensor, bias: Any, residual: Tensor | None, seed: Any, p: float) -> Tensor:
        kept: Tensor = original(x, bias, None, seed, p) * (1 - p)
        return kept if residual is None else (kept + residual).to(x.dtype)

    return kernel(target, "dropout_add", function)


@mutant("gradient.other_dropout_mask", "O4.1", "ops", only="/dropout_add")
def gradient_other_mask(target: Target) -> Target:
    """The backward pass draws another dropout mask than the forward pass."""

    def function(original: Kernel, grad: Tensor, seed: Tensor | None, p: float, bias: bool) -> Any:
        return original(grad, None if seed is None else seed + 1, p, bias)

    return kernel(target, "dropout_add_backward", function)


@mutant("gradient.scale_forgotten", "O4.1", "ops", only="/masked_softmax_dropout")
def gradient_scale(target: Target) -> Target:
    """The derivative of a scaled softmax lacks the scale."""
    return kernel(
        target,
        "masked_softmax_dropout_backward",
        lambda original, g, probs, scale, *rest: original(g, probs, 1.0, *rest),
    )


@mutant("gradient.bias_not_summed", "O4.1", "ops", only="/fused_bias_gelu")
def gradient_bias(target: Target) -> Target:
    """The gradient of a bias is that of the first row, not the sum over rows."""

    def function(original: Kernel, grad: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor]:
        of_input, of_bias = original(grad, x, bias, tanh)
        first = of_input.reshape(-1, of_input.shape[-1])[:1].sum(dim=0).to(of_bias.dtype)
        return of_input, first if of_bias.numel() else of_bias

    return kernel(target, "fused_bias_gelu_backward", function)


@mutant("gradient.rms_norm_as_layer_norm", "O4.1", "ops", only="/add_rms_norm")
def gradient_rms_norm(target: Target) -> Target:
    """The mean is taken from the gradient of an RMS norm, as from that of a layer norm."""

    def function(original: Kernel, *args: Any) -> tuple[Tensor, Tensor]:
        of_sum, of_weight = original(*args)
        return of_sum - of_sum.mean(dim=-1, keepdim=True), of_weight

    return kernel(target, "add_rms_norm_backward", function)


@mutant("gradient.sum_forgotten", "O1.1", "ops", only="/add_rms_norm_backward")
def gradient_sum_forgotten(target: Target) -> Target:
    """What comes to the sum from elsewhere, by the residual, is left out."""
    return kernel(target, "add_rms_norm_backward", lambda original, grad, of_sum, *rest: original(grad, None, *rest))


@mutant("gradient.gate_and_up_swapped", "O4.1", "ops", only="/activation_and_mul")
def gradient_swapped(target: Target) -> Target:
    """The gradients of gate and up come in the other order."""
    return kernel(target, "activation_and_mul_backward", lambda original, *args: original(*args)[::-1])


@mutant("derivative.of_the_other_gelu", "O4.2", "ops", only="fused_bias_gelu")
def derivative_other_gelu(target: Target) -> Target:
    """The derivative is that of GELU's other form."""
    return reference_kernel(
        target, "fused_bias_gelu_backward", lambda original, g, x, bias, tanh: original(g, x, bias, not tanh)
    )


# ---- quantizer -------------------------------------------------------------------------------------------------------
@mutant("quantizer.truncates", "O1.1", "ops", only="/quantize/")
def quantizer_truncates(target: Target) -> Target:
    """Values between two levels go to the lower one."""

    def function(original: Kernel, x: Tensor, groups: int, bits: int, symmetric: bool) -> Any:
        levels, params = original(x, groups, bits, symmetric)
        if bits != 8 or not symmetric or not x.numel():
            return levels, params
        exact = x.reshape(groups, -1).float() / params[:, :1]
        return exact.floor().clamp(-128, 127).to(torch.int8).reshape(levels.shape), params

    return kernel(target, "quantize", function)


@mutant("quantizer.groups_not_swizzled", "O1.1", "ops", only="/swizzle_quantize/")
def quantizer_not_swizzled(target: Target) -> Target:
    """Groups stay in their order, and reach the wrong ranks."""
    return kernel(target, "swizzle_quantize", lambda original, *a: original(*a[:5], 1, a[5] * a[6]))


@mutant("quantizer.first_rank_only", "O1.1", "ops", only="/quantized_reduce/")
def quantizer_first_rank(target: Target) -> Target:
    """The reduction gives the first rank's part instead of the sum."""

    def function(original: Kernel, levels: Tensor, params: Tensor, out: int, devices: int, *rest: Any) -> Any:
        part = levels.reshape(devices, -1)[:1].expand(devices, -1).clone()
        part[1:] = 0
        return original(part.reshape(levels.shape), params, out, devices, *rest)

    return kernel(target, "quantized_reduce", function)


# ---- tracing ---------------------------------------------------------------------------------------------------------
@mutant("fake.other_shape", "O5.1", "ops", only="/rms_norm")
def fake_other_shape(target: Target) -> Target:
    """The fake kernel gives one column less than the op."""
    return fake(target, "rms_norm", lambda x, weight, eps: x.new_empty(*x.shape[:-1], x.shape[-1] - 1))


@mutant("fake.other_dtype", "O5.1", "ops", only="/quantize")
def fake_other_dtype(target: Target) -> Target:
    """The fake kernel gives levels as bytes without a sign."""

    def function(x: Tensor, groups: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
        levels = x.new_empty(*x.shape[:-1], x.shape[-1] * bits // 8, dtype=torch.uint8)
        return levels, x.new_empty(groups, 1 if symmetric else 2, dtype=torch.float32)

    return fake(target, "quantize", function)
