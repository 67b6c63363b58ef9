"""The optimizer ops with their formulas in float64: what tests, conformance and `sdk bench accuracy` compare with.

The formulas are written again here, element by element as the papers have them, and share nothing with the references.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.ops import adagrad, adam, lion

Options = Mapping[str, Any]
Formula = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True)
class OptimizerOp:
    """One op over lists of tensors.

    Attributes:
        name: in torch's namespace ``ds_plugin``.
        family: module of `ds_plugin_sdk.ops`.
        lists: names of the list arguments: params, grads, then states.
        kernel: the op's Python face; lists, then options by name.
        reference: the op in plain torch; lists, then numbers in the schema's order.
        numbers: from options to what follows the lists in the schema.
        formula: float64 tensors (one a list) and options -> new params and states.
        variants: options to try.
    """

    name: str
    family: str
    lists: tuple[str, ...]
    kernel: Callable[..., None]
    reference: Callable[..., None]
    numbers: Callable[[Options], tuple[Any, ...]]
    formula: Formula
    variants: tuple[Options, ...]

    @property
    def written(self) -> tuple[str, ...]:
        return tuple(name for name in self.lists if name != "grads")

    def run_reference(self, *lists: list[Tensor], **options: Any) -> None:
        self.reference(*lists, *self.numbers(options))


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


def _adam_numbers(options: Options) -> tuple[Any, ...]:
    steps = options["steps"]
    numbers = ([steps] if isinstance(steps, int) else steps, options["lr"], *options["betas"])
    extra = (options["adamw"], options["bias_correction"]) if "adamw" in options else ()
    return (*numbers, options["eps"], options["weight_decay"], *extra)


_ADAM = {"steps": 3, "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}

OPTIMIZER_OPS = (
    OptimizerOp(
        "adam_",
        "adam",
        ("params", "grads", "exp_avgs", "exp_avg_sqs"),
        adam.adam_,
        adam.adam_reference,
        _adam_numbers,
        adam64,
        tuple(
            {**_ADAM, "weight_decay": decay, "adamw": adamw, "bias_correction": correction}
            for decay in (0.0, 0.1)
            for adamw in (True, False)
            for correction in (True, False)
        ),
    ),
    OptimizerOp(
        "adam_rollback_",
        "adam",
        ("params", "grads", "exp_avgs", "exp_avg_sqs"),
        adam.adam_rollback_,
        adam.adam_rollback_reference,
        _adam_numbers,
        adam_rollback64,
        ({**_ADAM, "weight_decay": 0.0}, _ADAM),
    ),
    OptimizerOp(
        "adagrad_",
        "adagrad",
        ("params", "grads", "state_sums"),
        adagrad.adagrad_,
        adagrad.adagrad_reference,
        lambda o: (o["lr"], o["eps"], o["weight_decay"]),
        adagrad64,
        tuple({"lr": 1e-2, "eps": 1e-10, "weight_decay": decay} for decay in (0.0, 0.1)),
    ),
    OptimizerOp(
        "lion_",
        "lion",
        ("params", "grads", "exp_avgs"),
        lion.lion_,
        lion.lion_reference,
        lambda o: (o["lr"], *o["betas"], o["weight_decay"]),
        lion64,
        tuple({"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": decay} for decay in (0.0, 0.1)),
    ),
)

# (dtype of params, of grads, of states)
Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]
DTYPES: tuple[Dtypes, ...] = (
    (torch.float32, torch.float32, torch.float32),
    *(
        (low, grads, states)
        for low in (torch.bfloat16, torch.float16)
        for grads in (low, torch.float32)
        for states in (low, torch.float32)
    ),
)


def supported(op: OptimizerOp, dtypes: Dtypes) -> bool:
    """Whether kernels of `op` take tensors of these dtypes."""
    return op.name != "adam_rollback_" or dtypes[0] == torch.float32


def random_lists(
    op: OptimizerOp, shapes: Sequence[tuple[int, ...]], dtypes: Dtypes, seed: int = 0
) -> list[list[Tensor]]:
    """Arguments for `op`, of either sign and away from zero: a sum of such values loses no digits, so that errors can
    be counted in units of the last place, and Lion's sign does not depend on rounding.
    """
    generator = torch.Generator().manual_seed(seed)
    param, grad, state = dtypes

    def make(name: str, shape: tuple[int, ...]) -> Tensor:
        size = torch.rand(shape, generator=generator) * 1.5 + 0.5
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        match name:
            case "params":
                return (size * sign).to(param)
            case "grads":
                return (size * sign).to(grad)
            case "exp_avgs":
                return (size * sign / 2).to(state)
            case _:  # sums of squares
                return (size.square() / 2).to(state)

    return [[make(name, shape) for shape in shapes] for name in op.lists]
