"""``fused_lion``: what DeepSpeed's FusedLion calls, on the accelerator's tensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ds_plugin_sdk.ops.lion import lion_


def multi_tensor_lion(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    step: int,
    weight_decay: float,
) -> None:
    """One step on every tensor, in place.

    Formula, dtypes and errors are those of `ds_plugin_sdk.ops.lion.lion_`.

    Args:
        chunk_size: how a GPU would cut tensors; not used.
        noop_flag: int32, one element; not looked at, as in DeepSpeed's own op.
        tensor_lists: gradients, parameters, moments.
        step: the step's number; Lion does not depend on it.

    Raises:
        InvalidTensorError: the tensors do not fit; nothing was modified.
    """
    grads, params, exp_avgs = tensor_lists
    lion_(params, grads, exp_avgs, lr=lr, betas=(beta1, beta2), weight_decay=weight_decay)
