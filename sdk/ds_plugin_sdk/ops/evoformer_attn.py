"""Attention of the Evoformer: ``ds_plugin::evoformer_attention`` and ``evoformer_attention_backward``.

Of AlphaFold 2 (Jumper et al. 2021): rows of tokens, such as the sequences of an alignment, attend each to itself, with
one bias for the keys of each row and one for pairs of tokens that all rows share.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ds_plugin_sdk.ops import _library
from ds_plugin_sdk.ops._checks import CheckError, check_device, check_dtype, check_first, check_other
from ds_plugin_sdk.ops._references import working

# Scores that the reference has in memory at a time, if a row has no more.
_SCORES = 1 << 24


class Gradients(NamedTuple):
    """The gradients of an attention's arguments; those of the biases are float32, and None unless asked for."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask_bias: Tensor | None
    pair_bias: Tensor | None


def evoformer_attention(
    query: Tensor, key: Tensor, value: Tensor, mask_bias: Tensor | None = None, pair_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of every row of tokens to itself.

    For each batch b, row n, head h and query i, over all keys j of the row::

        s_j = query . key_j / sqrt(head_dim) + mask_bias[b, n, j] + pair_bias[b, h, i, j]
        output = sum_j e^(s_j - l) value_j        l = log(sum_j e^(s_j))

    in float32 (float64 for float64 tensors), rounded once. A query whose scores are all minus infinity gives 0.
    A backward pass through it raises `SdkError`: `evoformer_attention_backward` gives the gradients.

    Args:
        query, key, value: ``[batch, rows, tokens, heads, head_dim]``: float32, bfloat16, float16.
        mask_bias: ``[batch, rows, tokens]``, the dtype of query.
        pair_bias: ``[batch, heads, tokens, tokens]``, the dtype of query.

    Returns:
        The output, shape and dtype of query; and l, float32 ``[batch, rows, heads, tokens]``.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit.
    """
    output, logsumexp = _library.call("evoformer_attention", query, key, value, mask_bias, pair_bias)
    return output, logsumexp


def evoformer_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    mask_bias: Tensor | None = None,
    pair_bias: Tensor | None = None,
    *,
    mask_grad: bool = False,
    pair_grad: bool = False,
) -> Gradients:
    """The gradients of `evoformer_attention`, with scores computed again (Dao et al. 2022).

    With p = e^(s - l) and d = grad . output for each query::

        ds_j = p_j (grad . value_j - d)
        query:      sum of ds_j key_j / sqrt(head_dim)          mask_bias:  sum of ds over heads and queries
        key_j:      sum of ds_j query / sqrt(head_dim)          pair_bias:  sum of ds over rows
        value_j:    sum of p_j grad

    Args:
        grad: of the output; its shape and dtype.
        query, key, value, mask_bias, pair_bias: as they were.
        output, logsumexp: what `evoformer_attention` gave.
        mask_grad, pair_grad: whether the gradient of a bias is wanted.

    Raises:
        InvalidTensorError: shapes, dtypes or devices do not fit, or a gradient is wanted of a bias that is not there.
    """
    tensors = (grad, query, key, value, output, logsumexp, mask_bias, pair_bias)
    q, k, v, mask, pair = _library.call("evoformer_attention_backward", *tensors, mask_grad, pair_grad)
    return Gradients(q, k, v, mask if mask_grad else None, pair if pair_grad else None)


def _check(query: Tensor, key: Tensor, value: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None) -> None:
    check_first("query", query)
    if query.dim() != 5 or query.shape[-1] == 0:
        raise CheckError(
            f"query has shape {list(query.shape)}; expected [batch, rows, tokens, heads, head_dim], no empty heads"
        )
    batch, rows, tokens, heads, _ = query.shape
    check_other("key", key, query, query.shape)
    check_other("value", value, query, query.shape)
    check_other("mask_bias", mask_bias, query, (batch, rows, tokens))
    check_other("pair_bias", pair_bias, query, (batch, heads, tokens, tokens))


def _new_logsumexp(query: Tensor) -> Tensor:
    batch, rows, tokens, heads, _ = query.shape
    return query.new_empty((batch, rows, heads, tokens), dtype=working(query))


@_library.op(
    "evoformer_attention(Tensor query, Tensor key, Tensor value, Tensor? mask_bias, Tensor? pair_bias) "
    "-> (Tensor, Tensor)",
    check=_check,
    outputs=lambda query: (query.new_empty(query.shape), _new_logsumexp(query)),
)
def evoformer_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``ds_plugin::evoformer_attention`` in plain torch, on any device, some rows at a time."""
    output, logsumexp = query.new_empty(query.shape), _new_logsumexp(query)
    for part in _parts(query):
        scores = _scores(query[:, part], key[:, part], mask_bias, pair_bias, part)
        sums = torch.logsumexp(scores, dim=-1)
        weights = _weights(scores, sums)
        output[:, part] = _tokens_first(weights @ _heads_first(value[:, part]))
        logsumexp[:, part] = sums
    return output, logsumexp


def _check_backward(
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
) -> None:
    _check(query, key, value, mask_bias, pair_bias)
    check_other("grad", grad, query, query.shape)
    check_other("output", output, query, query.shape)
    check_device("logsumexp", logsumexp, query)
    check_dtype("logsumexp", logsumexp, working(query))
    batch, rows, tokens, heads, _ = query.shape
    if logsumexp.shape != (batch, rows, heads, tokens):
        raise CheckError(f"logsumexp has shape {list(logsumexp.shape)}; expected {[batch, rows, heads, tokens]}")
    for name, bias, wanted in (("mask_bias", mask_bias, mask_grad), ("pair_bias", pair_bias, pair_grad)):
        if wanted and bias is None:
            raise CheckError(f"{name} is not there; expected it where its gradient is wanted")


def _new_gradients(query: Tensor, mask_grad: bool, pair_grad: bool) -> tuple[Tensor, ...]:
    batch, rows, tokens, heads, _ = query.shape
    mask = (batch, rows, tokens) if mask_grad else (0,)
    pair = (batch, heads, tokens, tokens) if pair_grad else (0,)
    biases = (query.new_empty(shape, dtype=working(query)) for shape in (mask, pair))
    return (*(query.new_empty(query.shape) for _ in range(3)), *biases)


@_library.op(
    "evoformer_attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor output, "
    "Tensor logsumexp, Tensor? mask_bias, Tensor? pair_bias, bool mask_grad, bool pair_grad) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    check=_check_backward,
    outputs=_new_gradients,
)
def evoformer_attention_backward_reference(
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
    """``ds_plugin::evoformer_attention_backward`` in plain torch, on any device, some rows at a time."""
    gradients = tuple(tensor.zero_() for tensor in _new_gradients(query, mask_grad, pair_grad))
    of_query, of_key, of_value, of_mask, of_pair = gradients
    scale = query.shape[-1] ** -0.5
    for part in _parts(query):
        q, k, v, g, o = (_heads_first(tensor[:, part]) for tensor in (query, key, value, grad, output))
        sums = logsumexp[:, part]
        weights = _weights(_scores(query[:, part], key[:, part], mask_bias, pair_bias, part), sums)
        of_scores = weights * (g @ v.transpose(-1, -2) - (g * o).sum(-1, keepdim=True))
        of_scores = torch.where(_nothing(sums), 0.0, of_scores)  # whatever the values are
        of_query[:, part] = _tokens_first(of_scores @ k * scale)
        of_key[:, part] = _tokens_first(of_scores.transpose(-1, -2) @ q * scale)
        of_value[:, part] = _tokens_first(weights.transpose(-1, -2) @ g)
        if mask_grad:
            of_mask[:, part] = of_scores.sum(dim=(2, 3))
        if pair_grad:
            of_pair += of_scores.sum(dim=1)
    return gradients


def _parts(query: Tensor) -> list[slice]:
    """Rows that are computed together."""
    batch, rows, tokens, heads, _ = query.shape
    step = max(1, _SCORES // max(1, batch * heads * tokens * tokens))
    return [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


def _heads_first(x: Tensor) -> Tensor:
    """``[..., tokens, heads, head_dim]`` as ``[..., heads, tokens, head_dim]``, in the dtype of arithmetic."""
    return x.transpose(-2, -3).to(working(x))


def _tokens_first(x: Tensor) -> Tensor:
    return x.transpose(-2, -3)


def _scores(query: Tensor, key: Tensor, mask_bias: Tensor | None, pair_bias: Tensor | None, part: slice) -> Tensor:
    """``[batch, rows, heads, tokens, tokens]``."""
    scores: Tensor = _heads_first(query) @ _heads_first(key).transpose(-1, -2) * query.shape[-1] ** -0.5
    if mask_bias is not None:
        scores = scores + mask_bias[:, part, None, None].to(scores.dtype)
    if pair_bias is not None:
        scores = scores + pair_bias[:, None].to(scores.dtype)
    return scores


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    return torch.where(_nothing(logsumexp), 0.0, torch.exp(scores - logsumexp.unsqueeze(-1)))


def _nothing(logsumexp: Tensor) -> Tensor:
    """Whether a query attends to nothing."""
    return (logsumexp == -torch.inf).unsqueeze(-1)


__all__ = ["Gradients", "evoformer_attention", "evoformer_attention_backward"]
