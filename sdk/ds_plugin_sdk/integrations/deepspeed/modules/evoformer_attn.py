"""``evoformer_attn``: what DeepSpeed's DS4Sci_EvoformerAttention calls.

Formulas and errors are those of `ds_plugin_sdk.ops.evoformer_attn`. A bias that is not there is a tensor without
elements; so is the gradient of one that is not wanted.
"""

from __future__ import annotations

import math

from torch import Tensor

from ds_plugin_sdk.ops.evoformer_attn import evoformer_attention, evoformer_attention_backward


def attention(q: Tensor, k: Tensor, v: Tensor, bias1: Tensor, bias2: Tensor, o: Tensor, lse: Tensor) -> None:
    """Attend, and write the result into `o` and the logarithms of the sums into `lse`.

    Args:
        q, k, v: ``[batch, rows, tokens, heads, head_dim]``; without biases any number of dimensions before the tokens.
        bias1: ``[batch, rows, 1, 1, tokens]``, added to the scores of a row's keys.
        bias2: ``[batch, 1, heads, tokens, tokens]``, added to the scores of all rows.
        o: shape of q.
        lse: float32 ``[batch * rows, heads, tokens or more]``; what is beyond the tokens is not written.
    """
    output, sums = evoformer_attention(_rows(q), _rows(k), _rows(v), *_biases(q, bias1, bias2))
    o.copy_(output.view(o.shape))
    lse[..., : sums.shape[-1]].copy_(sums.flatten(0, 1))


def attention_bwd(
    go: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    delta: Tensor,
    bias1: Tensor,
    bias2: Tensor,
    gq: Tensor,
    gk: Tensor,
    gv: Tensor,
    gb1: Tensor,
    gb2: Tensor,
) -> None:
    """Write the gradients into gq, gk and gv, of q's dtype, and gb1 and gb2, float32 in the shape of their bias.

    `delta`, room that DeepSpeed's own op needs, is not used.
    """
    rows = _rows(q)
    batch, count, tokens, heads, _ = rows.shape
    mask, pair = _biases(q, bias1, bias2)
    gradients = evoformer_attention_backward(
        _rows(go),
        _rows(q),
        _rows(k),
        _rows(v),
        _rows(o),
        lse[..., :tokens].reshape(batch, count, heads, tokens),
        mask,
        pair,
        mask_grad=gb1.numel() > 0,
        pair_grad=gb2.numel() > 0,
    )
    for into, gradient in zip((gq, gk, gv, gb1, gb2), gradients, strict=True):
        if gradient is not None:
            into.copy_(gradient.view(into.shape))


def _rows(x: Tensor) -> Tensor:
    """As ``[batch, rows, tokens, heads, head_dim]``."""
    return x if x.dim() == 5 else x.reshape(1, math.prod(x.shape[:-3]), *x.shape[-3:])


def _biases(q: Tensor, bias1: Tensor, bias2: Tensor) -> tuple[Tensor | None, Tensor | None]:
    batch, rows, tokens, heads, _ = _rows(q).shape
    mask = bias1.reshape(batch, rows, tokens) if bias1.numel() else None
    pair = bias2.reshape(batch, heads, tokens, tokens) if bias2.numel() else None
    return mask, pair
