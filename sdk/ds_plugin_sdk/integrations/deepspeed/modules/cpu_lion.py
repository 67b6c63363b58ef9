"""``cpu_lion``: what DeepSpeedCPULion calls. Tensors are in host memory. Nothing is kept between calls."""

from __future__ import annotations

from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._c_function import increment_version
from ds_plugin_sdk.ops.lion import c_function


def create_lion(optimizer_id: int, lr: float, beta1: float, beta2: float, weight_decay: float, should_log: bool) -> int:
    """Begin an optimizer. Gives 0; all it needs comes with each call."""
    return 0


def destroy_lion(optimizer_id: int) -> int:
    """End an optimizer. Gives 0."""
    return 0


def lion_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
) -> int:
    """One step, in place on params and exp_avg, contiguous or not. Gives 0.

    Formula, dtypes and errors are those of `ds_plugin_sdk.ops.lion.lion_`; a negative decay is none. Where the
    direction is exactly 0 the parameter stays; DeepSpeed's own op moves it by its sign bit.

    Raises:
        InvalidTensorError: the tensors do not fit; nothing was modified.
    """
    decay = 0.0 if weight_decay < 0 else weight_decay
    update = c_function.usable()
    if update is None or update(params, grads, exp_avg, lr, beta1, beta2, decay) < 0:
        _library.call("lion_", (params,), (grads,), (exp_avg,), lr, beta1, beta2, decay)
    increment_version((params, exp_avg))
    return 0
