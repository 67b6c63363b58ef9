"""Lines of plain torch that several benchmarks compare with."""

from __future__ import annotations

import torch
from torch import Tensor


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding as transformers writes it; the tables, of whole heads, are made once for all layers."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def tables(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Those of `turned`, ``[batch or 1, 1, tokens, head_dim]``, of the halves that the SDK's ops take."""
    cos, sin = (torch.cat((half, half), dim=-1).unsqueeze(1).to(dtype) for half in (cos, sin))
    return cos, sin


def fused_adamw(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """The op below torch's ``AdamW(fused=True)``, on lists."""
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
