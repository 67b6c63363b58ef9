"""Cross entropy of logits, whose gradient takes their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import MANY_COLUMNS, MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import cross_entropy as ops

_TAILS = (1, 3, 15, 16, 17, 33, 100)
IGNORED = -100
# Each option alone, and all of them.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "soft cap": {"softcap": 2.0},
    "all options": {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 5.0},
}
DEFAULTS = {"ignore_index": IGNORED, "label_smoothing": 0.0, "z_loss": 0.0, "softcap": 0.0}


def _tanh(x: Tensor) -> Tensor:
    """Which loses nothing near 0, nor does its derivative where that is near 0."""
    sign = torch.where(x < 0, -1.0, 1.0).to(x.dtype)
    e = torch.exp(-2 * sign * x)
    return torch.where(x.abs() < 1, torch.tanh(x), sign * (1 - e) / (1 + e))


def losses(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float
) -> Tensor:
    """The loss of each row."""
    x = softcap * _tanh(logits / softcap) if softcap else logits
    likely = torch.log_softmax(x, dim=1)
    ignored = target == ignore_index
    place = torch.where(ignored, 0, target).unsqueeze(1)
    found = -(1 - label_smoothing) * likely.gather(1, place).squeeze(1)
    if label_smoothing:
        found = found - label_smoothing * likely.mean(dim=1)
    if z_loss:
        found = found + z_loss * torch.logsumexp(x, dim=1) ** 2
    return torch.where(ignored, 0.0, found)


def _cross_entropy(logits: Tensor, target: Tensor, gradient: bool, **options: Any) -> tuple[Tensor, Tensor]:
    if logits.numel() == 0:
        return logits, logits.new_zeros(len(logits))
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        found = losses(leaf, target, **options)
        (grad,) = torch.autograd.grad(found.sum(), leaf)
    # Zero times what is not finite is none of an ignored row's gradient.
    grad = torch.where((target == options["ignore_index"]).unsqueeze(1), 0.0, grad)
    return grad if gradient else logits, found.detach()


def targets(make: Make, rows: int, columns: int) -> Tensor:
    """One column for each row; every fourth is ignored, from the third on."""
    target = make.integers(0, max(columns, 1), rows)
    target[2::4] = IGNORED
    return target


def _samples(make: Make) -> Iterator[Sample]:
    yield _sample("no rows", "empty", make.normal(0, 5))
    yield _sample("no columns", "empty", make.normal(3, 0), make.integers(IGNORED, IGNORED + 1, 3))
    yield _sample("two rows", "random", make.normal(2, 5))
    for columns in _TAILS:
        yield _sample(f"{columns} columns", "adversarial", make.normal(6, columns, scale=3.0), make_targets=make)
    for label, options in OPTIONS.items():
        yield _sample(label, "random", make.normal(5, 37, scale=3.0), make_targets=make, **options)
    yield _sample("losses alone", "random", make.normal(5, 37), make_targets=make, gradient=False)
    options = OPTIONS["all options"]
    yield _sample("losses alone, all options", "random", make.normal(5, 37), None, make, gradient=False, **options)
    hidden = make.normal(4, 200)
    hidden[:, :150] = hidden[1, 180:] = -torch.inf
    yield _sample("columns that cannot be", "adversarial", hidden, torch.full((4,), 170))
    yield _sample("all ignored", "random", make.normal(3, 20), make.integers(IGNORED, IGNORED + 1, 3))
    yield _sample("a column is ignored", "adversarial", make.normal(9, 3), make.integers(0, 3, 9), ignore_index=1)
    yield _sample("large logits", "adversarial", make.normal(4, 40, scale=1e3), make_targets=make)
    yield _sample("far from zero", "adversarial", make.normal(4, 40) + 256, make_targets=make)
    yield _sample("capped", "adversarial", make.normal(4, 40, scale=1e3), make_targets=make, softcap=30.0)
    yield _sample("gpt2's vocabulary", "real", make.normal(8, 50257), make_targets=make)


def _large(make: Make) -> Iterator[Sample]:
    yield _sample(f"{MANY_ROWS} rows", "adversarial", make.normal(MANY_ROWS, 3), make_targets=make)
    for options in ({}, OPTIONS["all options"]):
        label = f"{MANY_COLUMNS} columns" + (", all options" if options else "")
        yield _sample(label, "adversarial", make.normal(3, MANY_COLUMNS), make_targets=make, **options)


def _sample(
    label: str,
    kind: Kind,
    logits: Tensor,
    target: Tensor | None = None,
    make_targets: Make | None = None,
    gradient: bool = True,
    **options: Any,
) -> Sample:
    if target is None:
        rows, columns = logits.shape
        target = torch.arange(rows) % columns if make_targets is None else targets(make_targets, rows, columns)
    return Sample(label, {"logits": logits, "target": target, **DEFAULTS, **options, "gradient": gradient}, kind)


def _random(make: Make) -> Mapping[str, Any]:
    rows, columns = make.size(60), make.size(3000, 1)
    options: Mapping[str, Any] = make.pick({}, *OPTIONS.values())
    logits = make.normal(rows, columns, scale=make.pick(0.1, 3.0, 30.0))
    return _sample("", "random", logits, make_targets=make, gradient=make.chance(), **options).arguments


OPS = (
    OpInfo(
        name="cross_entropy_",
        family="cross_entropy",
        function=ops.cross_entropy_,
        formula=_cross_entropy,
        samples=_samples,
        random=_random,
        written=("logits",),
        broadcasts=("logits",),
        # A gradient is a difference of numbers up to 1, and an error of a logit one of the loss.
        rtol={torch.float32: 5e-6, torch.bfloat16: 2**-8 + 5e-6, torch.float16: 2**-11 + 5e-6},
        atol={torch.float32: 4e-6, torch.bfloat16: 4e-6, torch.float16: 4e-6},
        large=_large,
        indices={"target": lambda arguments: arguments["logits"].shape[1]},
    ),
)
