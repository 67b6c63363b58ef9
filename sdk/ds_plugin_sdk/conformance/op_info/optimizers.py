"""Adam, Adagrad and Lion over lists of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import Kind, Make, OpInfo, Sample
from ds_plugin_sdk.conformance.op_info.optimizer_formulas import (
    DTYPES,
    OPTIMIZER_OPS,
    Dtypes,
    OptimizerOp,
    random_lists,
    supported,
)

# Around every vector width, and more than one slice of work.
_TAILS = ((0,), (1,), (3,), (15,), (16,), (17,), (63,), (65,), (10_007,))
_GPT2_ATTENTION = ((768,), (768, 2304), (2304,), (768, 768))


def _describe(op: OptimizerOp) -> OpInfo:
    def formula(**arguments: Any) -> tuple[list[Tensor], ...]:
        lists = [arguments.pop(name) for name in op.lists]
        results = [op.formula(*tensors, arguments) for tensors in zip(*lists, strict=True)]
        return tuple([result[i] for result in results] for i in range(len(op.written)))

    def samples(make: Make) -> Iterator[Sample]:
        mixes = [mix for mix in DTYPES if mix[0] == make.dtype and supported(op, mix)]
        yield _sample(op, mixes[0], [(0,)], op.variants[-1], 0, "empty", "empty")
        for number, options in enumerate(op.variants):
            yield _sample(op, mixes[0], _TAILS, options, number, f"tails, {_options(options)}", "adversarial")
        yield _resting(_sample(op, mixes[0], _TAILS, op.variants[0], 0, "zero gradients and states", "adversarial"), op)
        for mix in mixes[1:]:
            yield _sample(op, mix, _TAILS, op.variants[-1], 0, f"tails, {_mix(mix)}", "adversarial")
        yield _sample(op, mixes[0], _GPT2_ATTENTION, op.variants[-1], 1, "gpt2 attention", "real")

    def schema_arguments(arguments: Mapping[str, Any]) -> Sequence[Any]:
        options = {name: value for name, value in arguments.items() if name not in op.lists}
        return [*(arguments[name] for name in op.lists), *op.numbers(options)]

    dtypes = [mix[0] for mix in DTYPES if supported(op, mix)]
    return OpInfo(
        name=op.name,
        family=op.family,
        function=op.kernel,
        formula=formula,
        samples=samples,
        dtypes=tuple(dict.fromkeys(dtypes)),
        written=op.written,
        schema_arguments=schema_arguments,
    )


def _sample(
    op: OptimizerOp,
    mix: Dtypes,
    shapes: Sequence[tuple[int, ...]],
    options: Mapping[str, Any],
    seed: int,
    label: str,
    kind: Kind,
) -> Sample:
    lists = random_lists(op, shapes, mix, seed)
    return Sample(label, {**dict(zip(op.lists, lists, strict=True)), **options}, kind)


def _resting(sample: Sample, op: OptimizerOp) -> Sample:
    """Nothing to do: what divides must not divide zero by zero."""
    zeros = {name: [torch.zeros_like(t) for t in sample.arguments[name]] for name in op.lists if name != "params"}
    return Sample(sample.label, {**sample.arguments, **zeros}, sample.kind)


def _options(options: Mapping[str, Any]) -> str:
    """The options in which the variants of an op differ."""
    named = {"adamw": "adamw", "bias_correction": "bias correction"}
    words = [f"weight_decay={options['weight_decay']}"]
    words += [text if options[name] else f"no {text}" for name, text in named.items() if name in options]
    return ", ".join(words)


def _mix(mix: Dtypes) -> str:
    grads, states = ("float32" if dtype == torch.float32 else "own dtype" for dtype in mix[1:])
    return f"grads {grads}, states {states}"


OPS = tuple(_describe(op) for op in OPTIMIZER_OPS)
