"""A gradient that is derived again is an error where kernels compute first derivatives alone, never a part of one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.nn import FixedSparsityConfig, SparseSelfAttention, TransformerLayer
from ds_plugin_sdk.ops.transformer import dropout_add, masked_softmax_dropout, new_seed

pytestmark = pytest.mark.usefixtures("compiled_once")


def penalized(function: Callable[[Tensor], Tensor]) -> None:
    """A penalty on the gradient of a loss that is linear in what `function` gives."""
    x = torch.randn(1, 2, 32, 16, requires_grad=True)
    (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    (first.square().sum() + x.sum()).backward()


def test_sparse_attention() -> None:
    attention = SparseSelfAttention(FixedSparsityConfig(2, 16, num_local_blocks=2), max_seq_length=32)
    with pytest.raises(SdkError, match=r"no derivative of a gradient \(op 'sparse attention'\)"):
        penalized(lambda x: attention(x, x * 2, x * 3))


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_softmax_with_and_without_dropout(p: float) -> None:
    with pytest.raises(SdkError, match=r"no derivative of a gradient \(op 'masked_softmax_dropout'\)"):
        penalized(lambda x: masked_softmax_dropout(x, p=p, seed=new_seed()) * torch.arange(16.0))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("inverted", [False, True])
def test_the_transformer_layer(inverted: bool, frozen: bool) -> None:
    """Inverted, it keeps neither its input nor its output, and frozen weights require no gradients."""
    layer = TransformerLayer(
        16, 2, attn_dropout=0.0, hidden_dropout=0.0, pre_layer_norm=True, normalize_invertible=inverted
    ).requires_grad_(not frozen)
    with pytest.raises(SdkError, match=r"no derivative of a gradient \(op 'transformer_layer'\)"):
        penalized(lambda x: layer(x[0]))


def test_a_gradient_of_a_linear_op_is_a_constant() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(dropout_add(x, p=0.5, seed=new_seed()).sum(), x, create_graph=True)
    (first.square().sum() + x.sum()).backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 8))
