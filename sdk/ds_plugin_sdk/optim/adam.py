"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_plugin_sdk.ops.adam import adam_
from ds_plugin_sdk.optim._fused import FusedOptimizer, betas_of, check_options


class FusedAdam(FusedOptimizer):
    """AdamW, or Adam with L2 regularisation; the formula is that of `ds_plugin_sdk.ops.adam.adam_`.

    Args:
        params: parameters or parameter groups, float32, bfloat16 or float16 (float64: reference only).
        lr: learning rate, a number or a tensor of one element.
        betas: decay of the moments.
        eps: added to the denominator.
        weight_decay: decay of the parameters.
        adamw: decay parameters (AdamW), or add the decay to gradients (Adam).
        bias_correction: divide the moments by 1 - beta^t.
        state_dtype: dtype of the moments: `torch.float32`, or None for that of each parameter.
        options: torch's other options, accepted where they change no result, as ``foreach`` and ``amsgrad=False`` do.

    Raises:
        TypeError: the namesake in `torch.optim` has no such option either.
        ValueError: an option is out of range.
        UnsupportedOptionError: an option of torch's, here or in a group, would change the result.
    """

    FAMILY: ClassVar[str] = "adam"
    STATES: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adamw: bool = True,
        bias_correction: bool = True,
        state_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        check_options("FusedAdam", lr=lr, eps=eps, weight_decay=weight_decay, betas=betas)
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adamw": adamw,
            "bias_correction": bias_correction,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults, options)

    def _import_group(self, group: dict[str, Any]) -> None:
        super()._import_group(group)
        if "decoupled_weight_decay" in group:  # torch's name for it
            group["adamw"] = bool(group.pop("decoupled_weight_decay"))

    def _export_group(self, group: dict[str, Any]) -> None:
        group["decoupled_weight_decay"] = group["adamw"]

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        steps: list[int],
    ) -> None:
        exp_avgs, exp_avg_sqs = states
        adam_(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            steps,
            lr=float(group["lr"]),
            betas=betas_of(group),
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            adamw=group["adamw"],
            bias_correction=group["bias_correction"],
        )
