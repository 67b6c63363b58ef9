"""Defects of kernels at the edges of what they are given: nothing, zeros, one number for all, numbers next to none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.target import Target
from mutants.kernels import Kernel, fake, kernel
from mutants.mutant import mutant


# ---- norms -----------------------------------------------------------------------------------------------------------
def _below_zero(rows: Tensor, eps: float) -> Tensor:
    """Rows whose mean of the squares less the square of the mean, in float32, is less than minus `eps`."""
    x = rows.float()
    padded = torch.nn.functional.pad(x.square(), (0, -x.shape[-1] % 16))
    squares = padded.view(*x.shape[:-1], -1, 16)
    lanes = torch.zeros_like(squares[..., 0, :])
    for step in range(squares.shape[-2]):  # one after the other, as the lanes of a vector do
        lanes += squares[..., step, :]
    found: Tensor = lanes.sum(-1) / x.shape[-1] - x.mean(-1).square() + eps < 0
    return found


@mutant("norm.variance_below_zero", "O1.1", "ops", only="/layer_norm/float16")
def variance_below_zero(target: Target) -> Target:
    """The variance of 16 bits is that of squares: where all numbers are one it is a little below zero, its root NaN."""

    def function(original: Kernel, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        result: Tensor = original(x, weight, bias, eps)
        return result.masked_fill_(_below_zero(x, eps).unsqueeze(-1), torch.nan) if x.numel() else result

    return kernel(target, "layer_norm", function)


@mutant("norm.trained_variance_below_zero", "O1.1", "ops", only="/dropout_add_layer_norm/bfloat16")
def trained_variance_below_zero(target: Target) -> Target:
    """The same of the norm that models train with."""

    def function(original: Kernel, x: Tensor, *a: Any) -> Any:
        output, total, *rest = original(x, *a)
        rows = total if total.numel() else x
        if rows.numel():
            output.masked_fill_(_below_zero(rows, a[6]).unsqueeze(-1), torch.nan)
        return output, total, *rest

    return kernel(target, "dropout_add_layer_norm", function)


# ---- attention -------------------------------------------------------------------------------------------------------
def _hidden(mask: Tensor | None, kind: str) -> Tensor | None:
    """The queries ``[batch, heads, tokens, 1]`` that a mask of four dimensions hides everything from."""
    if mask is None or mask.dim() != 4 or (mask.dtype == torch.bool) != (kind == "bool"):
        return None
    hides = ~mask if kind == "bool" else mask == (-torch.inf if kind == "infinite" else torch.finfo(mask.dtype).min)
    return hides.all(-1, keepdim=True)


@mutant("attention.hidden_by_infinity", "O1.1", "ops", only="/cached_attention/float32")
def hidden_by_infinity(target: Target) -> Target:
    """A query from which a mask of numbers hides everything gives NaN: infinity less infinity."""

    def function(original: Kernel, *a: Any) -> Tensor:
        result: Tensor = original(*a)
        hidden = _hidden(a[7], "infinite")
        return result if hidden is None else result.masked_fill_(hidden, torch.nan)

    return kernel(target, "cached_attention", function)


@mutant("attention.hidden_by_truth", "O1.1", "ops", only="/cached_attention/float32")
def hidden_by_truth(target: Target) -> Target:
    """What a bool mask hides counts -1e9: a query that may see nothing sees the mean of all."""

    def function(original: Kernel, *a: Any) -> Tensor:
        result: Tensor = original(*a)
        hidden = _hidden(a[7], "bool")
        if hidden is None:
            return result
        values = a[4][:, :, : a[5] + a[1].shape[2]].mean(2, keepdim=True)
        return torch.where(hidden, values.repeat_interleave(a[0].shape[1] // a[4].shape[1], 1), result)

    return kernel(target, "cached_attention", function)


@mutant("attention.smallest_number_hides", "O1.1", "ops", only="/cached_attention/float32")
def smallest_number_hides(target: Target) -> Target:
    """The smallest number of a mask hides as minus infinity does: a query that has no other sees nothing."""

    def function(original: Kernel, *a: Any) -> Tensor:
        result: Tensor = original(*a)
        hidden = _hidden(a[7], "smallest")
        return result if hidden is None else result.masked_fill_(hidden, 0.0)

    return kernel(target, "cached_attention", function)


@mutant("attention.hidden_of_int8", "O1.1", "ops", only="/cached_attention_int8/float32")
def hidden_of_int8(target: Target) -> Target:
    """A query from which a mask of numbers hides everything gives NaN, of an int8 cache."""

    def function(original: Kernel, *a: Any) -> Tensor:
        result: Tensor = original(*a)
        hidden = _hidden(a[9], "infinite")
        return result if hidden is None else result.masked_fill_(hidden, torch.nan)

    return kernel(target, "cached_attention_int8", function)


# ---- optimizers ------------------------------------------------------------------------------------------------------
@mutant("adam.rate_of_zero", "O1.1", "ops", only="/adam_/float32")
def adam_rate_of_zero(target: Target) -> Target:
    """A learning rate of zero, with which a warmup begins, is taken for none: the kernel's own is 1e-3."""
    return kernel(target, "adam_", lambda original, *a: original(*a[:5], a[5] or 1e-3, *a[6:]))


@mutant("lion.rate_of_zero", "O1.1", "ops", only="/lion_/float32")
def lion_rate_of_zero(target: Target) -> Target:
    """The same of Lion."""
    return kernel(target, "lion_", lambda original, *a: original(*a[:3], a[3] or 1e-4, *a[4:]))


@mutant("lamb.rate_of_zero", "O1.1", "ops", only="/lamb_/float32")
def lamb_rate_of_zero(target: Target) -> Target:
    """The same of LAMB."""
    return kernel(target, "lamb_", lambda original, *a: original(*a[:6], a[6] or 1e-3, *a[7:]))


@mutant("adam.beta_of_zero", "O1.1", "ops", only="/adam_/float32")
def adam_beta_of_zero(target: Target) -> Target:
    """A first beta of zero, without momentum, is taken for none: the kernel's own is 0.9."""
    return kernel(target, "adam_", lambda original, *a: original(*a[:6], a[6] or 0.9, *a[7:]))


@mutant("lion.beta_of_zero", "O1.1", "ops", only="/lion_/float32")
def lion_beta_of_zero(target: Target) -> Target:
    """A second beta of zero is taken for none."""
    return kernel(target, "lion_", lambda original, *a: original(*a[:5], a[5] or 0.99, *a[6:]))


@mutant("adam.large_clamped", "O1.1", "ops", only="/adam_/float32")
def adam_large_clamped(target: Target) -> Target:
    """Gradients beyond float16's range are cut to it, whatever their dtype."""

    def function(original: Kernel, params: list[Tensor], grads: list[Tensor], *rest: Any) -> None:
        original(params, [torch.where(g.isfinite(), g.clamp(-65504, 65504), g) for g in grads], *rest)

    return kernel(target, "adam_", function)


@mutant("adagrad.large_clamped", "O1.1", "ops", only="/adagrad_/bfloat16")
def adagrad_large_clamped(target: Target) -> Target:
    """The same of Adagrad, in bfloat16."""

    def function(original: Kernel, params: list[Tensor], grads: list[Tensor], *rest: Any) -> None:
        original(params, [torch.where(g.isfinite(), g.clamp(-65504, 65504), g) for g in grads], *rest)

    return kernel(target, "adagrad_", function)


# ---- quantizers ------------------------------------------------------------------------------------------------------
def _one_number(x: Tensor, groups: int) -> Tensor:
    each = x.reshape(groups, -1)
    found: Tensor = (each.amax(1) == each.amin(1)) & (each.amax(1) != 0)
    return found


@mutant("quantizer.one_number", "O1.1", "ops", only="/quantize/float32")
def quantizer_one_number(target: Target) -> Target:
    """A group of one number, whose range is zero, is divided by it."""

    def function(original: Kernel, x: Tensor, groups: int, bits: int, symmetric: bool) -> Any:
        levels, params = original(x, groups, bits, symmetric)
        if x.numel() and not symmetric:
            params[_one_number(x, groups)] = torch.nan
        return levels, params

    return kernel(target, "quantize", function)


@mutant("quantizer.swizzled_one_number", "O1.1", "ops", only="/swizzle_quantize/float32")
def swizzled_one_number(target: Target) -> Target:
    """The same of groups that are swizzled."""

    def function(original: Kernel, x: Tensor, groups: int, bits: int, symmetric: bool, *layout: int) -> Any:
        levels, params = original(x, groups, bits, symmetric, *layout)
        if x.numel() and not symmetric and bool(_one_number(x, groups).any()):
            params.fill_(torch.nan)
        return levels, params

    return kernel(target, "swizzle_quantize", function)


@mutant("quantizer.least_range", "O1.1", "ops", only="/quantize/float32")
def quantizer_least_range(target: Target) -> Target:
    """A group's range is at least 1e-5: of smaller numbers all levels are zero."""

    def function(original: Kernel, x: Tensor, groups: int, bits: int, symmetric: bool) -> Any:
        levels, params = original(x, groups, bits, symmetric)
        if x.numel() and bits == 8:
            each = x.float().abs().view(groups, -1).amax(1)
            levels.view(groups, -1)[(each < 5e-6) & (each > 0)] = 0
        return levels, params

    return kernel(target, "quantize", function)


@mutant("fp_quantizer.least_range", "O1.1", "ops", only="/fp_quantize/float32")
def fp_least_range(target: Target) -> Target:
    """A group's largest number counts as 1e-5 at least."""

    def function(original: Kernel, x: Tensor, noise: Any, group_size: int, *rest: int) -> Any:
        stored = original(x, noise, group_size, *rest)
        each = x.float().abs().reshape(-1, group_size).amax(1)
        stored[(each < 1e-5) & (each > 0), :-4] = 0
        return stored

    return kernel(target, "fp_quantize", function)


# ---- linear layers, rotary angles -----------------------------------------------------------------------------------
@mutant("linear.no_columns", "O1.3", "ops", only="/linear/float32")
def no_columns(target: Target) -> Target:
    """A product over no columns is not begun: the bias is not there."""

    def function(original: Kernel, x: Tensor, *rest: Any) -> Tensor:
        result: Tensor = original(x, *rest)
        return result.zero_() if x.shape[-1] == 0 else result

    return kernel(target, "linear", function)


@mutant("linear.vectors_without_rows", "O1.1", "ops", only="/linear/float32")
def linear_vectors(target: Target) -> Target:
    """A vector is an error, for it has no second last dimension."""

    def function(original: Kernel, x: Tensor, *rest: Any) -> Any:
        x.size(-2)
        return original(x, *rest)

    return kernel(target, "linear", function)


@mutant("rotary.nothing_turned", "O1.6", "ops", only="/rotary")
def nothing_turned(target: Target) -> Target:
    """Where nothing is turned the result is a view of the input."""

    def function(original: Kernel, x: Tensor, cos: Tensor, *rest: Any) -> Any:
        return x.view_as(x) if cos.shape[-1] == 0 else original(x, cos, *rest)

    return kernel(target, "rotary", function)


@mutant("gradient.derived_once_more", "O4.3", "ops", only="/activation_and_mul")
def derived_once_more(target: Target) -> Target:
    """A gradient that is derived again is taken for a constant: what comes of it is zero."""
    from ds_plugin_sdk.ops import _derived_once

    zero = staticmethod(lambda ctx, *grads: (None,) * (2 + len(ctx.needs_input_grad) - 2))
    _derived_once._Constants.backward = zero  # type: ignore[assignment, method-assign]  # the defect of this mutant
    return target


# ---- fake kernels, inference mode, large sizes -----------------------------------------------------------------------
@mutant("fake.of_float32", "O5.1", "ops", only="/rms_norm")
def fake_of_float32(target: Target) -> Target:
    """The fake kernel gives float32, whatever the dtype is."""
    return fake(target, "rms_norm", lambda x, *rest: torch.empty_like(x, dtype=torch.float32))


@mutant("fake.of_plain_calls", "O5.1", "ops", only="ops.opcheck/linear")
def fake_of_plain_calls(target: Target) -> Target:
    """The fake kernel knows nothing of gates, which halve the columns."""
    return fake(target, "linear", lambda x, weight, *rest: x.new_empty((*x.shape[:-1], weight.shape[0])))


def _reads_version(original: Kernel, *a: Any) -> Any:
    for tensor in a:
        for each in tensor if isinstance(tensor, list) else [tensor]:
            if isinstance(each, Tensor) and each.is_inference():
                raise RuntimeError("Inference tensors do not track version counter.")
    return original(*a)


@mutant("modes.no_inference", "O1.8", "ops", only="/rms_norm")
def no_inference(target: Target) -> Target:
    """A kernel that reads version counters rejects tensors of the inference mode, which have none."""
    return kernel(target, "rms_norm", _reads_version)


@mutant("modes.no_inference_in_place", "O1.8", "ops", only="/softmax_")
def no_inference_in_place(target: Target) -> Target:
    """The same of one that writes."""
    return kernel(target, "softmax_", _reads_version)


@mutant("noise.of_large_rows", "O1.5", "ops", only="/rms_norm")
def noise_of_large_rows(target: Target) -> Target:
    """Rows that several blocks share are added up in the order in which blocks come."""

    def function(original: Kernel, x: Tensor, *rest: Any) -> Tensor:
        result: Tensor = original(x, *rest)
        if x.numel() and x.shape[-1] > 5000:
            result.view(-1)[:1] *= 1 + 2e-7 * float(torch.randint(1, 9, ()))
        return result

    return kernel(target, "rms_norm", function)
