"""Defects of a model's layers in calls that few try: of options together, rows in another order, negatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.target import Target
from mutants.kernels import Kernel, kernel
from mutants.mutant import SIMULATED, mutant
from mutants.paths import default_stream, in_memory_order


# ---- norms -----------------------------------------------------------------------------------------------------------
def _norm_by_squares(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """With the mean of the squares less the square of the mean for a variance."""
    mean = x.mean(-1, keepdim=True)
    variance = ((x * x).mean(-1, keepdim=True) - mean * mean).clamp(min=0)
    return (x - mean) * torch.rsqrt(variance + eps) * weight + bias


@mutant("norm.squares_in_training", "O1.1", "ops", only="/dropout_add_layer_norm/float32")
def squares_in_training(target: Target) -> Target:
    """The variance is the mean of squares less the square of the mean: far from zero little of it is left."""

    def function(original: Kernel, x: Tensor, *a: Any) -> Any:
        output, total, *rest = original(x, *a)
        rows = total if total.numel() else x
        if rows.numel():
            output.copy_(_norm_by_squares(rows, a[2], a[3], a[6]))
        return output, total, *rest

    return kernel(target, "dropout_add_layer_norm", function)


def _overflows(rows: Tensor) -> Tensor:
    """Rows with a number whose square float16 does not hold."""
    found: Tensor = ((rows.float().square() > 65504) & rows.isfinite()).any(-1, keepdim=True)
    return found if rows.dtype == torch.float16 else torch.zeros_like(found)


@mutant("norm.squares_in_float16", "O1.1", "ops", target=SIMULATED, only="/rms_norm/float16")
def squares_in_float16(target: Target) -> Target:
    """Squares of float16 are float16: of numbers above 256 they are infinite, and the row becomes zero."""

    def function(original: Kernel, x: Tensor, *rest: Any) -> Tensor:
        result: Tensor = original(x, *rest)
        return result.masked_fill_(_overflows(x), 0.0) if x.numel() else result

    return kernel(target, "rms_norm", function)


@mutant("norm.trained_squares_in_float16", "O1.1", "ops", target=SIMULATED, only="/add_rms_norm/float16")
def trained_squares_in_float16(target: Target) -> Target:
    """The same of the norm that models train with."""

    def function(original: Kernel, x: Tensor, residual: Tensor | None, *rest: Any) -> Any:
        output, *others = original(x, residual, *rest)
        if x.numel():
            output.masked_fill_(_overflows(x if residual is None else x + residual), 0.0)
        return output, *others

    return kernel(target, "add_rms_norm", function)


@mutant("norm.vectors_without_rows", "O1.1", "ops", only="/rms_norm/float32")
def vectors_without_rows(target: Target) -> Target:
    """A vector is an error, for it has no second last dimension."""

    def function(original: Kernel, x: Tensor, *rest: Any) -> Any:
        x.size(-2)
        return original(x, *rest)

    return kernel(target, "rms_norm", function)


@mutant("norm.own_eps_of_sums", "O1.1", "ops", only="/add_rms_norm/float32")
def own_eps_of_sums(target: Target) -> Target:
    """Where a residual is added epsilon is 1e-5, whatever is asked for."""

    def function(original: Kernel, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Any:
        return original(x, residual, weight, eps if residual is None else 1e-5)

    return kernel(target, "add_rms_norm", function)


@mutant("touch.sum_in_the_residual", "O2.2", "ops", only="/add_rms_norm")
def sum_in_the_residual(target: Target) -> Target:
    """The sum is written into the residual, too, as inference wants it."""

    def function(original: Kernel, x: Tensor, residual: Tensor | None, *rest: Any) -> Any:
        results = original(x, residual, *rest)
        if residual is not None:
            residual.copy_(results[1])
        return results

    return kernel(target, "add_rms_norm", function)


# ---- layouts ---------------------------------------------------------------------------------------------------------
def _dense_rows(tensor: Tensor) -> Tensor:
    """What a kernel reads that takes a tensor without gaps, whose last dimension lies in one piece, for contiguous."""
    return in_memory_order(tensor) if tensor.dim() > 1 and tensor.stride(-1) == 1 else tensor


@mutant("layout.sequence_first", "O1.2", "ops", only="/rms_norm/")
def sequence_first(target: Target) -> Target:
    """Rows of a batch whose first two dimensions were exchanged are read in the order of memory."""
    return kernel(target, "rms_norm", lambda original, x, *rest: original(_dense_rows(x), *rest))


@mutant("layout.heads_of_tokens", "O1.2", "ops", only="/rotary/")
def heads_of_tokens(target: Target) -> Target:
    """Heads beside each other in a token's row, as a projection leaves them, are read in the order of memory."""
    return kernel(target, "rotary", lambda original, x, *rest: original(_dense_rows(x), *rest))


@mutant("layout.keys_of_tokens", "O1.2", "ops", only="/cached_attention/")
def keys_of_tokens(target: Target) -> Target:
    """The same of keys."""
    return kernel(target, "cached_attention", lambda original, q, k, *rest: original(q, _dense_rows(k), *rest))


# ---- activations -----------------------------------------------------------------------------------------------------
@mutant("launch.without_bias_elsewhere", "O8.1", "ops", target=SIMULATED, only="/bias_activation")
def without_bias_elsewhere(target: Target) -> Target:
    """The kernel of an activation without a bias runs on the default stream."""

    def function(original: Kernel, x: Tensor, bias: Tensor | None, activation: int) -> Any:
        if bias is not None:
            return original(x, bias, activation)
        with default_stream():
            return original(x, bias, activation)

    return kernel(target, "bias_activation", function)


# ---- linear layers ---------------------------------------------------------------------------------------------------
@mutant("touch.product_in_the_residual", "O2.2", "ops", only="/linear")
def product_in_the_residual(target: Target) -> Target:
    """The product is added into the residual, as a matrix library does it."""

    def function(original: Kernel, *a: Any) -> Tensor:
        result: Tensor = original(*a)
        if a[5] is not None:
            a[5].copy_(result)
        return result

    return kernel(target, "linear", function)


@mutant("caches.repacked_weights", "O1.6", "ops", only="/linear")
def repacked_weights(target: Target) -> Target:
    """Weights of four bits are packed for the device once for each address."""
    packed: dict[Any, tuple[Tensor, Tensor]] = {}

    def function(original: Kernel, x: Tensor, weight: Tensor, bias: Any, scales: Any, *rest: Any) -> Any:
        if weight.dtype == torch.uint8:
            key = weight.data_ptr(), weight.shape
            weight, scales = packed.setdefault(key, (weight.clone(), scales.clone()))
        return original(x, weight, bias, scales, *rest)

    return kernel(target, "linear", function)


@mutant("linear.sums_of_levels", "O1.1", "ops", target=SIMULATED, only="/linear/float16")
def sums_of_levels(target: Target) -> Target:
    """Sums of float16 inputs times int8 levels are float16 before they are scaled: those above 65,504 are infinite."""

    def function(original: Kernel, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        result: Tensor = original(x, weight, *rest)
        if weight.dtype == torch.int8 and x.dtype == torch.float16 and result.shape[-1] == len(weight):
            result.masked_fill_((x.float() @ weight.float().T).abs() > 65504, torch.inf)
        return result

    return kernel(target, "linear", function)


# ---- attention -------------------------------------------------------------------------------------------------------
@mutant("attention.heads_of_128", "O1.1", "ops", only="/cached_attention/float32")
def heads_of_128(target: Target) -> Target:
    """Of a head's numbers those after the 128th are not computed."""

    def function(original: Kernel, *a: Any) -> Tensor:
        result: Tensor = original(*a)
        result[..., 128:] = 0
        return result

    return kernel(target, "cached_attention", function)


@mutant("attention.blocks_of_a_batch", "O1.1", "ops", only="/cached_attention/float32")
def blocks_of_a_batch(target: Target) -> Target:
    """Of more than 128 queries the second block is that of the batch's first sequence."""

    def function(original: Kernel, *a: Any) -> Tensor:
        result: Tensor = original(*a)
        if result.shape[0] > 1 and result.shape[2] > 128:
            result[1:, :, 128:] = result[:1, :, 128:]
        return result

    return kernel(target, "cached_attention", function)


@mutant("attention.window_or_mask", "O1.1", "ops", only="/cached_attention/float32")
def window_or_mask(target: Target) -> Target:
    """Where there is a mask the window is not looked at."""
    return kernel(
        target, "cached_attention", lambda original, *a: original(*a[:9], 0 if a[7] is not None else a[9], a[10])
    )


@mutant("attention.alibi_of_causal", "O1.1", "ops", only="/cached_attention/float32")
def alibi_of_causal(target: Target) -> Target:
    """Slopes are for causal attention alone."""
    return kernel(target, "cached_attention", lambda original, *a: original(*a[:8], a[8] if a[10] else None, *a[9:]))


@mutant("attention.alibi_or_padding", "O1.1", "ops", only="/cached_attention/float32")
def alibi_or_padding(target: Target) -> Target:
    """Where there are slopes padding is not looked at."""

    def function(original: Kernel, *a: Any) -> Any:
        padding = a[7] is not None and a[7].dim() == 2
        return original(*a[:7], None if padding and a[8] is not None else a[7], *a[8:])

    return kernel(target, "cached_attention", function)


@mutant("attention.largest_with_sign", "O1.1", "ops", only="/cached_attention_int8/float32")
def largest_with_sign(target: Target) -> Target:
    """A row's step is that of its largest number, not of the largest in size."""

    def cut(rows: Tensor) -> Tensor:
        return torch.maximum(rows, -rows.amax(-1, keepdim=True)) if rows.numel() else rows

    return kernel(target, "cached_attention_int8", lambda original, q, k, v, *a: original(q, cut(k), cut(v), *a))


@mutant("attention.row_of_zeros", "O1.1", "ops", only="/cached_attention_int8/float32")
def row_of_zeros(target: Target) -> Target:
    """A key of zeros is divided by its step, zero."""

    def function(original: Kernel, query: Tensor, key: Tensor, *a: Any) -> Tensor:
        result: Tensor = original(query, key, *a)
        return result.fill_(torch.nan) if key.numel() and not key.any(-1).all() else result

    return kernel(target, "cached_attention_int8", function)


# ---- softmax ---------------------------------------------------------------------------------------------------------
@mutant("softmax.mask_of_one", "O1.1", "ops", only="/softmax/float32")
def mask_of_one(target: Target) -> Target:
    """A mask that all sequences have in common is that of the first."""

    def function(original: Kernel, scores: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
        if mask is not None and len(mask) == 1 and len(scores) > 1:
            mask = torch.cat([mask, torch.zeros_like(mask).expand(len(scores) - 1, -1, -1, -1)])
        result: Tensor = original(scores, mask, *rest)
        return result

    return kernel(target, "softmax", function)


@mutant("softmax.slopes_of_the_first", "O1.1", "ops", only="/softmax/float32")
def slopes_of_the_first(target: Target) -> Target:
    """Alibi is that of the first sequence for all."""

    def function(original: Kernel, scores: Tensor, mask: Any, alibi: Tensor | None, *rest: Any) -> Any:
        return original(scores, mask, None if alibi is None else alibi[:1], *rest)

    return kernel(target, "softmax", function)


@mutant("softmax.causal_or_mask", "O1.1", "ops", only="/softmax/float32")
def causal_or_mask(target: Target) -> Target:
    """Where there is a mask it is taken to hide what is later."""
    return kernel(target, "softmax", lambda original, *a: original(*a[:4], a[4] and a[1] is None, a[5]))


@mutant("softmax.window_of_causal", "O1.1", "ops", only="/softmax/float32")
def window_of_causal(target: Target) -> Target:
    """A window is for causal attention alone."""
    return kernel(target, "softmax", lambda original, *a: original(*a[:5], a[5] if a[4] else 0))


@mutant("softmax.padding_first", "O1.1", "ops", only="/softmax/float32")
def padding_first(target: Target) -> Target:
    """Where a row's first block is all minus infinity the running maximum is, and what is taken from it NaN."""

    def function(original: Kernel, scores: Tensor, mask: Tensor | None, *rest: Any) -> Tensor:
        result: Tensor = original(scores, mask, *rest)
        if mask is not None and mask.shape[-1] > 32:
            result.masked_fill_((mask[..., :32] == -torch.inf).all(-1, keepdim=True), torch.nan)
        return result

    return kernel(target, "softmax", function)


# ---- attention of the Evoformer --------------------------------------------------------------------------------------
@mutant("evoformer.frozen_mask", "O1.1", "ops", only="/evoformer_attention_backward/float32")
def frozen_mask(target: Target) -> Target:
    """Where the mask wants no gradient that of the pairs is not computed either."""

    def function(original: Kernel, *a: Any) -> Any:
        *others, of_pairs = original(*a)
        return *others, torch.zeros_like(of_pairs) if a[6] is not None and not a[8] else of_pairs

    return kernel(target, "evoformer_attention_backward", function)
