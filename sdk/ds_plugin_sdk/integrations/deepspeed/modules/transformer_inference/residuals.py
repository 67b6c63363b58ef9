"""Additions to the residual, and what is left."""

from __future__ import annotations

from torch import Tensor

from ds_plugin_sdk.ops import residual as residuals


def residual_add_bias(
    hidden: Tensor,
    residual: Tensor,
    attention_output: Tensor,
    attention_bias: Tensor | None,
    final_bias: Tensor | None,
    mp_size: int,
    mlp_after_attn: bool,
    add_bias: bool,
    pre_layer_norm: bool,
) -> Tensor:
    """Add the layer's outputs to `residual`, in place, and return it.

    ====================================  ========================================================================
    `mlp_after_attn`, `pre_layer_norm`    hidden + (residual + attention_output + attention_bias + final_bias) / mp_size
    `mlp_after_attn`, no `pre_...`        hidden + residual + final_bias
    no `mlp_after_attn`                   hidden + attention_output
                                          + (residual + final_bias + [attention_bias if `add_bias`]) / mp_size
    ====================================  ========================================================================
    """
    if mlp_after_attn and not pre_layer_norm:
        return residuals.residual_add_bias_(residual, hidden, None, None, final_bias)
    return residuals.residual_add_bias_(
        residual,
        hidden,
        attention_output,
        attention_bias if mlp_after_attn or add_bias else None,
        final_bias,
        scale=1 / mp_size,
        scale_attention=mlp_after_attn,
    )


def _vector_add(a: Tensor, b: Tensor, gamma: float) -> Tensor:
    """``gamma * a + b`` in `a`, which is returned."""
    return residuals.residual_add_bias_(a, b, scale=gamma)


def bias_residual(output: Tensor, residual: Tensor, bias: Tensor) -> Tensor:
    """`output` as it is: DeepSpeed's own kernel adds nothing either."""
    return output


def moe_res_matmul(residual: Tensor, coef: Tensor, output: Tensor) -> Tensor:
    """``output * coef[H:] + residual * coef[:H]`` in `output`, which is returned; `coef` has 2 H elements.

    Coefficients of each token, ``[..., 2]``, as a residual mixture of experts has them, serve their token.
    """
    if coef.shape == (*output.shape[:-1], 2):
        return output.mul_(coef[..., 1:]).add_(residual * coef[..., :1])
    return residuals.moe_res_matmul_(output, residual, coef.flatten())


def einsum_sec_sm_ecm(dispatch: Tensor, tokens: Tensor) -> Tensor:
    """``sum over s of dispatch[s, e, c] * tokens[s, m]``, ``[e, c, m]``."""
    return residuals.einsum_sec_sm_ecm(dispatch, tokens)


def pad_transform(query: Tensor, key: Tensor, value: Tensor, heads: int, add_padding: bool) -> list[Tensor]:
    """Heads split, and padded if asked: see `ds_plugin_sdk.ops.residual.pad_transform`."""
    return list(residuals.pad_transform(query, key, value, heads, add_padding))


def add_padding(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """`pad_transform` with padding, of tensors whose heads are split already."""
    flat = [each.transpose(1, 2).flatten(2) for each in (query, key, value)]
    return pad_transform(flat[0], flat[1], flat[2], query.shape[1], True)
