"""Ops for inference have no derivatives: a backward pass through them is an error, never a gradient without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.ops import activation, attention, evoformer_attn, linear, norm, quantizer, rotary, softmax

pytestmark = pytest.mark.usefixtures("compiled_once")


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def attended(past: Tensor) -> Tensor:
    caches = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 8)
    return attention.cached_attention(past, past, past, *caches, 0)


TABLES = torch.randn(1, 4, 4), torch.randn(1, 4, 4)
OPS: dict[str, Callable[[], Tensor]] = {
    "rms_norm": lambda: norm.rms_norm(leaf(4, 8), torch.ones(8)),
    "rms_norm of a weight": lambda: norm.rms_norm(torch.randn(4, 8), leaf(8)),
    "pre_layer_norm": lambda: norm.pre_layer_norm(leaf(4, 8), torch.randn(4, 8), torch.ones(8), torch.zeros(8))[1],
    "linear": lambda: linear.linear(leaf(4, 8), torch.randn(2, 8)),
    "linear of a bias": lambda: linear.linear(torch.randn(4, 8), torch.randn(2, 8), leaf(2)),
    "cached_attention": lambda: attended(leaf(1, 2, 3, 8)),
    "evoformer_attention": lambda: evoformer_attn.evoformer_attention(*[leaf(1, 1, 4, 2, 8)] * 3)[0],
    "bias_activation": lambda: activation.bias_activation(leaf(4, 8), activation="gelu"),
    "bias_activation_": lambda: activation.bias_activation_(leaf(4, 8) * 1, activation="gelu"),
    "bias_activation_ of a bias": lambda: activation.bias_activation_(torch.randn(4, 8), leaf(8), activation="gelu"),
    "bias_activation_ of a part": lambda: activation.bias_activation_((leaf(4, 8) * 1)[:2], activation="gelu"),
    "softmax_": lambda: softmax.softmax_(leaf(1, 1, 4, 4) * 1),
    "rotary": lambda: rotary.rotary(leaf(1, 1, 4, 8), *TABLES),
    "float64": lambda: norm.rms_norm(leaf(4, 8).double(), torch.ones(8, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", OPS)
def test_a_backward_pass_is_an_error(name: str) -> None:
    result = OPS[name]()
    assert result.requires_grad
    with pytest.raises(SdkError, match=r"no derivative \(op '\w+'\)"):
        (result.sum() + leaf(1)).backward()


def test_what_was_written_in_part_is_an_error_as_a_whole() -> None:
    whole = leaf(4, 8) * 1
    activation.bias_activation_(whole[:2], activation="gelu")
    with pytest.raises(SdkError, match="no derivative"):
        whole.sum().backward()


@pytest.mark.parametrize("transform", [lambda f: f, torch.func.vmap], ids=["plain", "vmap"])
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # of torch.vmap over any op of others
def test_functional_gradients(transform: Callable[[Any], Any]) -> None:
    with pytest.raises(SdkError, match="no derivative"):
        transform(torch.func.grad(lambda x: norm.rms_norm(x, torch.ones(8)).sum()))(torch.randn(4, 8))


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # torch.compile does it
def test_compiled() -> None:
    def function(x: Tensor) -> Tensor:
        return activation.bias_activation_(norm.rms_norm(x, torch.ones(8)) * 2, activation="gelu").sum()

    x = leaf(4, 8)
    loss = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(loss, function(x.detach()))
    with pytest.raises(SdkError, match="no derivative"):
        loss.backward()


def test_inference_without_no_grad_goes_on() -> None:
    weight = leaf(8)
    found = norm.rms_norm(torch.ones(4, 8), weight)
    found += 1
    with torch.no_grad():
        assert not norm.rms_norm(torch.ones(4, 8), weight).requires_grad
    torch.testing.assert_close(found, norm.rms_norm(torch.ones(4, 8), weight.detach()) + 1)


def test_gradients_pass_straight_through_fake_quantization() -> None:
    x = leaf(4, 8)
    rounded = x * 1
    quantizer.fake_quantize_(rounded, groups=1, bits=4, symmetric=True)
    rounded.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 8))
