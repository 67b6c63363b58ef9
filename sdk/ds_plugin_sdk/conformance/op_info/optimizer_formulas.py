"""One step of each optimizer for one parameter in float64, as the papers have it; shares nothing with references."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Options = Mapping[str, Any]
# The parameter, its gradient, its states, all in float64, and the options -> the new parameter and states.
Update = Callable[..., tuple[Tensor, ...]]


def adam64(p: Tensor, g: Tensor, m: Tensor, v: Tensor, options: Options) -> tuple[Tensor, ...]:
    """Kingma & Ba 2015, algorithm 1; Loshchilov & Hutter 2019, algorithm 2."""
    t = options["steps"]
    lr, (b1, b2), eps, wd = options["lr"], options["betas"], options["eps"], options["weight_decay"]
    if not options["adamw"]:
        g = g + wd * p if wd else g
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    m_hat, v_hat = (m / (1 - b1**t), v / (1 - b2**t)) if options["bias_correction"] else (m, v)
    decayed = p - lr * wd * p if options["adamw"] and wd else p
    return decayed - lr * m_hat / (torch.sqrt(v_hat) + eps), m, v


def adam_rollback64(p: Tensor, g: Tensor, m: Tensor, v: Tensor, options: Options) -> tuple[Tensor, ...]:
    """The AdamW step with bias correction, solved for what was before it."""
    t = options["steps"]
    lr, (b1, b2), eps, wd = options["lr"], options["betas"], options["eps"], options["weight_decay"]
    before = (p + lr * (m / (1 - b1**t)) / (torch.sqrt(v / (1 - b2**t)) + eps)) / (1 - lr * wd)
    return (
        torch.where(torch.isfinite(before), before, 0.0),
        (m - (1 - b1) * g) / b1,
        torch.clamp((v - (1 - b2) * g**2) / b2, min=0),
    )


def adagrad64(p: Tensor, g: Tensor, s: Tensor, options: Options) -> tuple[Tensor, ...]:
    """Duchi, Hazan & Singer 2011, the diagonal form."""
    wd = options["weight_decay"]
    g = g + wd * p if wd else g
    s = s + g**2
    return p - options["lr"] * g / (torch.sqrt(s) + options["eps"]), s


def lion64(p: Tensor, g: Tensor, m: Tensor, options: Options) -> tuple[Tensor, ...]:
    """Chen et al. 2023, algorithm 2; the sign of NaN is NaN."""
    lr, (b1, b2), wd = options["lr"], options["betas"], options["weight_decay"]
    c = b1 * m + (1 - b1) * g
    direction = torch.where(c > 0, 1.0, torch.where(c < 0, -1.0, c))
    decayed = p - lr * wd * p if wd else p
    return decayed - lr * direction, b2 * m + (1 - b2) * g
