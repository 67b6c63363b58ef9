"""LAMB over lists of tensors.

The update is made of the moments as they are stored. So that the formula, which knows no dtypes, has the same moments,
those of samples whose states are rounded need few bits: they are exact in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import lamb

_TAILS = ((0,), (1,), (3,), (15,), (16,), (17,), (63,), (65,), (1024,), (10_007,))
_GPT2_ATTENTION = ((768,), (768, 2304), (2304,), (768, 768))
_OPTIONS = {"steps": 3, "lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.1}
_PAPER = {"correct_inside": True, "min_coeff": 0.0, "max_coeff": math.inf}
_VARIANTS: dict[str, dict[str, Any]] = {
    "deepspeed": {},
    "no decay": {"weight_decay": 0.0},
    "eps inside": {"eps": 1e-3, "eps_inside_sqrt": True},
    "no bias correction": {"bias_correction": False},
    "scaled gradients": {"grad_scale": 1024.0},
    "least ratio": {"min_coeff": 100.0, "max_coeff": 200.0},
    "largest ratio": {"max_coeff": 0.02},
    "paper": _PAPER,
    "paper, eps inside": {**_PAPER, "eps": 1e-3, "eps_inside_sqrt": True},
    "paper, no bias correction, scaled gradients": {**_PAPER, "bias_correction": False, "grad_scale": 1024.0},
}


# ---- formula ---------------------------------------------------------------------------------------------------------
def _lamb64(p: Tensor, g: Tensor, m: Tensor, v: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """fused_lamb_cuda_kernel.cu; with `correct_inside`, You et al. 2020, algorithm 2."""
    t, lr, wd = options["steps"], options["lr"], options["weight_decay"]
    (b1, b2), eps = options["betas"], options.get("eps", 1e-8)
    corrected, inside = options.get("bias_correction", True), options.get("correct_inside", False)
    c1, c2 = (1 - b1**t, 1 - b2**t) if corrected else (1.0, 1.0)
    g = g / options.get("grad_scale", 1.0)
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    m_hat, v_hat = (m / c1, v / c2) if inside else (m, v)
    root = torch.sqrt(v_hat + eps) if options.get("eps_inside_sqrt", False) else torch.sqrt(v_hat) + eps
    u = m_hat / root + wd * p if wd else m_hat / root
    p_norm, u_norm = torch.sqrt(torch.sum(p**2)), torch.sqrt(torch.sum(u**2))
    ratio = torch.clamp(p_norm / u_norm, options.get("min_coeff", 0.01), options.get("max_coeff", 10.0))
    if p_norm == 0 or u_norm == 0:
        ratio = torch.ones_like(ratio)
    step_size = lr if inside else lr * math.sqrt(c2) / c1
    return p - step_size * ratio * u, m, v, ratio


def _formula(
    *,
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    copies: Sequence[Tensor],
    **options: Any,
) -> tuple[Any, ...]:
    steps = zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)
    results = [_lamb64(p, g, m, v, {**options, **_step_of(options, i)}) for i, (p, g, m, v) in enumerate(steps)]
    new, firsts, seconds = ([result[i] for result in results] for i in range(3))
    return new, firsts, seconds, new if copies else [], torch.tensor([result[3] for result in results])


def _step_of(options: Mapping[str, Any], parameter: int) -> dict[str, int]:
    """The step of one parameter, where they have steps of their own."""
    steps = options["steps"]
    return {"steps": steps[parameter]} if isinstance(steps, list) else {}


# ---- samples ---------------------------------------------------------------------------------------------------------
def _samples(make: Make) -> Iterator[Sample]:
    yield _sample(make, "empty", [(0,)], {}, kind="empty")
    yield _sample(make, "no tensors", [], {}, kind="empty")
    yield _sample(make, "few elements, bfloat16 copies", [(2, 3)], {}, copy=torch.bfloat16, kind="random")
    for label, options in _VARIANTS.items():
        yield _sample(make, f"tails, {label}", _TAILS, options)
    yield _at_rest(_sample(make, "zero gradients and states", _TAILS, {"weight_decay": 0.0}))
    yield _at_rest(_sample(make, "zero parameters", _TAILS, {}), params=True)
    for copy in (torch.bfloat16, torch.float16, torch.float32):
        yield _sample(make, f"tails, {copy} copies".replace("torch.", ""), _TAILS, {}, copy=copy)
    if make.dtype == torch.float32:
        for grad in (torch.bfloat16, torch.float16):
            yield _sample(make, f"tails, {grad} gradients".replace("torch.", ""), _TAILS, {}, grad=grad, copy=grad)
    else:
        yield _sample(make, "tails, float32 gradients", _TAILS, {}, grad=torch.float32)
        yield _few_bits(make, "tails, own states")
    yield _sample(make, "a number", [(), (17,)], {})
    yield _sample(make, "a learning rate of zero", _TAILS, {"lr": 0.0})
    yield _sample(make, "gpt2 attention", _GPT2_ATTENTION, {}, kind="real")


def _large(make: Make) -> Iterator[Sample]:
    yield _sample(make, "700 tensors", [(1 + i % 5,) for i in range(700)], {})
    yield _sample(make, "300,001 elements", [(300_001,)], {})
    yield _sample(make, "a large number added to the divisor", [(17,)], {"eps": 0.5})
    yield _sample(make, "steps of 1, 256 and 100,000", [(17,)] * 3, {"steps": [1, 256, 100_000]})
    for step in (256, 100_000, 10_000_000):
        yield _sample(make, f"step {step}", [(17,)], {"steps": step})


def _sample(
    make: Make,
    label: str,
    shapes: Sequence[tuple[int, ...]],
    options: Mapping[str, Any],
    *,
    grad: torch.dtype | None = None,
    copy: torch.dtype | None = None,
    kind: Kind = "adversarial",
) -> Sample:
    """Parameters in the dtype of `make`, states in float32. Copies hold what is as large as parameters, and wrong."""
    params = [make.signed(*shape) for shape in shapes]
    lists = {
        "params": params,
        "grads": [make.signed(*shape, dtype=grad) for shape in shapes],
        "exp_avgs": [make.signed(*shape, scale=0.5, dtype=torch.float32) for shape in shapes],
        "exp_avg_sqs": [make.positive(*shape, scale=0.5, dtype=torch.float32) for shape in shapes],
        "copies": [(-param).to(copy) for param in params] if copy else [],
    }
    return Sample(label, {**lists, **_OPTIONS, **options}, kind)


def _few_bits(make: Make, label: str) -> Sample:
    """Gradients and states are powers of two, and halves of their sums are exact."""

    def powers(shape: tuple[int, ...], low: int, high: int) -> Tensor:
        return torch.exp2(make.integers(low, high, *shape).float()).to(make.dtype)

    lists = {
        "params": [make.signed(*shape) for shape in _TAILS],
        "grads": [powers(shape, -1, 2) for shape in _TAILS],
        "exp_avgs": [powers(shape, -2, 0) for shape in _TAILS],
        "exp_avg_sqs": [powers(shape, -2, 1) for shape in _TAILS],
        "copies": [],
    }
    return Sample(label, {**lists, **_OPTIONS, "betas": (0.5, 0.5)}, "adversarial")


def _at_rest(sample: Sample, *, params: bool = False) -> Sample:
    """Nothing to do: a ratio of zeros is 1."""
    names = ("params",) if params else ("grads", "exp_avgs", "exp_avg_sqs")
    zeros = {name: [torch.zeros_like(t) for t in sample.arguments[name]] for name in names}
    return Sample(sample.label, {**sample.arguments, **zeros}, sample.kind)


def _random(make: Make) -> Mapping[str, Any]:
    shapes = [make.shape(elements=20_000) for _ in range(make.size(5))]
    options = {
        **_OPTIONS,
        **make.pick(*_VARIANTS.values()),
        "steps": make.pick(1, 2, 3, 1000, 10**7),
        "betas": make.pick((0.9, 0.999), (0.5, 0.5), (0.0, 0.9)),
    }
    copy = make.pick(None, torch.bfloat16, torch.float16, torch.float32)
    grad = make.pick(make.dtype, torch.float32, *((torch.bfloat16,) if make.dtype == torch.float32 else ()))
    return _sample(make, "", shapes, options, grad=grad, copy=copy).arguments


_NUMBERS = {
    "lr": None,
    "betas": None,
    "eps": 1e-8,
    "weight_decay": None,
    "min_coeff": 0.01,
    "max_coeff": 10.0,
    "grad_scale": 1.0,
    "eps_inside_sqrt": False,
    "bias_correction": True,
    "correct_inside": False,
}


def _schema_arguments(arguments: Mapping[str, Any]) -> Sequence[Any]:
    lists = [arguments[name] for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "copies")]
    values = {**_NUMBERS, **arguments}
    numbers = [number for name in _NUMBERS for number in (values[name] if name == "betas" else [values[name]])]
    steps = arguments["steps"]
    return [*lists, [steps] if isinstance(steps, int) else steps, *numbers]


OPS = (
    OpInfo(
        name="lamb_",
        family="lamb",
        function=lamb.lamb_,
        formula=_formula,
        samples=_samples,
        random=_random,
        written=("params", "exp_avgs", "exp_avg_sqs", "copies"),
        schema_arguments=_schema_arguments,
        large=_large,
    ),
)
