"""``fused_adam``: what DeepSpeed's FusedAdam calls, on the accelerator's tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ds_plugin_sdk.ops.adam import adam_


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
    grads, params, exp_avgs, exp_avg_sqs = tensor_lists
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
