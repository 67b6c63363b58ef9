"""``fused_lamb``: what DeepSpeed's FusedLamb calls, on the accelerator's tensors."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

from torch import Tensor

from ds_plugin_sdk.ops.lamb import lamb_

_EPS_INSIDE_SQRT = 0
_last_scale: tuple[Tensor, int, float] | None = None


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

    Formula, dtypes and errors are those of `ds_plugin_sdk.ops.lamb.lamb_`. Where the moments are corrected for their
    bias is where the installed DeepSpeed does it: in the step size up to 0.19.8, and inside of the update, as the paper
    has it, in later releases.

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
        int(step),
        lr=lr,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        min_coeff=min_coeff,
        max_coeff=max_coeff,
        grad_scale=_number(combined_scale),
        eps_inside_sqrt=eps_mode == _EPS_INSIDE_SQRT,
        bias_correction=bool(bias_correction),
        correct_inside=_corrects_inside(),
        copies=[p_copy] if p_copy.numel() > 0 else [],
    )


def _number(scale: float | Tensor) -> float:
    """A scale's value. The front end has one tensor for all parameters of a group. To read it is to wait for the
    device, which for each of them would be for the update of the one before.
    """
    global _last_scale
    if not isinstance(scale, Tensor) or scale.is_inference():  # whose changes nobody counts
        return float(scale)
    last = _last_scale
    if last is None or last[0] is not scale or last[1] != scale._version:
        last = _last_scale = scale, scale._version, float(scale)
    return last[2]


@functools.cache
def _corrects_inside() -> bool:
    """Whether the installed DeepSpeed corrects the moments rather than the step size.

    Its front end and signatures are the same in all releases, and one built from a clone has a version of its own
    making. What tells is the source of its kernel, which every wheel has: the older one computes a step size.
    """
    spec = importlib.util.find_spec("deepspeed")
    for package in (spec.submodule_search_locations or []) if spec else []:
        source = Path(package, "ops", "csrc", "lamb", "fused_lamb_cuda_kernel.cu")
        if source.exists():
            return "step_size" not in source.read_text(encoding="utf-8", errors="replace")
    return True
