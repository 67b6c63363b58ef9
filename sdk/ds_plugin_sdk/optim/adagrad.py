"""Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_plugin_sdk.ops.adagrad import adagrad_
from ds_plugin_sdk.optim._fused import FusedOptimizer, check_options


class FusedAdagrad(FusedOptimizer):
    """Adagrad; the formula is that of `ds_plugin_sdk.ops.adagrad.adagrad_`.

    Args:
        params: parameters or parameter groups, float32, bfloat16 or float16 (float64: reference only).
        lr: learning rate, a number or a tensor of one element.
        eps: added to the denominator.
        weight_decay: times the parameter, added to the gradient.
        initial_accumulator_value: the sums of squares before the first step.
        state_dtype: dtype of the sums: `torch.float32`, or None for that of each parameter.
        options: torch's other options, accepted where they change no result, as ``foreach`` and ``amsgrad=False`` do.

    Raises:
        TypeError: the namesake in `torch.optim` has no such option either.
        ValueError: an option is out of range.
        UnsupportedOptionError: an option of torch's, here or in a group, would change the result.
    """

    FAMILY: ClassVar[str] = "adagrad"
    STATES: ClassVar[tuple[str, ...]] = ("sum",)
    COUNTS_STEPS: ClassVar[bool] = False
    RENAMED: ClassVar[Mapping[str, str]] = {"exp_avg_sq": "sum"}  # DeepSpeedCPUAdagrad's

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        *,
        initial_accumulator_value: float = 0.0,
        state_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        check_options(
            "FusedAdagrad",
            lr=lr,
            eps=eps,
            weight_decay=weight_decay,
            initial_accumulator_value=initial_accumulator_value,
        )
        defaults: dict[str, Any] = {
            "lr": lr,
            "eps": eps,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults, options)

    def _export_group(self, group: dict[str, Any]) -> None:
        group["lr_decay"] = 0.0  # torch's Adagrad takes it from the group

    def _new_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        state = super()._new_state(param, group)
        state["sum"].fill_(group["initial_accumulator_value"])
        return state

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        steps: list[int],
    ) -> None:
        adagrad_(params, grads, *states, lr=float(group["lr"]), eps=group["eps"], weight_decay=group["weight_decay"])
