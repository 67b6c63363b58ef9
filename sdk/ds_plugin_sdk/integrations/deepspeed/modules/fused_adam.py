"""``fused_adam``: what DeepSpeed's FusedAdam calls, on the accelerator's tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._c_function import increment_version
from ds_plugin_sdk.ops._checks import CheckError, check_dtype, check_lists, text
from ds_plugin_sdk.ops.adam import adam_, c_function

_LISTS = ("grads", "params", "exp_avgs", "exp_avg_sqs", "outputs")
# Elements whose gradients are float32 at a time: few enough for a cache, enough for a device.
_AT_ONCE = 1 << 20


def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    adam_w_mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Step number `step` on every tensor, in place.

    Formula, dtypes and errors are those of `ds_plugin_sdk.ops.adam.adam_`.

    Args:
        chunk_size: how a GPU would cut tensors; not used.
        noop_flag: int32, one element; not looked at, as in DeepSpeed's own op.
        tensor_lists: gradients, parameters, first and second moments.
        adam_w_mode: 1 decays the parameter itself, 0 adds the decay to the gradient.

    Raises:
        InvalidTensorError: the tensors do not fit; nothing was modified.
    """
    step = int(step)  # a tensor in the state of torch's optimizers
    grads, params, exp_avgs, exp_avg_sqs = tensor_lists
    update = c_function.usable() if all(len(tensors) == 1 for tensors in tensor_lists) else None
    if (
        update is not None
    ):  # on the host to make lists, and to ask whether they may be used, takes as long as the update
        (grad,), (param,), (first,), (second,) = tensor_lists
        numbers = lr, beta1, beta2, eps, weight_decay, bool(adam_w_mode), bool(bias_correction), step
        if update(param, grad, first, second, *numbers) >= 0:
            increment_version((param, first, second))
            return
    adam_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        step,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        adamw=bool(adam_w_mode),
        bias_correction=bool(bias_correction),
    )


def multi_tensor_adam_mixed_precision(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    adam_w_mode: int,
    bias_correction: int,
    weight_decay: float,
    grad_scale: float,
) -> None:
    """Step number `step` on float32 masters of a model of 16 bits, in place; of DeepSpeed after 0.19.8.

    As `multi_tensor_adam`, with gradients divided by `grad_scale`, which are float32 for a part of a tensor at a time.

    Args:
        tensor_lists: gradients, float16 or bfloat16; parameters, first and second moments, float32; the model's own
            parameters, which get the new ones rounded, of the gradients' dtype. All contiguous.
        grad_scale: positive.

    Raises:
        InvalidTensorError: the tensors or the scale do not fit; nothing was modified.
    """
    try:
        _check_mixed_precision(tensor_lists, grad_scale)
    except CheckError as error:
        raise _library.invalid("fused_adam", str(error)) from None
    for tensors in zip(*tensor_lists, strict=True):
        flat = (tensor.detach().view(-1).split(_AT_ONCE) for tensor in tensors)
        for grad, param, exp_avg, exp_avg_sq, output in zip(*flat, strict=True):
            multi_tensor_adam(
                chunk_size,
                noop_flag,
                [[grad.float().div_(grad_scale)], [param], [exp_avg], [exp_avg_sq]],
                lr,
                beta1,
                beta2,
                eps,
                step,
                adam_w_mode,
                bias_correction,
                weight_decay,
            )
            output.copy_(param)


def _check_mixed_precision(tensor_lists: Sequence[Sequence[Tensor]], grad_scale: float) -> None:
    if not (math.isfinite(grad_scale) and grad_scale > 0):
        raise CheckError(f"grad_scale is {grad_scale}; expected a positive, finite number")
    if len(tensor_lists) != len(_LISTS) or not tensor_lists[0]:
        raise CheckError(f"tensor_lists are {len(tensor_lists)}; expected {', '.join(_LISTS)}, none of them empty")
    lists = dict(zip(_LISTS, tensor_lists, strict=True))
    check_lists(lists)
    dtype = lists["grads"][0].dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise CheckError(f"grads are {text(dtype)}; expected float16 or bfloat16")
    for name, tensors in lists.items():
        check_dtype(name, tensors[0], dtype if name in ("grads", "outputs") else torch.float32)
        for i, tensor in enumerate(tensors):
            if not tensor.is_contiguous():
                raise CheckError(f"{name}[{i}] is not contiguous; expected a contiguous tensor")
