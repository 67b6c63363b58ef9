"""``fused_lamb``: what DeepSpeed's FusedLamb calls, on the accelerator's tensors."""

from __future__ import annotations

from torch import Tensor

from ds_plugin_sdk.ops.lamb import lamb_

_EPS_INSIDE_SQRT = 0


def lamb(
    p: Tensor,
    p_copy: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    max_coeff: float,
    min_coeff: float,
    eps: float,
    combined_scale: float | Tensor,
    step: int,
    eps_mode: int,
    bias_correction: int,
    weight_decay: float,
) -> Tensor:
    """Step number `step` on one tensor, in place on p, exp_avg and exp_avg_sq, contiguous or not.

    Formula, dtypes and errors are those of `ds_plugin_sdk.ops.lamb.lamb_`.

    Args:
        p_copy: empty, or a tensor of p's shape that gets the new parameters too, whatever its dtype; DeepSpeed's own op
            writes it only where gradients are float16.
        combined_scale: what the gradient is divided by; a tensor of one element where the front end clips by a norm
            that is a tensor.
        eps_mode: 0 adds eps to the second moment, any other number to its square root.

    Returns:
        The trust ratio within its limits, ``[1]``.

    Raises:
        InvalidTensorError: the tensors do not fit; nothing was modified.
    """
    return lamb_(
        [p],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        step,
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        min_coeff=min_coeff,
        max_coeff=max_coeff,
        grad_scale=float(combined_scale),
        eps_inside_sqrt=eps_mode == _EPS_INSIDE_SQRT,
        bias_correction=bool(bias_correction),
        copies=[p_copy] if p_copy.numel() > 0 else [],
    )
