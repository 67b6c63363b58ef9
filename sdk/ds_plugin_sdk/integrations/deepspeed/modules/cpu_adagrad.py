"""``cpu_adagrad``: what DeepSpeedCPUAdagrad calls. Tensors are in host memory. Nothing is kept between calls."""

from __future__ import annotations

from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._c_function import increment_version
from ds_plugin_sdk.ops.adagrad import c_function


def create_adagrad(optimizer_id: int, lr: float, eps: float, weight_decay: float, should_log: bool) -> int:
    """Begin an optimizer. Gives 0; all it needs comes with each call."""
    return 0


def destroy_adagrad(optimizer_id: int) -> int:
    """End an optimizer. Gives 0."""
    return 0


def adagrad_update(
    optimizer_id: int,
    step: int,
    lr: float,
    eps: float,
    weight_decay: float,
    params: Tensor,
    grads: Tensor,
    exp_avg_sq: Tensor,
) -> int:
    """One step, in place on params and exp_avg_sq (the sum of squares), contiguous or not. Gives 0.

    Formula, dtypes and errors are those of `ds_plugin_sdk.ops.adagrad.adagrad_`; a negative decay is none. The
    gradients stay as they are, where DeepSpeed's own op writes into some of their elements.

    Raises:
        InvalidTensorError: the tensors do not fit; nothing was modified.
    """
    decay = 0.0 if weight_decay < 0 else weight_decay
    update = c_function.usable()
    if update is None or update(params, grads, exp_avg_sq, lr, eps, decay) < 0:
        _library.call("adagrad_", (params,), (grads,), (exp_avg_sq,), lr, eps, decay)
    increment_version((params, exp_avg_sq))
    return 0
