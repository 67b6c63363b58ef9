"""Additions to a residual, and the small matrix ops of DeepSpeed's inference module."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import MANY_COLUMNS, MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import residual as ops

# Around every vector width; more than one share of work.
_SHAPES = ((1, 1), (2, 3), (3, 15), (2, 16), (2, 17), (3, 2, 65), (70, 257))


# ---- residual_add_bias_ and moe_res_matmul_ --------------------------------------------------------------------------
def _residual_add_bias(
    residual: Tensor,
    hidden: Tensor,
    attention: Tensor | None,
    attention_bias: Tensor | None,
    final_bias: Tensor | None,
    scale: float,
    scale_attention: bool,
) -> tuple[Tensor]:
    zero = torch.zeros((), dtype=residual.dtype)
    a, ab, fb = (zero if term is None else term for term in (attention, attention_bias, final_bias))
    scaled = residual + ab + fb + (a if scale_attention else zero)
    return (hidden + scale * scaled + (zero if scale_attention else a),)


_TERMS = ("attention", "attention_bias", "final_bias")


_LARGE = ((MANY_ROWS, 3), (3, MANY_COLUMNS))


def _residual_sample(
    make: Make, label: str, kind: Kind, shape: tuple[int, ...], omit: tuple[str, ...] = (), **options: Any
) -> Sample:
    shapes = {"residual": shape, "hidden": shape, "attention": shape}
    shapes |= {"attention_bias": shape[-1:], "final_bias": shape[-1:]}
    tensors = {name: None if name in omit else make.signed(*size) for name, size in shapes.items()}
    return Sample(label, {**tensors, "scale": 1.0, "scale_attention": False, **options}, kind)


def _large_residual(make: Make) -> Iterator[Sample]:
    for shape in _LARGE:
        yield _residual_sample(make, f"{list(shape)}", "adversarial", shape, scale=0.5)


def _residual_samples(make: Make) -> Iterator[Sample]:
    sample = functools.partial(_residual_sample, make)
    yield sample("no rows", "empty", (0, 16))
    for shape in _SHAPES:
        yield sample(f"shape {list(shape)}", "adversarial", shape, scale=0.25, scale_attention=True)
    for omit in ((), *((term,) for term in _TERMS), _TERMS):
        for scale_attention in (False, True):
            label = f"without {', '.join(omit) or 'nothing'}, {'all' if scale_attention else 'not all'} scaled"
            yield sample(label, "random", (3, 40), omit, scale=0.5, scale_attention=scale_attention)
    yield sample("gpt2", "real", (2, 7, 768), scale=0.5, scale_attention=True)


def _random_residual(make: Make) -> Mapping[str, Any]:
    shape = make.shape()
    terms = {"attention": shape, "attention_bias": shape[-1:], "final_bias": shape[-1:]}
    return {
        "residual": make.signed(*shape),
        "hidden": make.signed(*shape),
        **{name: make.signed(*size) if make.chance() else None for name, size in terms.items()},
        "scale": make.pick(1.0, 0.5, 1 / 3),
        "scale_attention": make.chance(),
    }


def _moe_res_matmul(output: Tensor, residual: Tensor, coefficients: Tensor) -> tuple[Tensor]:
    of_residual, of_output = coefficients.chunk(2)
    return (output * of_output + residual * of_residual,)


def _moe_sample(make: Make, label: str, kind: Kind, shape: tuple[int, ...]) -> Sample:
    output, residual = make.signed(*shape), make.signed(*shape)
    return Sample(label, {"output": output, "residual": residual, "coefficients": make.signed(2 * shape[-1])}, kind)


def _large_moe(make: Make) -> Iterator[Sample]:
    for shape in _LARGE:
        yield _moe_sample(make, f"{list(shape)}", "adversarial", shape)


def _moe_samples(make: Make) -> Iterator[Sample]:
    sample = functools.partial(_moe_sample, make)
    yield sample("no rows", "empty", (0, 16))
    for shape in _SHAPES:
        yield sample(f"shape {list(shape)}", "adversarial", shape)
    yield sample("hidden size 1024", "real", (2, 9, 1024))


def _random_moe(make: Make) -> Mapping[str, Any]:
    shape = make.shape()
    tensors = {"output": make.signed(*shape), "residual": make.signed(*shape)}
    return {**tensors, "coefficients": make.signed(2 * shape[-1])}


# ---- einsum_sec_sm_ecm and pad_transform -----------------------------------------------------------------------------
def _einsum(dispatch: Tensor, tokens: Tensor) -> tuple[Tensor]:
    return (torch.einsum("sec,sm->ecm", dispatch, tokens),)


def _einsum_samples(make: Make) -> Iterator[Sample]:
    sizes = {"random": (7, 2, 3, 5), "adversarial": (1, 1, 1, 1), "real": (64, 8, 16, 256)}
    yield Sample("no tokens", {"dispatch": make.normal(0, 2, 3), "tokens": make.normal(0, 4)}, "empty")
    for kind, (s, e, c, m) in sizes.items():
        arguments = {"dispatch": make.normal(s, e, c), "tokens": make.normal(s, m)}
        yield Sample(f"{s} tokens", arguments, kind)  # type: ignore[arg-type]  # each key above is a kind


def _large_einsum(make: Make) -> Iterator[Sample]:
    for s, e, c, m in ((1500, 2, 3, 5), (3, 2, 3, MANY_COLUMNS), (2, 1500, 2, 2)):
        arguments = {"dispatch": make.normal(s, e, c), "tokens": make.normal(s, m)}
        yield Sample(f"{[s, e, c, m]}", arguments, "adversarial")


def _random_einsum(make: Make) -> Mapping[str, Any]:
    s, e, c, m = make.size(40), make.size(9), make.size(20), make.size(70)
    return {"dispatch": make.normal(s, e, c), "tokens": make.normal(s, m)}


def _pad_transform(query: Tensor, key: Tensor, value: Tensor, heads: int, pad: bool) -> tuple[list[Tensor]]:
    results = []
    for tensor, keys in ((query, False), (key, True), (value, True)):
        batch, tokens, width = tensor.shape
        split = tensor.reshape(batch, tokens, heads, width // heads).transpose(1, 2)
        length, head_dim = (128 if keys and pad else tokens), width // heads
        if pad:
            head_dim = 32 if head_dim < 32 else 64 if head_dim < 64 else 128
        padded = tensor.new_zeros(batch, heads, length, head_dim)
        padded[:, :, :tokens, : split.shape[3]] = split
        results.append(padded)
    return (results,)


def _pad_sample(
    make: Make, label: str, kind: Kind, batch: int, queries: int, keys: int, heads: int, head_dim: int, pad: bool
) -> Sample:
    width = heads * head_dim
    tensors = {"query": make.normal(batch, queries, width)}
    tensors |= {name: make.normal(batch, keys, width) for name in ("key", "value")}
    return Sample(label, {**tensors, "heads": heads, "pad": pad}, kind)


def _large_pad(make: Make) -> Iterator[Sample]:
    yield _pad_sample(make, f"{MANY_ROWS} heads", "adversarial", MANY_ROWS // 3, 1, 1, 3, 2, False)


def _pad_samples(make: Make) -> Iterator[Sample]:
    sample = functools.partial(_pad_sample, make)
    yield sample("an empty batch", "empty", 0, 3, 4, 2, 8, False)
    yield sample("not padded", "random", 2, 3, 4, 2, 8, False)
    for head_dim in (1, 31, 32, 40, 64, 128):
        yield sample(f"heads of {head_dim}", "adversarial", 2, 5, 7, 3, head_dim, True)
    yield sample("clip", "real", 2, 77, 77, 8, 40, True)


def _random_pad(make: Make) -> Mapping[str, Any]:
    batch, queries, keys, heads, head_dim = (make.size(largest) for largest in (4, 100, 128, 6, 128))
    heads = max(heads, 1)
    tensors = {"query": make.normal(batch, queries, heads * head_dim)}
    tensors |= {name: make.normal(batch, keys, heads * head_dim) for name in ("key", "value")}
    return {**tensors, "heads": heads, "pad": make.chance()}


_RESIDUAL = OpInfo(
    name="residual_add_bias_",
    family="residual",
    function=ops.residual_add_bias_,
    formula=_residual_add_bias,
    samples=_residual_samples,
    random=_random_residual,
    large=_large_residual,
    written=("residual",),
    # A sum of terms of size 2 each.
    atol={torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6},
)

OPS = (
    _RESIDUAL,
    dataclasses.replace(
        _RESIDUAL,
        name="moe_res_matmul_",
        function=ops.moe_res_matmul_,
        formula=_moe_res_matmul,
        samples=_moe_samples,
        random=_random_moe,
        large=_large_moe,
        written=("output",),
    ),
    OpInfo(
        name="einsum_sec_sm_ecm",
        family="residual",
        function=ops.einsum_sec_sm_ecm,
        formula=_einsum,
        samples=_einsum_samples,
        random=_random_einsum,
        large=_large_einsum,
        # torch's own matrix product, which may round its sums' parts.
        atol={torch.float32: 2e-5, torch.bfloat16: 2e-3, torch.float16: 2e-3},
        broadcasts=("dispatch", "tokens"),  # capacity and width belong to one of them alone
        plain=True,
    ),
    OpInfo(
        name="pad_transform",
        family="residual",
        function=ops.pad_transform,
        formula=_pad_transform,
        samples=_pad_samples,
        random=_random_pad,
        large=_large_pad,
        plain=True,
    ),
)
