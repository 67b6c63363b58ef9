"""Attention of the Evoformer, and its gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import evoformer_attn

# Batch, rows, tokens, heads, size of a head.
_SHAPES = ((1, 2, 5, 1, 4), (2, 3, 17, 2, 8), (1, 2, 70, 3, 33), (2, 1, 40, 2, 64), (1, 1, 9, 2, 80))
_REAL = (1, 3, 128, 4, 32)


def _scores(query: Tensor, key: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None) -> Tensor:
    scores: Tensor = torch.einsum("bnihd,bnjhd->bnhij", query, key) / query.shape[-1] ** 0.5
    if mask_bias is not None:
        scores = scores + mask_bias[:, :, None, None, :]
    if pair_bias is not None:
        scores = scores + pair_bias[:, None]
    return scores


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, mask_bias, pair_bias)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)  # a query that may attend to nothing
    weights = torch.where(nothing, 0.0, torch.softmax(torch.where(nothing, 0.0, scores), dim=-1))
    return torch.einsum("bnhij,bnjhd->bnihd", weights, value), torch.logsumexp(scores, dim=-1)


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    mask_bias: Tensor | None,
    pair_bias: Tensor | None,
    mask_grad: bool,
    pair_grad: bool,
) -> tuple[Tensor, ...]:
    """From what the forward gave: autograd would not see how that was rounded."""
    scores = _scores(query, key, mask_bias, pair_bias)
    nothing = (logsumexp == -torch.inf).unsqueeze(-1)
    weights = torch.where(nothing, 0.0, torch.exp(scores - logsumexp.unsqueeze(-1)))
    of_weights = torch.einsum("bnihd,bnjhd->bnhij", grad, value)
    along = torch.einsum("bnihd,bnihd->bnhi", grad, output).unsqueeze(-1)
    of_scores = torch.where(nothing, 0.0, weights * (of_weights - along))
    scale = query.shape[-1] ** -0.5
    return (
        torch.einsum("bnhij,bnjhd->bnihd", of_scores, key) * scale,
        torch.einsum("bnhij,bnihd->bnjhd", of_scores, query) * scale,
        torch.einsum("bnhij,bnihd->bnjhd", weights, grad),
        *((of_scores.sum(dim=(2, 3)),) if mask_grad else ()),
        *((of_scores.sum(dim=1),) if pair_grad else ()),
    )


def _call(make: Make, shape: tuple[int, ...], mask: bool, pair: bool) -> dict[str, Any]:
    batch, rows, tokens, heads, head_dim = shape
    named = {name: make.normal(batch, rows, tokens, heads, head_dim) for name in ("query", "key", "value")}
    mask_bias = make.normal(batch, rows, tokens) if mask else None
    pair_bias = make.normal(batch, heads, tokens, tokens) if pair else None
    return {**named, "mask_bias": mask_bias, "pair_bias": pair_bias}


def _calls(make: Make) -> Iterator[tuple[str, Kind, dict[str, Any]]]:
    call = functools.partial(_call, make)
    yield "no rows", "empty", call((1, 0, 4, 2, 8), True, True)
    yield "no tokens", "empty", call((1, 2, 0, 2, 8), True, True)
    for shape in _SHAPES:
        one_of_all = shape == _SHAPES[1]
        for mask, pair in ((True, True), *(((False, False), (True, False), (False, True)) if one_of_all else ())):
            yield f"{shape}, {mask=}, {pair=}", "adversarial", call(shape, mask, pair)
    masked = call((2, 3, 20, 2, 16), True, True)
    masked["mask_bias"][0, :, :7] = -torch.inf
    masked["mask_bias"][1, 2] = -torch.inf  # a row that may attend to nothing
    yield "masked", "adversarial", masked
    large = call((1, 2, 20, 2, 16), True, True)
    large["pair_bias"] = large["pair_bias"] * 300
    yield "large scores", "adversarial", large
    yield "an alignment of 128 tokens", "real", call(_REAL, True, True)


# Rows, and tokens, beyond the limits of a launch.
_LARGE = ((1, MANY_ROWS, 2, 1, 2), (1, 1, 1100, 1, 4))


def _large(make: Make) -> Iterator[Sample]:
    yield from (Sample(f"{shape}", _call(make, shape, True, True), "adversarial") for shape in _LARGE)


def _large_backward(make: Make) -> Iterator[Sample]:
    for shape in _LARGE:
        yield Sample(f"{shape}", _of_backward(make, _call(make, shape, True, True)), "adversarial")


def _forward_samples(make: Make) -> Iterator[Sample]:
    for label, kind, arguments in _calls(make):
        yield Sample(label, arguments, kind)


def _backward_samples(make: Make) -> Iterator[Sample]:
    for label, kind, arguments in _calls(make):
        sample = Sample(label, _of_backward(make, arguments), kind)
        yield sample
        if label == "masked":
            for name in ("mask_grad", "pair_grad"):
                yield Sample(f"{label}, without {name}", {**sample.arguments, name: False}, kind)


def _of_backward(make: Make, arguments: Mapping[str, Any]) -> dict[str, Any]:
    exact: Any = {name: None if tensor is None else tensor.double() for name, tensor in arguments.items()}
    output, logsumexp = _forward(**exact)
    return {
        "grad": make.normal(*output.shape),
        "query": arguments["query"],
        "key": arguments["key"],
        "value": arguments["value"],
        "output": output.to(make.dtype),
        "logsumexp": logsumexp.float(),
        "mask_bias": arguments["mask_bias"],
        "pair_bias": arguments["pair_bias"],
        "mask_grad": arguments["mask_bias"] is not None,
        "pair_grad": arguments["pair_bias"] is not None,
    }


def _random(make: Make) -> dict[str, Any]:
    shape = (make.size(3), make.size(4), make.size(90), make.size(4), make.pick(1, 4, 8, 16, 33, 64))
    return _call(make, shape, make.chance(), make.chance())


def _random_backward(make: Make) -> dict[str, Any]:
    return _of_backward(make, _random(make))


def _outputs_of_backward(**arguments: Any) -> tuple[Tensor, ...]:
    return tuple(each for each in evoformer_attn.evoformer_attention_backward(**arguments) if each is not None)


def _schema_arguments(arguments: Mapping[str, Any]) -> Sequence[Any]:
    return list(arguments.values())


_RTOL = {torch.float32: 2e-5, torch.bfloat16: 2**-8 + 2e-5, torch.float16: 2**-11 + 2e-5}

OPS = (
    OpInfo(
        name="evoformer_attention",
        family="evoformer_attn",
        function=evoformer_attn.evoformer_attention,
        formula=_forward,
        samples=_forward_samples,
        random=_random,
        large=_large,
        schema_arguments=_schema_arguments,
        # Means of up to 128 values of size one, of scores that are sums of 64 products.
        rtol=_RTOL,
        atol=dict.fromkeys(_RTOL, 2e-5),
    ),
    OpInfo(
        name="evoformer_attention_backward",
        family="evoformer_attn",
        function=_outputs_of_backward,
        formula=_backward,
        samples=_backward_samples,
        random=_random_backward,
        large=_large_backward,
        schema_arguments=_schema_arguments,
        # Sums of up to 128 terms of size one, and as many rows and heads.
        rtol=_RTOL,
        atol=dict.fromkeys(_RTOL, 2e-4),
    ),
)
