"""Lion."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_plugin_sdk.ops.lion import lion_
from ds_plugin_sdk.optim._fused import FusedOptimizer, betas_of, check_options


class FusedLion(FusedOptimizer):
    """Lion; the formula is that of `ds_plugin_sdk.ops.lion.lion_`.

    Args:
        params: parameters or parameter groups, float32, bfloat16 or float16 (float64: reference only).
        lr: learning rate, a number or a tensor of one element; a third to a tenth of AdamW's is usual.
        betas: decay of the moment in the direction and in the state.
        weight_decay: decay of the parameters.
        state_dtype: dtype of the moment: `torch.float32`, or None for that of each parameter.
        options: torch's other options, accepted where they change no result, as ``foreach`` and ``amsgrad=False`` do.

    Raises:
        TypeError: torch's optimizers have no such option either.
        ValueError: an option is out of range.
        UnsupportedOptionError: an option of torch's, here or in a group, would change the result.
    """

    FAMILY: ClassVar[str] = "lion"
    STATES: ClassVar[tuple[str, ...]] = ("exp_avg",)
    COUNTS_STEPS: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        state_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        check_options("FusedLion", lr=lr, weight_decay=weight_decay, betas=betas)
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "state_dtype": state_dtype,
        }
        super().__init__(params, defaults, options)

    def _update(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        states: list[list[Tensor]],
        steps: list[int],
    ) -> None:
        lion_(params, grads, *states, lr=float(group["lr"]), betas=betas_of(group), weight_decay=group["weight_decay"])
