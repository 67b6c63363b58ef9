"""Adam, Adagrad and Lion over lists of tensors: what tests, conformance and `sdk bench accuracy` compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import Kind, Make, OpInfo, Sample
from ds_plugin_sdk.conformance.op_info.optimizer_formulas import (
    Options,
    Update,
    adagrad64,
    adam64,
    adam_rollback64,
    lion64,
)
from ds_plugin_sdk.ops import adagrad, adam, lion

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

# Around every vector width, and more than one slice of work.
_TAILS = ((0,), (1,), (), (5, 7), (3,), (15,), (16,), (17,), (63,), (65,), (10_007,))
_GPT2_ATTENTION = ((768,), (768, 2304), (2304,), (768, 768))


@dataclass(frozen=True, eq=False, kw_only=True)
class OptimizerInfo(OpInfo):
    """An op over lists of tensors, one of each for a parameter, that treats every parameter alike.

    Attributes:
        lists: names of the list arguments: params, grads, then states.
        update: the formula for one parameter: float64 tensors, one of each list, and options -> the new parameter and
            states.
        numbers: from options to what follows the lists in the schema.
        variants: options to try.
    """

    lists: tuple[str, ...]
    update: Update
    numbers: Callable[[Options], tuple[Any, ...]]
    variants: tuple[Options, ...]

    def run_reference(self, *lists: list[Tensor], **options: Any) -> None:
        """The reference implementation, called as `function` is."""
        getattr(torch.ops.ds_plugin_reference, self.name)(*lists, *self.numbers(options))


def _optimizer(
    function: Callable[..., None],
    states: Sequence[str],
    update: Update,
    numbers: Callable[[Options], tuple[Any, ...]],
    variants: Sequence[Options],
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
) -> OptimizerInfo:
    """Describe an op by its Python function, the names of its states, and the attributes of `OptimizerInfo`."""
    lists = ("params", "grads", *states)
    written = ("params", *states)

    def formula(**arguments: Any) -> tuple[list[Tensor], ...]:
        tensors = [arguments.pop(name) for name in lists]
        results = [
            update(*each, {**arguments, **_step_of(arguments, i)}) for i, each in enumerate(zip(*tensors, strict=True))
        ]
        return tuple([result[i] for result in results] for i in range(len(written)))

    def schema_arguments(arguments: Mapping[str, Any]) -> Sequence[Any]:
        options = {name: value for name, value in arguments.items() if name not in lists}
        return [*(arguments[name] for name in lists), *numbers(options)]

    return OptimizerInfo(
        name=function.__name__,
        family=function.__module__.rpartition(".")[2],
        function=function,
        formula=formula,
        samples=lambda make: _samples(lists, variants, make),
        random=lambda make: _random(lists, variants, make),
        dtypes=tuple(dtypes),
        written=written,
        schema_arguments=schema_arguments,
        lists=lists,
        update=update,
        numbers=numbers,
        variants=tuple(variants),
        levels=function is lion.lion_,
        large=lambda make: _large(lists, next(v for v in reversed(variants) if v.get("bias_correction", True)), make),
    )


def _step_of(options: Options, parameter: int) -> dict[str, int]:
    """The step of one parameter, where they have steps of their own."""
    steps = options.get("steps")
    return {"steps": steps[parameter]} if isinstance(steps, list) else {}


# ---- samples ---------------------------------------------------------------------------------------------------------
def random_lists(
    lists: Sequence[str], shapes: Sequence[tuple[int, ...]], dtypes: Dtypes, seed: int = 0
) -> list[list[Tensor]]:
    """Tensors for the lists of an op, of either sign and away from zero: a sum of such values loses no digits, so that
    errors can be counted in units of the last place, and Lion's sign does not depend on rounding.
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

    return [[make(name, shape) for shape in shapes] for name in lists]


def _samples(lists: Sequence[str], variants: Sequence[Options], make: Make) -> Iterator[Sample]:
    own, *mixed = [mix for mix in DTYPES if mix[0] == make.dtype]

    def sample(
        mix: Dtypes, shapes: Sequence[tuple[int, ...]], options: Options, seed: int, label: str, kind: Kind
    ) -> Sample:
        tensors = random_lists(lists, shapes, mix, make.generator.initial_seed() + seed)
        return Sample(label, {**dict(zip(lists, tensors, strict=True)), **options}, kind)

    yield sample(own, [(0,)], variants[-1], 0, "empty", "empty")
    yield sample(own, [], variants[-1], 0, "no tensors", "empty")
    for number, options in enumerate(variants):
        yield sample(own, _TAILS, options, number, f"tails, {_options(options)}", "adversarial")
    yield _resting(sample(own, _TAILS, variants[0], 0, "zero gradients and states", "adversarial"), lists)
    yield _beginning(sample(own, _TAILS, variants[0], 0, "tiny gradients, zero states", "adversarial"), lists)
    yield sample(own, _TAILS, {**variants[-1], "lr": 0.0}, 0, "tails, a learning rate of zero", "adversarial")
    undoes = "steps" in variants[-1] and "adamw" not in variants[-1]  # which divides by betas
    if "betas" in variants[-1] and not undoes:
        without = {**variants[-1], "betas": (0.0, 0.0)}
        yield sample(own, _TAILS, without, 0, "tails, without momentum", "adversarial")
    if make.dtype != torch.float16:
        yield _times(2.0**50, sample(own, _TAILS, variants[0], 0, "tails, large gradients", "adversarial"))
    for mix in mixed:
        for options in (variants[-1], *variants[-4:-3]):  # of Adam all but the decay are others
            text = f"{_mix(mix)}, {_options(options)}"
            yield sample(mix, _TAILS, options, 0, f"tails, {text}", "adversarial")
    for mix in (own, *mixed):
        if mix[1:] == (torch.float16, torch.float32):
            yield _far_apart(
                sample(mix, _TAILS, variants[-1], 0, f"small and large, {_mix(mix)}", "adversarial"), lists
            )
    yield sample(own, _GPT2_ATTENTION, variants[-1], 1, "gpt2 attention", "real")


def _large(lists: Sequence[str], options: Options, make: Make) -> Iterator[Sample]:
    """More tensors than a launch has room for, steps far apart, and more elements than a grid has threads."""
    own = next(mix for mix in DTYPES if mix[0] == make.dtype)

    def sample(label: str, shapes: Sequence[tuple[int, ...]], **changed: Any) -> Sample:
        tensors = dict(zip(lists, random_lists(lists, shapes, own), strict=True))
        return Sample(label, {**tensors, **options, **changed}, "adversarial")

    yield sample("700 tensors", [(1 + i % 5,) for i in range(700)])
    yield sample("2,100,001 elements", [(2_100_001,)])
    yield sample("a large number added to the divisor", [(17,)], **({"eps": 0.5} if "eps" in options else {}))
    if "steps" in options:
        yield sample("steps of 1, 256 and 100,000", [(3,)] * 3, steps=[1, 256, 100_000])
        for step in (255, 256, 257, 65_536, 100_000, 10_000_000):
            yield sample(f"step {step}", [(3,)], steps=step)


def _random(lists: Sequence[str], variants: Sequence[Options], make: Make) -> Mapping[str, Any]:
    mix = make.pick(*(mix for mix in DTYPES if mix[0] == make.dtype))
    shapes = [make.shape(elements=20_000) for _ in range(make.size(6))]
    options = dict(make.pick(*variants))
    if "steps" in options:
        options["steps"] = make.pick(1, 2, 3, 1000, 10**7)
    if "betas" in options:
        options["betas"] = make.pick(options["betas"], (0.5, 0.5), (0.8, 0.99))
    options["lr"] = make.pick(1e-2, 1e-4, 0.0)
    tensors = random_lists(lists, shapes, mix, int(make.integers(0, 2**31)))
    return {**dict(zip(lists, tensors, strict=True)), **options}


def _far_apart(sample: Sample, lists: Sequence[str]) -> Sample:
    """Gradients whose squares float16 does not hold, and states that begin."""
    changed = {name: [torch.zeros_like(t) for t in sample.arguments[name]] for name in lists if name != "params"}
    for grad in changed["grads"]:
        grad.view(-1)[::2], grad.view(-1)[1::2] = 2.0**-13, 300.0
    return Sample(sample.label, {**sample.arguments, **changed}, sample.kind)


def _beginning(sample: Sample, lists: Sequence[str]) -> Sample:
    """Gradients that are next to nothing in float16, and states that begin."""
    changed = {name: [torch.zeros_like(t) for t in sample.arguments[name]] for name in lists if name != "params"}
    changed["grads"] = [t.sign() * 2.0**-24 for t in sample.arguments["grads"]]
    return Sample(sample.label, {**sample.arguments, **changed}, sample.kind)


def _times(factor: float, sample: Sample) -> Sample:
    """The same call with larger gradients."""
    return Sample(
        sample.label, {**sample.arguments, "grads": [factor * g for g in sample.arguments["grads"]]}, sample.kind
    )


def _resting(sample: Sample, lists: Sequence[str]) -> Sample:
    """Nothing to do: what divides must not divide zero by zero."""
    zeros = {name: [torch.zeros_like(t) for t in sample.arguments[name]] for name in lists if name != "params"}
    return Sample(sample.label, {**sample.arguments, **zeros}, sample.kind)


def _options(options: Options) -> str:
    """The options in which the variants of an op differ."""
    named = {"adamw": "adamw", "bias_correction": "bias correction"}
    words = [f"weight_decay={options['weight_decay']}"]
    words += [text if options[name] else f"no {text}" for name, text in named.items() if name in options]
    return ", ".join(words)


def _mix(mix: Dtypes) -> str:
    grads, states = ("float32" if dtype == torch.float32 else "own dtype" for dtype in mix[1:])
    return f"grads {grads}, states {states}"


# ---- ops -------------------------------------------------------------------------------------------------------------
_ADAM = {"steps": 3, "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
_MOMENTS = ("exp_avgs", "exp_avg_sqs")


def _adam_numbers(options: Options) -> tuple[Any, ...]:
    steps = options["steps"]
    numbers = ([steps] if isinstance(steps, int) else steps, options["lr"], *options["betas"])
    extra = (options["adamw"], options["bias_correction"]) if "adamw" in options else ()
    return (*numbers, options["eps"], options["weight_decay"], *extra)


OPS = (
    _optimizer(
        adam.adam_,
        _MOMENTS,
        adam64,
        _adam_numbers,
        [
            {**_ADAM, "weight_decay": decay, "adamw": adamw, "bias_correction": correction}
            for decay in (0.0, 0.1)
            for adamw in (True, False)
            for correction in (True, False)
        ],
    ),
    _optimizer(
        adam.adam_rollback_,
        _MOMENTS,
        adam_rollback64,
        _adam_numbers,
        [{**_ADAM, "weight_decay": 0.0}, _ADAM],
        dtypes=[torch.float32],
    ),
    _optimizer(
        adagrad.adagrad_,
        ["state_sums"],
        adagrad64,
        lambda o: (o["lr"], o["eps"], o["weight_decay"]),
        [{"lr": 1e-2, "eps": 1e-10, "weight_decay": decay} for decay in (0.0, 0.1)],
    ),
    _optimizer(
        lion.lion_,
        ["exp_avgs"],
        lion64,
        lambda o: (o["lr"], *o["betas"], o["weight_decay"]),
        [{"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": decay} for decay in (0.0, 0.1)],
    ),
)
