"""Attention of the Evoformer beyond what the suite checks of every op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.integrations.deepspeed.modules import evoformer_attn as module
from ds_plugin_sdk.ops import evoformer_attn
from ds_plugin_sdk.ops.evoformer_attn import evoformer_attention, evoformer_attention_backward


@pytest.fixture(scope="module", autouse=True)
def evoformer_kernels(native: Callable[..., None]) -> None:
    native("evoformer_attn")


def tensors(batch: int, rows: int, tokens: int, heads: int, size: int) -> list[Tensor]:
    """Query, key, value, both biases, and a gradient."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, rows, tokens, heads, size)] * 3 + [(batch, rows, tokens), (batch, heads, tokens, tokens)]
    return [torch.randn(shape, generator=generator) for shape in (*shapes, shapes[0])]


def exactly(*given: Tensor) -> Tensor:
    """Of leaves, in float64."""
    query, key, value, mask, pair = given
    scores = torch.einsum("bnihd,bnjhd->bnhij", query, key) / query.shape[-1] ** 0.5
    weights = torch.softmax(scores + mask[:, :, None, None] + pair[:, None], dim=-1)
    return torch.einsum("bnhij,bnjhd->bnihd", weights, value)


@pytest.mark.parametrize(
    "shape", [(1, 2, 96, 2, 32), (2, 3, 97, 1, 5), (1, 1, 1, 1, 1), (1, 2, 30, 2, 100), (2, 17, 9, 3, 4)], ids=str
)
def test_gradients_are_those_of_autograd(shape: tuple[int, ...]) -> None:
    *given, grad = tensors(*shape)
    leaves = [tensor.double().requires_grad_() for tensor in given]
    expected = torch.autograd.grad(exactly(*leaves), leaves, grad.double())
    output, sums = evoformer_attention(*given)
    query, key, value, mask, pair = given
    gradients = evoformer_attention_backward(
        grad, query, key, value, output, sums, mask, pair, mask_grad=True, pair_grad=True
    )
    torch.testing.assert_close(output.double(), exactly(*leaves).detach(), rtol=1e-5, atol=1e-5)
    for got, want in zip(gradients, expected, strict=True):
        assert got is not None
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)


def test_the_reference_takes_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    *given, grad = tensors(1, 5, 8, 2, 4)
    reference = torch.ops.ds_plugin_reference
    whole = reference.evoformer_attention(*given)
    query, key, value, mask, pair = given
    backward = (grad, query, key, value, *whole, mask, pair, True, True)
    gradients = reference.evoformer_attention_backward(*backward)
    monkeypatch.setattr(evoformer_attn, "_SCORES", 2 * 2 * 8 * 8)  # of two rows
    assert len(evoformer_attn._parts(query)) == 3
    for some, all_ in zip(reference.evoformer_attention(*given), whole, strict=True):
        torch.testing.assert_close(some, all_)
    for some, all_ in zip(reference.evoformer_attention_backward(*backward), gradients, strict=True):
        torch.testing.assert_close(some, all_)


@pytest.mark.parametrize("threads", [1, 3])
def test_results_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    *given, grad = tensors(1, 9, 100, 2, 16)
    before, results = torch.get_num_threads(), []
    for count in (2, threads):
        torch.set_num_threads(count)
        output, sums = evoformer_attention(*given)
        made = evoformer_attention_backward(grad, *given[:3], output, sums, *given[3:], mask_grad=True, pair_grad=True)
        results.append([output, sums, *made])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 5, 1, 4)}, "query has shape"),
        ({"key": torch.zeros(1, 2, 6, 1, 4)}, "key has shape"),
        ({"value": torch.zeros(1, 2, 5, 1, 4).half()}, "value "),
        ({"mask_bias": torch.zeros(1, 2, 1, 1, 5)}, "mask_bias has shape"),
        ({"pair_bias": torch.zeros(1, 1, 5, 4)}, "pair_bias has shape"),
    ],
)
def test_what_does_not_fit_is_rejected(change: dict[str, Any], message: str) -> None:
    query, key, value, mask, pair, _ = tensors(1, 2, 5, 1, 4)
    arguments = {"query": query, "key": key, "value": value, "mask_bias": mask, "pair_bias": pair, **change}
    with pytest.raises(InvalidTensorError, match=message):
        evoformer_attention(**arguments)


def test_gradients_of_what_does_not_fit_are_rejected() -> None:
    query, key, value, mask, pair, grad = tensors(1, 2, 5, 1, 4)
    output, sums = evoformer_attention(query, key, value, mask, pair)
    with pytest.raises(InvalidTensorError, match="logsumexp has shape"):
        evoformer_attention_backward(grad, query, key, value, output, sums[:, :1], mask, pair)
    with pytest.raises(InvalidTensorError, match="logsumexp"):
        evoformer_attention_backward(grad, query, key, value, output, sums.half(), mask, pair)
    with pytest.raises(InvalidTensorError, match="grad has shape"):
        evoformer_attention_backward(grad[:, :1], query, key, value, output, sums, mask, pair)
    with pytest.raises(InvalidTensorError, match="mask_bias is not there"):
        evoformer_attention_backward(grad, query, key, value, output, sums, mask_grad=True)


def test_deepspeeds_functions_take_any_number_of_rows_without_biases() -> None:
    query, key, value, *_, grad = tensors(3, 2, 17, 2, 8)
    none, output, sums = torch.tensor([]), torch.empty_like(query), torch.full((6, 2, 32), 7.0)
    expected, expected_sums = evoformer_attention(query, key, value)
    flat = [x.flatten(0, 1) for x in (query, key, value, output)]
    module.attention(*flat[:3], none, none, flat[3], sums)
    assert torch.equal(flat[3].view_as(expected), expected)
    assert torch.equal(sums[..., :17], expected_sums.flatten(0, 1)) and (sums[..., 17:] == 7).all()
    made = [torch.empty_like(x) for x in flat[:3]]
    module.attention_bwd(grad.flatten(0, 1), *flat, sums, torch.empty_like(sums), none, none, *made, none, none)
    wanted = evoformer_attention_backward(grad, query, key, value, expected, expected_sums)
    assert wanted.mask_bias is None and wanted.pair_bias is None
    for got, want in zip(made, wanted[:3], strict=True):
        assert want is not None and torch.equal(got.view_as(want), want)
