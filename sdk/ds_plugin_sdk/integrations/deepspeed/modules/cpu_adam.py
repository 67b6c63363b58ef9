"""``cpu_adam``: what DeepSpeedCPUAdam and ZeRO-Offload call. Tensors are in host memory.

An optimizer is known by a number, and the only thing kept under it is whether it decays weights the way of AdamW; all
else comes with each call. `DeepSpeedCPUAdam.__del__` calls `destroy_adam` as late as at the interpreter's exit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from ds_plugin_sdk.errors import OpNotImplementedError, SdkError
from ds_plugin_sdk.ops.adam import adam_, adam_rollback_

_adamw: dict[int, bool] = {}


def create_adam(
    optimizer_id: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    adamw_mode: bool,
    should_log: bool,
) -> int:
    """Begin an optimizer: AdamW if `adamw_mode`, else Adam with L2 regularisation. Gives 0."""
    _adamw[optimizer_id] = adamw_mode
    return 0


def destroy_adam(optimizer_id: int, _adamw: dict[int, bool] = _adamw) -> int:
    """End an optimizer, if it is not ended yet. Gives 0."""
    _adamw.pop(optimizer_id, None)  # a default argument outlives the module's globals at exit
    return 0


def adam_update(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
) -> int:
    """Step number `step`, in place on params, exp_avg and exp_avg_sq, contiguous or not. Gives 0.

    Formula, dtypes and errors are those of `ds_plugin_sdk.ops.adam.adam_`; a negative decay is none.

    Raises:
        InvalidTensorError: the tensors do not fit; nothing was modified.
        SdkError: no optimizer was created under the number.
    """
    adam_(
        [params],
        [grads],
        [exp_avg],
        [exp_avg_sq],
        step,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=max(weight_decay, 0.0),
        adamw=_mode(optimizer_id),
        bias_correction=bool(bias_correction),
    )
    return 0


def adam_rollback(
    optimizer_id: int,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    params: Tensor,
    grads: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
) -> int:
    """Undo step number `step` of AdamW with bias correction, whatever the optimizer's mode. Gives 0.

    Parameters of 16 bits are undone in float32 and rounded: they and their states come back to within the rounding of
    their dtypes. DeepSpeed's own op prints a line there and gives -1, which its front end does not look at: it counts
    a step as undone that was not.

    Raises:
        InvalidTensorError: the tensors do not fit; nothing was modified.
    """
    given = [params, grads, exp_avg, exp_avg_sq]
    wide = [tensor.float() for tensor in given] if params.dtype in (torch.float16, torch.bfloat16) else given
    p, g, m, v = ([tensor] for tensor in wide)
    adam_rollback_(
        p,
        g,
        m,
        v,
        step,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=max(weight_decay, 0.0),
    )
    for narrow, undone in zip(given, wide, strict=True):
        if narrow is not undone and narrow is not grads:
            narrow.copy_(undone)
    return 0


def _mode(optimizer_id: int) -> bool:
    try:
        return _adamw[optimizer_id]
    except KeyError:
        raise SdkError(
            "this optimizer does not exist",
            op="cpu_adam",
            why=f"there is no create_adam({optimizer_id}, ...) before it, or destroy_adam({optimizer_id}) was called",
        ) from None


def _not_offered(name: str) -> Callable[..., NoReturn]:
    def raise_error(*args: object) -> NoReturn:
        raise OpNotImplementedError(
            "ZenFlow's overlapped optimizer is not offered",
            op="cpu_adam",
            why=f"{name} steps in a process of its own, which this op does not do",
            hint='leave "zenflow" out of the DeepSpeed config; ZeRO-Offload without it works',
        )

    raise_error.__name__ = name
    return raise_error


zenflow_adam_create = _not_offered("zenflow_adam_create")
zenflow_adam_register_group = _not_offered("zenflow_adam_register_group")
zenflow_adam_destroy = _not_offered("zenflow_adam_destroy")
zenflow_adam_ctrl_size = _not_offered("zenflow_adam_ctrl_size")
zenflow_adam_ctrl_init = _not_offered("zenflow_adam_ctrl_init")
zenflow_adam_run_worker = _not_offered("zenflow_adam_run_worker")
zenflow_adam_submit = _not_offered("zenflow_adam_submit")
zenflow_adam_wait = _not_offered("zenflow_adam_wait")
zenflow_adam_ctrl_exit = _not_offered("zenflow_adam_ctrl_exit")
