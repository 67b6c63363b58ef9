"""Random layerwise token dropping: elements are moved, so results are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance.op_info.op_info import MANY_COLUMNS, MANY_ROWS, Kind, Make, OpInfo, Sample
from ds_plugin_sdk.ops import random_ltd

_EXACT = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}

# (batch, sequence, reserved, channels)
_SIZES: dict[str, tuple[Kind, tuple[int, int, int, int]]] = {
    "empty": ("empty", (2, 5, 0, 3)),
    "one token": ("adversarial", (1, 1, 1, 1)),
    "all tokens": ("adversarial", (2, 7, 7, 5)),
    "odd": ("adversarial", (3, 33, 17, 131)),
    "bert large": ("real", (2, 512, 128, 1024)),
}


# ---- formulas --------------------------------------------------------------------------------------------------------
def _sort(*, indices: Tensor, seq_len: int) -> tuple[Tensor]:
    rows = [sorted(row) for row in indices.reshape(-1, indices.shape[-1]).tolist()] if indices.numel() else []
    return (torch.tensor(rows, dtype=indices.dtype).reshape(indices.shape),)


def _gather(*, activations: Tensor, indices: Tensor, batch_first: bool) -> tuple[Tensor]:
    x = activations if batch_first else activations.transpose(0, 1)
    rows = x.gather(1, indices.long().unsqueeze(-1).expand(*indices.shape, x.shape[2]))
    return (rows if batch_first else rows.transpose(0, 1),)


def _scatter(
    *, all_activations: Tensor, layer_activations: Tensor, indices: Tensor, batch_first: bool
) -> tuple[Tensor]:
    result = all_activations.clone()
    view = result if batch_first else result.transpose(0, 1)
    tokens = layer_activations if batch_first else layer_activations.transpose(0, 1)
    for b, row in enumerate(indices.tolist()):
        for i, token in enumerate(row):
            view[b, token] = tokens[b, i]
    return (result,)


def _bert(*, mask: Tensor, indices: Tensor) -> tuple[Tensor]:
    """Of each layer and sequence the rows and columns that are left."""
    layers, batch, reserved = indices.shape
    result = mask.new_empty(layers, batch, 1, reserved, reserved)
    for number, layer in enumerate(indices.long()):
        for b, row in enumerate(layer):
            result[number, b] = mask[b, :, row][:, :, row]
    return (result,)


def _gpt(*, mask: Tensor, reserved: int) -> tuple[Tensor]:
    return (mask[:, :, :reserved, :reserved],)


# ---- samples ---------------------------------------------------------------------------------------------------------
def _indices(make: Make, *shape: int, sequence: int) -> Tensor:
    """Different tokens in each row, in no order."""
    *rows, reserved = shape
    order = torch.rand(*rows, sequence, generator=make.generator).argsort(dim=-1)
    return order[..., :reserved].to(torch.int32)


def _sort_samples(make: Make) -> Iterator[Sample]:
    for label, (kind, (batch, sequence, reserved, _)) in _SIZES.items():
        if label == "one token":
            yield Sample("two tokens", {"indices": torch.tensor([[1, 0]], dtype=torch.int32), "seq_len": 2}, kind)
            continue
        indices = _indices(make, 3, batch, reserved, sequence=sequence)
        if label == "odd":
            indices[0, 0] = 32  # one token again and again
        yield Sample(label, {"indices": indices, "seq_len": sequence}, kind)


def _gather_samples(make: Make) -> Iterator[Sample]:
    for label, (kind, (batch, sequence, reserved, channels)) in _SIZES.items():
        indices = _indices(make, batch, reserved, sequence=sequence)
        for name, shape in _orders(batch, sequence, channels).items():
            arguments = {"activations": make.normal(*shape), "indices": indices, "batch_first": name == "batch first"}
            yield Sample(f"{label}, {name}", arguments, kind)
            if label == "odd":
                wide = make.integers(-(2**60), 2**60, *shape)
                yield Sample(f"{label}, {name}, int64", {**arguments, "activations": wide}, kind)


def _scatter_samples(make: Make) -> Iterator[Sample]:
    for label, (kind, (batch, sequence, reserved, channels)) in _SIZES.items():
        indices = _indices(make, batch, reserved, sequence=sequence)
        chosen = _orders(batch, reserved, channels)
        for name, shape in _orders(batch, sequence, channels).items():
            arguments = {
                "all_activations": make.normal(*shape),
                "layer_activations": make.normal(*chosen[name]),
                "indices": indices,
                "batch_first": name == "batch first",
            }
            yield Sample(f"{label}, {name}", arguments, kind)


def _bert_samples(make: Make) -> Iterator[Sample]:
    for label, (kind, (batch, sequence, reserved, _)) in _SIZES.items():
        indices = _indices(make, 2, batch, reserved, sequence=sequence)
        yield Sample(label, {"mask": make.normal(batch, 1, sequence, sequence), "indices": indices}, kind)
        if label == "odd":
            allowed = make.integers(0, 2, batch, 1, sequence, sequence) > 0
            yield Sample(f"{label}, bool", {"mask": allowed, "indices": indices}, kind)


def _gpt_samples(make: Make) -> Iterator[Sample]:
    for label, (kind, (batch, sequence, reserved, _)) in _SIZES.items():
        yield Sample(label, {"mask": make.normal(batch, 1, sequence, sequence), "reserved": reserved}, kind)


# ---- beyond a launch -------------------------------------------------------------------------------------------------
_LARGE = ((MANY_ROWS, 3, 2, 1), (2, 1500, 1300, 3), (2, 3, 2, MANY_COLUMNS))


def _large_sort(make: Make) -> Iterator[Sample]:
    for batch, sequence, reserved, _ in _LARGE[:2]:
        indices = _indices(make, 1, batch, reserved, sequence=sequence)
        yield Sample(f"{batch} rows of {reserved}", {"indices": indices, "seq_len": sequence}, "adversarial")


def _large_gather(make: Make) -> Iterator[Sample]:
    for batch, sequence, reserved, channels in _LARGE:
        arguments = {
            "activations": make.normal(batch, sequence, channels),
            "indices": _indices(make, batch, reserved, sequence=sequence),
            "batch_first": True,
        }
        yield Sample(f"{[batch, sequence, channels]}", arguments, "adversarial")


def _large_scatter(make: Make) -> Iterator[Sample]:
    for batch, sequence, reserved, channels in _LARGE:
        arguments = {
            "all_activations": make.normal(batch, sequence, channels),
            "layer_activations": make.normal(batch, reserved, channels),
            "indices": _indices(make, batch, reserved, sequence=sequence),
            "batch_first": True,
        }
        yield Sample(f"{[batch, sequence, channels]}", arguments, "adversarial")


def _large_bert(make: Make) -> Iterator[Sample]:
    for batch, sequence, reserved in ((MANY_ROWS, 3, 2), (1, 1200, 1100)):
        indices = _indices(make, 1, batch, reserved, sequence=sequence)
        mask = make.normal(batch, 1, sequence, sequence)
        yield Sample(f"{batch} of {sequence}", {"mask": mask, "indices": indices}, "adversarial")


def _large_gpt(make: Make) -> Iterator[Sample]:
    for batch, sequence, reserved in ((MANY_ROWS, 3, 2), (1, 1200, 1100)):
        mask = make.normal(batch, 1, sequence, sequence)
        yield Sample(f"{batch} of {sequence}", {"mask": mask, "reserved": reserved}, "adversarial")


# ---- random calls ----------------------------------------------------------------------------------------------------
def _random_sizes(make: Make) -> tuple[int, int, int]:
    """Batch, sequence, reserved."""
    sequence = make.size(300)
    return make.size(5), sequence, min(make.size(300), sequence)


def _random_sort(make: Make) -> Mapping[str, Any]:
    batch, sequence, reserved = _random_sizes(make)
    if make.chance():
        return {"indices": _indices(make, make.size(3), batch, reserved, sequence=sequence), "seq_len": sequence}
    # Tokens may repeat.
    indices = make.integers(0, max(sequence, 1), batch, reserved if sequence else 0, dtype=torch.int32)
    return {"indices": indices, "seq_len": sequence}


def _random_tokens(make: Make) -> Mapping[str, Any]:
    batch, sequence, reserved = _random_sizes(make)
    order, channels = make.pick("batch first", "sequence first"), make.size(200)
    return {
        "activations": make.normal(*_orders(batch, sequence, channels)[order]),
        "all_activations": make.normal(*_orders(batch, sequence, channels)[order]),
        "layer_activations": make.normal(*_orders(batch, reserved, channels)[order]),
        "indices": _indices(make, batch, reserved, sequence=sequence),
        "batch_first": order == "batch first",
    }


def _random_gather(make: Make) -> Mapping[str, Any]:
    tokens = _random_tokens(make)
    return {name: tokens[name] for name in ("activations", "indices", "batch_first")}


def _random_scatter(make: Make) -> Mapping[str, Any]:
    tokens = _random_tokens(make)
    return {name: tokens[name] for name in ("all_activations", "layer_activations", "indices", "batch_first")}


def _random_bert(make: Make) -> Mapping[str, Any]:
    batch, sequence, reserved = _random_sizes(make)
    indices = _indices(make, make.size(3), batch, reserved, sequence=sequence)
    return {"mask": make.normal(batch, 1, sequence, sequence), "indices": indices}


def _random_gpt(make: Make) -> Mapping[str, Any]:
    batch, sequence, reserved = _random_sizes(make)
    return {"mask": make.normal(batch, 1, sequence, sequence), "reserved": reserved}


def _orders(batch: int, sequence: int, channels: int) -> dict[str, tuple[int, int, int]]:
    return {"batch first": (batch, sequence, channels), "sequence first": (sequence, batch, channels)}


def _tokens_of(name: str) -> Callable[[Mapping[str, Any]], int]:
    return lambda arguments: int(arguments[name].shape[1 if arguments["batch_first"] else 0])


OPS = (
    OpInfo(
        name="token_sort_",
        family="random_ltd",
        function=random_ltd.token_sort_,
        formula=_sort,
        samples=_sort_samples,
        random=_random_sort,
        large=_large_sort,
        indices={"indices": lambda arguments: arguments["seq_len"]},
        written=("indices",),
    ),
    OpInfo(
        name="token_gather",
        family="random_ltd",
        function=random_ltd.token_gather,
        formula=_gather,
        samples=_gather_samples,
        random=_random_gather,
        large=_large_gather,
        indices={"indices": _tokens_of("activations")},
        differentiable=("activations",),
        rtol=_EXACT,
        atol=_EXACT,
        broadcasts=("activations", "indices"),
        any_dtype=("activations",),
    ),
    OpInfo(
        name="token_scatter_",
        family="random_ltd",
        function=random_ltd.token_scatter_,
        formula=_scatter,
        samples=_scatter_samples,
        random=_random_scatter,
        large=_large_scatter,
        indices={"indices": _tokens_of("all_activations")},
        written=("all_activations",),
        rtol=_EXACT,
        atol=_EXACT,
    ),
    OpInfo(
        name="mask_gather_bert",
        family="random_ltd",
        function=random_ltd.mask_gather_bert,
        formula=_bert,
        samples=_bert_samples,
        random=_random_bert,
        large=_large_bert,
        indices={"indices": lambda arguments: arguments["mask"].shape[-1]},
        rtol=_EXACT,
        atol=_EXACT,
        broadcasts=("indices",),
        any_dtype=("mask",),
    ),
    OpInfo(
        name="mask_gather_gpt",
        family="random_ltd",
        function=random_ltd.mask_gather_gpt,
        formula=_gpt,
        samples=_gpt_samples,
        random=_random_gpt,
        large=_large_gpt,
        rtol=_EXACT,
        atol=_EXACT,
        any_dtype=("mask",),
        plain=True,
    ),
)
