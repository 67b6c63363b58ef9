"""A decoder layer as eight calls of ops, or several as one that makes them, whatever model they come from."""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_plugin_sdk.integrations.transformers.as_found import AsFound
from ds_plugin_sdk.integrations.transformers.understood import Norm
from ds_plugin_sdk.integrations.transformers.weights import Contents, Matrix
from ds_plugin_sdk.ops import decoder_layer
from ds_plugin_sdk.ops.linear import ACTIVATIONS, Activation

# As `ds_plugin_sdk.ops.linear` counts them.
_IDENTITY = ACTIVATIONS.index("identity")


class Turn(enum.IntEnum):
    """Which elements of a head are turned together: none, the i-th of both halves, or neighbours."""

    NONE, HALVES, PAIRS = range(3)


@dataclass(frozen=True)
class Decoder:
    """What a decoder layer consists of.

    Attributes:
        attention_norm, mlp_norm: before attention and MLP, or None; after their sums with the residual if not
            `norm_first`.
        qkv: queries, keys and values in one.
        qkv_by_head: whether a head's query, key and value are next to each other; else those of all heads are.
        heads, kv_heads, head_dim: of them.
        query_norm, key_norm: of each head, or of all heads of a token as one if they have as many weights; or None.
        attention_post_norm, mlp_post_norm: of what attention and MLP put out, before the residual is added; or None.
        multiplier: of the same, after these norms.
        scale: of the scores.
        output: after attention.
        parallel: whether the MLP is given the input that attention has, normed by `mlp_norm` instead if there is
            one; else the sum that attention makes.
        mlp_in: up and, if `gated`, gate.
        activation: in between.
        gate_first: whether the gate is before up, so that it is applied after their product, not within.
        rotary: whether it is given angles of positions.
        rotary_in_part: whether these may turn the front of a head alone.
        turn: how they turn queries and keys.
        mlp_out: down.
    """

    attention_norm: Norm | None
    mlp_norm: Norm | None
    qkv: Matrix
    output: Matrix
    mlp_in: Matrix
    mlp_out: Matrix
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    activation: Activation
    gated: bool = False
    gate_first: bool = False
    rotary: bool = False
    rotary_in_part: bool = False
    turn: Turn = Turn.HALVES
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    norm_first: bool = True
    qkv_by_head: bool = False
    parallel: bool = False
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    multiplier: float = 1.0

    @functools.cached_property
    def activation_index(self) -> int:
        return ACTIVATIONS.index(self.activation)

    @functools.cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.output, self.mlp_in, self.mlp_out

    @functools.cached_property
    def is_one_call(self) -> bool:
        """Whether `run_whole` knows all that it consists of."""
        return all(matrix.order is None for matrix in self.matrices)

    @property
    def is_rounded(self) -> bool:
        """Whether it is for inference: `Matrix.rounded` says why."""
        return any(matrix.rounded for matrix in self.matrices)

    @property
    def has_its_heads(self) -> bool:
        """Whether the first product still makes as many as are attended with: heads may be pruned."""
        return self.qkv.contents.weight.shape[0] == (self.heads + 2 * self.kv_heads) * self.head_dim

    @functools.cached_property
    def norms(self) -> tuple[Norm, ...]:
        found = (
            *(self.attention_norm, self.attention_post_norm, self.mlp_norm, self.mlp_post_norm),
            *(self.query_norm, self.key_norm),
        )
        return tuple(norm for norm in found if norm is not None)


# Appends keys and values and attends: (query, key, value) -> [batch, heads, tokens, head_dim].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def run(ops: Ops, layer: Decoder, hidden: Tensor, angles: tuple[Tensor, Tensor] | None, attend: Attend) -> Tensor:
    """The layer's output.

    Args:
        ops: what `ops_for` gives.
        hidden: ``[batch, tokens, hidden]``.
        angles: cosine and sine as `ds_plugin_sdk.ops.rotary` takes them, or None.
        attend: attention with the cache.
    """
    normed = norm(ops, layer.attention_norm if layer.norm_first else None, hidden)
    attended = _attention(ops, layer, normed, angles, attend)
    total = _added(ops, layer, layer.output, layer.attention_post_norm, attended, hidden)
    if not layer.norm_first:
        total = norm(ops, layer.attention_norm, total)
    if not layer.parallel:
        normed = norm(ops, layer.mlp_norm if layer.norm_first else None, total)
    elif layer.mlp_norm is not None:
        normed = norm(ops, layer.mlp_norm, hidden)
    if layer.gate_first:
        gate, up = linear(ops, layer.mlp_in, normed).chunk(2, dim=-1)
        inner = ops.activation_and_mul(gate, up, layer.activation_index)
    else:
        inner = linear(ops, layer.mlp_in, normed, None, layer.activation_index, layer.gated)
    total = _added(ops, layer, layer.mlp_out, layer.mlp_post_norm, inner, total)
    return total if layer.norm_first else norm(ops, layer.mlp_norm, total)


def _added(ops: Ops, layer: Decoder, matrix: Matrix, post_norm: Norm | None, input: Tensor, residual: Tensor) -> Tensor:
    if post_norm is None and layer.multiplier == 1.0:
        return linear(ops, matrix, input, residual)
    added = norm(ops, post_norm, linear(ops, matrix, input))
    if layer.multiplier == 1.0:
        return residual + added
    # torch's sum with a factor rounds that to the tensors' dtype.
    ops.residual_add_bias_(added, residual, None, None, None, layer.multiplier, False)
    return added


def _attention(
    ops: Ops, layer: Decoder, hidden: Tensor, angles: tuple[Tensor, Tensor] | None, attend: Attend
) -> Tensor:
    heads, kv_heads, head_dim = layer.heads, layer.kv_heads, layer.head_dim
    batch, tokens, _ = hidden.shape
    every = heads + 2 * kv_heads
    qkv = linear(ops, layer.qkv, hidden)
    # One token's heads lie as the op wants them; views take Python longer than they seem to.
    qkv = (
        qkv.view(batch, every, 1, head_dim) if tokens == 1 else qkv.view(batch, tokens, every, head_dim).transpose(1, 2)
    )
    turned = None if layer.turn == Turn.NONE or angles is None else (*angles, layer.turn == Turn.PAIRS)
    turned_apart = layer.query_norm is not None or layer.qkv_by_head
    if turned is not None and not turned_apart:
        ops.rotary_(qkv.narrow(1, 0, heads + kv_heads), *turned)
    if layer.qkv_by_head:
        query, key, value = qkv[:, ::3], qkv[:, 1::3], qkv[:, 2::3]
    else:
        query, key, value = torch.split_with_sizes(qkv, (heads, kv_heads, kv_heads), 1)
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = _normed_heads(ops, layer.query_norm, query), _normed_heads(ops, layer.key_norm, key)
    if turned is not None and turned_apart:
        ops.rotary_(query, *turned)
        ops.rotary_(key, *turned)
    attended = attend(query, key, value)
    if tokens > 1:
        attended = attended.transpose(1, 2)
    return attended.reshape(batch, tokens, heads * head_dim)


def _normed_heads(ops: Ops, of: Norm, heads: Tensor) -> Tensor:
    """Heads, ``[batch, heads, tokens, head_dim]``, each normed, or those of a token as one."""
    batch, count, tokens, head_dim = heads.shape
    if of.columns == head_dim:
        return norm(ops, of, heads)
    as_one = heads.transpose(1, 2).reshape(batch, tokens, count * head_dim)
    return norm(ops, of, as_one).view(batch, tokens, count, head_dim).transpose(1, 2)


def linear(
    ops: Ops,
    matrix: Matrix,
    input: Tensor,
    residual: Tensor | None = None,
    activation: int = _IDENTITY,
    gated: bool = False,
) -> Tensor:
    # An input of another size is for the op, which says so; gathered, it could seem to fit.
    if matrix.order is not None and input.shape[-1] == matrix.order.numel():
        input = input.index_select(-1, matrix.order)
    result: Tensor = ops.linear(input, *matrix.contents, residual, activation, gated)
    return result


def product(ops: Ops, contents: Contents, input: Tensor) -> Tensor:
    """A linear layer and nothing else."""
    result: Tensor = ops.linear(input, *contents, None, _IDENTITY, False)
    return result


def norm(ops: Ops, norm: Norm | None, input: Tensor) -> Tensor:
    if norm is None:
        return input
    result: Tensor = (
        ops.rms_norm(input, norm.parameters["weight"], norm.eps, norm.weight_offset)
        if norm.rms
        else ops.layer_norm(input, norm.parameters["weight"], norm.parameters["bias"], norm.eps)
    )
    return result


# A mask as `ds_plugin_sdk.ops.attention.cached_attention` takes it, causal if None; and cosine and sine, or None.
MaskAndAngles = tuple[Tensor | None, tuple[Tensor, Tensor] | None]


def run_whole(
    layers: Layers,
    hidden: Tensor,
    caches: Sequence[Tensor],
    past: Iterable[int],
    given: Sequence[MaskAndAngles],
    kinds: Iterable[int],
    functions: int,
) -> list[Tensor]:
    """What each layer puts out, run one after the other by one call; each `is_one_call`.

    Args:
        caches: what `make_room` has given for the new keys and values of each layer, one after the other.
        past: how many positions those of each layer hold.
        given: to layers of each kind.
        kinds: of each layer.
        functions: what `functions_for` gave in this step.
    """
    tensors: list[Tensor] = []
    places = [(_put(tensors, mask), _put(tensors, *(angles or ()))) for mask, angles in given]
    which = [number for held, kind in zip(past, kinds, strict=True) for number in (held, *places[kind])]
    results: list[Tensor] = decoder_layer.call(hidden, caches, tensors, which, functions, *layers.arguments())
    return results


def _put(tensors: list[Tensor], *more: Tensor | None) -> int:
    """Where the first of some is from now on; -1 if there is none."""
    place = len(tensors)
    tensors.extend(tensor for tensor in more if tensor is not None)
    return place if len(tensors) > place else -1


class _Arguments(NamedTuple):
    """What ``ds_plugin_calls::decoder_layers`` takes: all that each layer has, layer after layer."""

    tensors: list[Tensor]
    integers: list[int]
    numbers: list[float]


class Layers:
    """Layers for `run_whole`."""

    def __init__(self, *layers: Decoder) -> None:
        self._layers = layers
        self._made: tuple[AsFound, _Arguments] | None = None

    def arguments(self) -> _Arguments:
        """With the parameters that they have now."""
        made = self._made
        if made is None or not made[0].holds():
            made = self._made = AsFound(named=self._read()), _arguments_of(self._layers)
        return made[1]

    def _read(self) -> Iterator[tuple[dict[str, Any], str, object]]:
        """What arguments are made of: what was packed, and norms' parameters."""
        for layer in self._layers:
            for matrix in layer.matrices:
                yield vars(matrix), "contents", matrix.contents
            for place in [place for norm in layer.norms for place in norm.places()]:
                yield place.owner, place.name, place.tensor


def _arguments_of(layers: Sequence[Decoder]) -> _Arguments:
    found = _Arguments([], [], [])
    for layer in layers:
        norms = (
            *(layer.attention_norm, layer.mlp_norm, layer.query_norm, layer.key_norm),
            *(layer.attention_post_norm, layer.mlp_post_norm),
        )
        of_norms = [(None, None, 0.0, 0.0) if norm is None else norm.arguments() for norm in norms]
        tensors = [tensor for weight, bias, _, _ in of_norms for tensor in (weight, bias)]
        tensors += [tensor for matrix in layer.matrices for tensor in matrix.contents]
        present = sum(1 << index for index, tensor in enumerate(tensors) if tensor is not None)
        found.tensors.extend(tensor for tensor in tensors if tensor is not None)
        gate = layer.gated + layer.gate_first
        order = layer.norm_first, layer.qkv_by_head, layer.parallel
        found.integers.extend((present, layer.heads, layer.activation_index, gate, layer.turn, *order))
        found.numbers.extend((*(number for norm in of_norms for number in norm[2:]), layer.scale, layer.multiplier))
    return found


def functions_for(hidden: Tensor) -> int | None:
    """What `run_whole` calls with hidden states; None if it does not serve them.

    Whether others have registered kernels is asked with each prompt, and in steps after it where it is likely.
    """
    if decoder_layer.call is None or hidden.dtype == torch.float64:
        return None
    return decoder_layer.functions(look=hidden.shape[1] > 1)


class Ops(NamedTuple):
    """The ops that layers call, as torch's functions in C: a step of one token calls seven or eight a layer."""

    linear: Any
    layer_norm: Any
    rms_norm: Any
    rotary_: Any
    activation_and_mul: Any
    cached_attention: Any
    cached_attention_int8: Any
    residual_add_bias_: Any


# They register these ops. No kernels were loaded for a model without numbers, on the device meta, that gets some later.
_FAMILIES = ("attention", "linear", "norm", "residual", "rotary", "transformer")


@functools.cache
def _ops_of(namespace: str) -> Ops:
    for family in _FAMILIES:
        importlib.import_module(f"ds_plugin_sdk.ops.{family}")
    return Ops(*(getattr(getattr(torch.ops, namespace), name).default._op for name in Ops._fields))


def ops_for(dtype: torch.dtype) -> Ops:
    """The ops for tensors of a dtype: float64 takes the references."""
    return _ops_of("ds_plugin_reference" if dtype == torch.float64 else "ds_plugin")
