"""Ops for inference have no derivatives: a backward pass through them is an error, never a gradient without them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk.errors import InvalidTensorError, SdkError
from ds_plugin_sdk.ops import (
    activation,
    attention,
    cross_entropy,
    evoformer_attn,
    linear,
    norm,
    quantizer,
    rotary,
    softmax,
    utils,
)

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
    "bias_activation_ of a part": lambda: activation.bias_activation_((leaf(4, 8) * 1)[:2], activation="gelu"),
    "softmax_": lambda: softmax.softmax_(leaf(1, 1, 4, 4) * 1),
    "rotary": lambda: rotary.rotary(leaf(1, 1, 4, 8), *TABLES),
    "quantize": lambda: quantizer.quantize(leaf(4, 8), groups=1, bits=8)[1],
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


def test_compiled() -> None:
    """In one graph, as it is without this; that the gradients lack a part is torch's warning."""

    def function(x: Tensor) -> Tensor:
        return activation.bias_activation_(norm.rms_norm(x, torch.ones(8)) * 2, activation="gelu").sum()

    x = leaf(4, 8)
    with pytest.warns(UserWarning, match="an autograd kernel was not registered"):
        loss = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(loss, function(x.detach()))


def test_inference_without_no_grad_goes_on() -> None:
    """Also in place, on what torch lets nobody write whose calls are recorded: parts, leaves and buffers."""
    weight = leaf(8)
    query, key = torch.nn.functional.linear(torch.ones(1, 2, 4, 8), leaf(16, 8)).chunk(2, dim=-1)
    expected = rotary.rotary(query.detach(), *TABLES)
    torch.testing.assert_close(rotary.rotary_(query, *TABLES).detach(), expected)
    assert key.requires_grad
    value = leaf(4, 8)
    expected = activation.bias_activation(value.detach(), activation="gelu")
    torch.testing.assert_close(activation.bias_activation_(value, activation="gelu").detach(), expected)
    buffer = torch.zeros(4, 8)
    for _ in range(2):
        activation.bias_activation_(buffer, weight, activation="gelu")
    assert not buffer.requires_grad
    with torch.inference_mode():
        buffer = torch.zeros(4, 8)
    activation.bias_activation_(buffer, weight, activation="gelu")
    found = norm.rms_norm(torch.ones(4, 8), weight)
    found += 1
    with torch.no_grad():
        assert not norm.rms_norm(torch.ones(4, 8), weight).requires_grad
    torch.testing.assert_close(found, norm.rms_norm(torch.ones(4, 8), weight.detach()) + 1)


def test_logits_that_cross_entropy_has_written_over() -> None:
    logits = leaf(4, 8) * 1
    losses = cross_entropy.cross_entropy_(logits, torch.tensor([0, 1, 2, 3]))
    for result in (logits, losses):
        with pytest.raises(SdkError, match=r"no derivative \(op 'cross_entropy_'\)"):
            result.sum().backward(retain_graph=True)


def test_tensors_are_flattened_with_their_gradients() -> None:
    x = leaf(2)
    (utils.flatten([x * 2, (x * 3).view(2, 1)]) * torch.arange(4.0)).sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([6.0, 11.0]))  # 2 * 0 + 3 * 2, 2 * 1 + 3 * 3
    with pytest.raises(InvalidTensorError, match=r"tensors\[1\]"):
        utils.flatten([x, x.double()])


class _Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return norm.rms_norm(x, self.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # TorchScript as such is deprecated
def test_a_traced_module_can_be_saved(tmp_path: Path) -> None:
    x = torch.randn(4, 8)
    torch.jit.trace(_Normed().eval(), x).save(str(tmp_path / "normed.pt"))
    torch.testing.assert_close(torch.jit.load(str(tmp_path / "normed.pt"))(x), _Normed()(x))


def test_gradients_pass_straight_through_fake_quantization() -> None:
    x = leaf(4, 8)
    rounded = x * 1
    quantizer.fake_quantize_(rounded, groups=1, bits=4, symmetric=True)
    rounded.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(4, 8))
