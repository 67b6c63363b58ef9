"""``cpu_adam``: what DeepSpeedCPUAdam and ZeRO-Offload call. Tensors are in host memory.

An optimizer is known by a number, and the only thing kept under it is whether it decays weights the way of AdamW; all
else comes with each call. `DeepSpeedCPUAdam.__del__` calls `destroy_adam` as late as at the interpreter's exit. How
ZenFlow's processes work together is in `ds_plugin_sdk.integrations.deepspeed.zenflow`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.integrations.deepspeed.zenflow import Control, Step, Worker, name_accelerator
from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._c_function import increment_version
from ds_plugin_sdk.ops.adam import adam_rollback_, c_function

_adamw: dict[int, bool] = {}
_workers: list[Worker | None] = []


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
    try:
        adamw = _adamw[optimizer_id]
    except KeyError:
        raise _unknown(optimizer_id) from None
    decay = 0.0 if weight_decay < 0 else weight_decay
    update = c_function.usable()
    if (
        update is None
        or update(params, grads, exp_avg, exp_avg_sq, lr, beta1, beta2, eps, decay, adamw, bias_correction, step) < 0
    ):
        numbers = lr, beta1, beta2, eps, decay, adamw, bool(bias_correction)
        _library.call("adam_", (params,), (grads,), (exp_avg,), (exp_avg_sq,), (step,), *numbers)
    increment_version((params, exp_avg, exp_avg_sq))
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
        int(step),
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=max(weight_decay, 0.0),
    )
    for narrow, undone in zip(given, wide, strict=True):
        if narrow is not undone and narrow is not grads:
            narrow.copy_(undone)
    return 0


def _unknown(optimizer_id: int) -> SdkError:
    return SdkError(
        "this optimizer does not exist",
        op="cpu_adam",
        why=f"there is no create_adam({optimizer_id}, ...) before it, or destroy_adam({optimizer_id}) was called",
    )


# ---- ZenFlow's overlapped optimizer ----------------------------------------------------------------------------------
def zenflow_adam_create(optimizer_id: int, affinity: Sequence[int]) -> int:
    """Begin a worker that steps as `optimizer_id` does, on the cores of these numbers. Gives its number.

    Raises:
        SdkError: no optimizer was created under `optimizer_id`.
    """
    if optimizer_id not in _adamw:
        raise _unknown(optimizer_id)
    _workers.append(Worker(_adamw[optimizer_id], affinity))
    return len(_workers) - 1


def zenflow_adam_register_group(
    handle: int,
    param: Tensor,
    grad0: Tensor,
    grad1: Tensor,
    exp_avg0: Tensor,
    exp_avg1: Tensor,
    exp_avg_sq0: Tensor,
    exp_avg_sq1: Tensor,
    stale: Tensor | None,
) -> None:
    """Add a group: a step uses gradient and moments 0 or 1, and copies the parameter to `stale`, if there is one."""
    _worker(handle).add(param, (grad0, grad1), (exp_avg0, exp_avg1), (exp_avg_sq0, exp_avg_sq1), stale)


def zenflow_adam_run_worker(handle: int, control: int) -> None:
    """Do the steps that are submitted at the address `control`, until `zenflow_adam_ctrl_exit`.

    Raises:
        InvalidTensorError: the tensors of a group do not fit; DeepSpeed notices that the process has ended.
    """
    _worker(handle).run(Control.from_address(control))


def zenflow_adam_destroy(handle: int) -> None:
    """End a worker, if it is not ended yet."""
    if 0 <= handle < len(_workers):
        _workers[handle] = None


def zenflow_adam_ctrl_size() -> int:
    """Bytes of shared memory that the two processes need."""
    return ctypes.sizeof(Control)


def zenflow_adam_ctrl_init(control: int, num_groups: int) -> None:
    """Make that memory ready, before the optimizer's process starts.

    Raises:
        SdkError: it has no room for so many groups.
    """
    Control.from_address(control).begin(num_groups)
    name_accelerator()


def zenflow_adam_submit(
    control: int,
    now_state: int,
    step: int,
    lr: Sequence[float],
    beta1: Sequence[float],
    beta2: Sequence[float],
    eps: Sequence[float],
    weight_decay: Sequence[float],
    bias_correction: Sequence[int],
) -> None:
    """Have step number `step` done with gradients and moments 0 or 1; the other lists have a number for each group."""
    groups = list(zip(lr, beta1, beta2, eps, weight_decay, bias_correction, strict=True))
    Control.from_address(control).submit(Step(now_state, step, groups))


def zenflow_adam_wait(control: int, timeout_s: float) -> bool:
    """Wait for a step to be done; False if none is in this time."""
    return Control.from_address(control).wait(timeout_s)


def zenflow_adam_ctrl_exit(control: int) -> None:
    """Have the optimizer's process end."""
    Control.from_address(control).end()


def _worker(handle: int) -> Worker:
    worker = _workers[handle] if 0 <= handle < len(_workers) else None
    if worker is None:
        raise SdkError(
            "this worker of ZenFlow's optimizer does not exist",
            op="cpu_adam",
            why=f"there is no zenflow_adam_create() that gave {handle}, or zenflow_adam_destroy({handle}) was called",
        )
    return worker
