"""Defects of losses, optimizers and quantizers in calls that few try, and of what an op rejects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.target import Target
from mutants.kernels import Kernel, kernel
from mutants.mutant import mutant


# ---- optimizers ------------------------------------------------------------------------------------------------------
def _mixed(params: list[Tensor], grads: list[Tensor], moments: list[Tensor]) -> bool:
    return bool(params) and not params[0].dtype == grads[0].dtype == moments[0].dtype


@mutant("adam.mixed_as_l2", "O1.1", "ops", only="/adam_/bfloat16")
def mixed_as_l2(target: Target) -> Target:
    """Where tensors are of two dtypes the decay is added to the gradient, whatever is asked for."""

    def function(original: Kernel, *a: Any) -> None:
        original(*a[:10], a[10] and not _mixed(*a[:3]), a[11])

    return kernel(target, "adam_", function)


@mutant("adam.mixed_not_corrected", "O1.1", "ops", only="/adam_/bfloat16")
def mixed_not_corrected(target: Target) -> Target:
    """Where tensors are of two dtypes moments are used without bias correction."""

    def function(original: Kernel, *a: Any) -> None:
        original(*a[:11], a[11] and not _mixed(*a[:3]))

    return kernel(target, "adam_", function)


def _in_order_of(tensor: Tensor, other: Tensor) -> Tensor:
    """A contiguous tensor, read in the order in which another one of its shape lies in memory."""
    last = sum((size - 1) * stride for size, stride in zip(other.shape, other.stride(), strict=True))
    if not tensor.is_contiguous() or 0 in other.stride() or last >= tensor.numel():
        return tensor
    return tensor.as_strided(other.shape, other.stride())


@mutant("layout.order_of_params", "O1.2", "ops", only="/lion_/")
def order_of_params(target: Target) -> Target:
    """Gradients are read in the order of memory of the parameters, as those of channels last are."""

    def function(original: Kernel, params: list[Tensor], grads: list[Tensor], *rest: Any) -> None:
        original(params, [_in_order_of(g, p) for p, g in zip(params, grads, strict=True)], *rest)

    return kernel(target, "lion_", function)


@mutant("adagrad.scalars_left_out", "O1.1", "ops", only="/adagrad_/float32")
def scalars_left_out(target: Target) -> Target:
    """A parameter without dimensions, as a temperature is, is not updated."""

    def function(original: Kernel, params: list[Tensor], *a: Any) -> None:
        kept = [i for i, p in enumerate(params) if p.dim()]
        original(*([each[i] for i in kept] for each in (params, *a[:2])), *a[2:])

    return kernel(target, "adagrad_", function)


@mutant("lion.tiny_gradients", "O1.1", "ops", only="/lion_/float32")
def tiny_gradients(target: Target) -> Target:
    """What the sign is taken of is float16: of the smallest gradients it is zero, and nothing is updated."""

    def function(
        original: Kernel, params: list[Tensor], grads: list[Tensor], moments: list[Tensor], *rest: Any
    ) -> None:
        averages = [0.1 * g.float() + 0.9 * m.float() for g, m in zip(grads, moments, strict=True)]
        before = [p.clone() for p in params]
        original(params, grads, moments, *rest)
        for p, old, average in zip(params, before, averages, strict=True):
            p.copy_(torch.where((average.half() == 0) & (average != 0), old, p))

    return kernel(target, "lion_", function)


@mutant("lamb.paper_always_corrected", "O1.1", "ops", only="/lamb_/float32")
def paper_always_corrected(target: Target) -> Target:
    """The paper's LAMB corrects moments, whether it is to or not."""
    return kernel(target, "lamb_", lambda original, *a: original(*a[:15], a[15] or a[16], a[16]))


@mutant("lamb.paper_takes_scaled", "O1.1", "ops", only="/lamb_/float32")
def paper_takes_scaled(target: Target) -> Target:
    """The paper's LAMB takes scaled gradients as they are."""
    return kernel(target, "lamb_", lambda original, *a: original(*a[:13], 1.0 if a[16] else a[13], *a[14:]))


@mutant("lamb.paper_eps_outside", "O1.1", "ops", only="/lamb_/float32")
def paper_eps_outside(target: Target) -> Target:
    """The paper's LAMB adds epsilon to the root, also where it is to be in it."""
    return kernel(target, "lamb_", lambda original, *a: original(*a[:14], a[14] and not a[16], *a[15:]))


# ---- cross entropy ---------------------------------------------------------------------------------------------------
@mutant("cross_entropy.hidden_first", "O1.4", "ops", only="/cross_entropy_/float32")
def hidden_first(target: Target) -> Target:
    """Where a row's first logit is minus infinity the running maximum is, and what is taken from it NaN."""

    def function(original: Kernel, logits: Tensor, *rest: Any) -> Tensor:
        hidden = logits[:, :1] == -torch.inf
        losses: Tensor = original(logits, *rest)
        if logits.shape[1] > 1:
            logits.masked_fill_(hidden, torch.nan)
            losses.masked_fill_(hidden[:, 0], torch.nan)
        return losses

    return kernel(target, "cross_entropy_", function)


@mutant("cross_entropy.hidden_block", "O1.1", "ops", only="/cross_entropy_/float32")
def hidden_block(target: Target) -> Target:
    """The same of a row's first 128 logits."""

    def function(original: Kernel, logits: Tensor, *rest: Any) -> Tensor:
        hidden = (logits[:, :128] == -torch.inf).all(1) & (logits.shape[1] > 128)
        losses: Tensor = original(logits, *rest)
        return losses.masked_fill_(hidden, torch.nan)

    return kernel(target, "cross_entropy_", function)


@mutant("cross_entropy.smooth_block", "O1.7", "ops", only="/cross_entropy_")
def smooth_block(target: Target) -> Target:
    """Labels are smoothed over the first 1,024 columns."""

    def function(original: Kernel, logits: Tensor, labels: Tensor, ignored: int, smoothing: float, *rest: Any) -> Any:
        beyond = logits.float()[:, 1024:].sum(1) / max(logits.shape[1], 1)
        losses: Tensor = original(logits, labels, ignored, smoothing, *rest)
        return losses + torch.where(labels == ignored, 0.0, smoothing * beyond)

    return kernel(target, "cross_entropy_", function)


@mutant("cross_entropy.plain_losses", "O1.1", "ops", only="/cross_entropy_/float32")
def plain_losses(target: Target) -> Target:
    """Losses without a gradient are without options, too."""

    def function(original: Kernel, logits: Tensor, labels: Tensor, ignored: int, *options: Any) -> Any:
        return original(logits, labels, ignored, *(options if options[-1] else (0.0, 0.0, 0.0, False)))

    return kernel(target, "cross_entropy_", function)


@mutant("cross_entropy.one_beyond", "O3.5", "ops", only="/cross_entropy_")
def one_beyond(target: Target) -> Target:
    """The first target beyond the columns is taken for the last one: ``>`` stands where ``>=`` should."""

    def function(original: Kernel, logits: Tensor, labels: Tensor, *rest: Any) -> Any:
        return original(logits, torch.where(labels == logits.shape[1], labels - 1, labels), *rest)

    return kernel(target, "cross_entropy_", function)


@mutant("tokens.negative_index", "O3.5", "ops", only="token_scatter_")
def negative_index(target: Target) -> Target:
    """A negative index counts from the end."""

    def function(original: Kernel, everything: Tensor, some: Tensor, indices: Tensor, batch_first: bool) -> None:
        tokens = everything.shape[1 if batch_first else 0]
        original(everything, some, torch.where(indices < 0, indices + tokens, indices), batch_first)

    return kernel(target, "token_scatter_", function)


@mutant("linear_cross_entropy.options_of_one_chunk", "O1.1", "ops", only="/linear_cross_entropy/float32")
def options_of_one_chunk(target: Target) -> Target:
    """With more than one chunk of 64 rows the loss is without options."""

    def function(original: Kernel, input: Tensor, weight: Tensor, labels: Tensor, bias: Any, *a: Any) -> Any:
        options = a if len(input) <= 64 else (a[0], 0.0, 0.0, 0.0, *a[4:])
        return original(input, weight, labels, bias, *options)

    return kernel(target, "linear_cross_entropy", function)


@mutant("linear_cross_entropy.last_bias", "O4.1", "ops", only="/linear_cross_entropy/float32")
def last_bias(target: Target) -> Target:
    """The bias's gradient is that of the last chunk of 64 rows."""

    def function(original: Kernel, input: Tensor, weight: Tensor, labels: Tensor, bias: Any, *rest: Any) -> Any:
        *others, of_bias = original(input, weight, labels, bias, *rest)
        if len(input) > 64 and bias is not None:
            of_bias = original(input[-64:], weight, labels[-64:], bias, *rest)[-1]
        return *others, of_bias

    return kernel(target, "linear_cross_entropy", function)


# ---- quantizers ------------------------------------------------------------------------------------------------------
def _cut_to_largest(x: Tensor, groups: int) -> Tensor:
    """Groups within their largest number of either sign, as those that are quantized by it."""
    if not x.numel():
        return x
    each = x.reshape(groups, -1)
    largest = each.amax(1, keepdim=True)
    return torch.where(largest > 0, torch.maximum(each, -largest), each).reshape(x.shape)


@mutant("quantizer.largest_with_sign", "O1.1", "ops", only="/quantize/float32")
def quantizer_largest_with_sign(target: Target) -> Target:
    """A group's range is that of its largest number, not of the largest in size."""

    def function(original: Kernel, x: Tensor, groups: int, bits: int, symmetric: bool) -> Any:
        return original(_cut_to_largest(x, groups) if symmetric else x, groups, bits, symmetric)

    return kernel(target, "quantize", function)


@mutant("quantizer.swizzled_with_sign", "O1.1", "ops", only="/swizzle_quantize/float32")
def swizzled_with_sign(target: Target) -> Target:
    """The same of groups that are swizzled."""

    def function(original: Kernel, x: Tensor, groups: int, bits: int, symmetric: bool, *layout: int) -> Any:
        return original(_cut_to_largest(x, groups) if symmetric else x, groups, bits, symmetric, *layout)

    return kernel(target, "swizzle_quantize", function)


@mutant("fp_quantizer.largest_with_sign", "O1.1", "ops", only="/fp_quantize/float32")
def fp_largest_with_sign(target: Target) -> Target:
    """A group's range is that of its largest number, not of the largest in size."""

    def function(original: Kernel, x: Tensor, noise: Any, group_size: int, *rest: int) -> Any:
        return original(_cut_to_largest(x, x.numel() // group_size), noise, group_size, *rest)

    return kernel(target, "fp_quantize", function)


@mutant("quantizer.range_of_a_block", "O1.7", "ops", only="/quantize")
def range_of_a_block(target: Target) -> Target:
    """A group's range is that of its first 1,024 numbers."""

    def function(original: Kernel, x: Tensor, groups: int, bits: int, symmetric: bool) -> Any:
        if x.numel() > 1024 * groups:
            each = x.reshape(groups, -1)
            largest = each[:, :1024].abs().amax(1, keepdim=True)
            x = torch.minimum(torch.maximum(each, -largest), largest).reshape(x.shape)
        return original(x, groups, bits, symmetric)

    return kernel(target, "quantize", function)


# ---- what is moved ---------------------------------------------------------------------------------------------------
@mutant("tokens.four_bytes_each", "O1.1", "ops", only="/token_gather/float32")
def four_bytes_each(target: Target) -> Target:
    """Elements of eight bytes are moved as of four."""

    def function(original: Kernel, activations: Tensor, *rest: Any) -> Tensor:
        result: Tensor = original(activations, *rest)
        return result % 2**32 if activations.dtype == torch.int64 else result

    return kernel(target, "token_gather", function)


@mutant("utils.four_bytes_each", "O1.1", "ops", only="/flatten/float32")
def flattened_by_four_bytes(target: Target) -> Target:
    """Elements of eight bytes are flattened as of four."""

    def function(original: Kernel, tensors: list[Tensor]) -> Tensor:
        result: Tensor = original(tensors)
        return result % 2**32 if result.dtype == torch.int64 else result

    return kernel(target, "flatten", function)


# ---- what an op rejects ----------------------------------------------------------------------------------------------
@mutant("reject.no_other_float", "O3.1", "ops", only="/rms_norm")
def no_other_float_rejected(target: Target) -> Target:
    """Weights of 16 bits are read as if they were float32, as the input is."""

    def function(original: Kernel, x: Tensor, weight: Tensor, *rest: Any) -> Any:
        if x.dtype == torch.float32 and weight.dtype == torch.bfloat16:
            weight = torch.cat([weight, weight])[: 2 * len(weight)].contiguous().view(torch.float32)
        return original(x, weight, *rest)

    return kernel(target, "rms_norm", function)


@mutant("reject.no_rows", "O3.2", "ops", only="/pre_rms_norm")
def no_rows_rejected(target: Target) -> Target:
    """The rows of a residual are not counted."""

    def function(original: Kernel, x: Tensor, residual: Tensor, *rest: Any) -> Any:
        return original(x, residual[: len(x)] if residual.dim() == x.dim() else residual, *rest)

    return kernel(target, "pre_rms_norm", function)


@mutant("reject.no_steps", "O3.2", "ops", only="/linear")
def no_steps_rejected(target: Target) -> Target:
    """The rows of offsets are not counted."""

    def function(original: Kernel, x: Tensor, weight: Tensor, bias: Any, scales: Any, offsets: Any, *rest: Any) -> Any:
        return original(x, weight, bias, scales, None if offsets is None else offsets[: len(weight)], *rest)

    return kernel(target, "linear", function)
