"""How the transformer layer calls torch's attention kernels for GPUs, without one: on tensors without data, which torch
checks against its schemas, and with stand-ins of the kernels' formulas for the numbers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ds_plugin_sdk.nn import TransformerLayer
from ds_plugin_sdk.ops import _torch_attention

B, HEADS, WIDTH = 2, 3, 8


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that has the kernels."""
    monkeypatch.setattr(_torch_attention, "_has_kernel", lambda device, masked: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.parametrize(("tokens", "masked"), [(16, True), (16, False), (13, False)])
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_torch_takes_the_calls(on_gpu: None, tokens: int, masked: bool, p: float) -> None:
    with FakeTensorMode(), torch.no_grad():
        new = functools.partial(torch.empty, dtype=torch.bfloat16, device="cuda")
        q, k, v = new(B, tokens, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
        mask = new(B, 1, 1, tokens) if masked else None
        assert _torch_attention.is_best(q, mask, p)
        context, kept = _torch_attention.forward(q, k, v, mask, p)
        assert context.shape == q.shape and context.transpose(1, 2).is_contiguous(), "merging heads copies nothing"
        assert kept.sums.shape[:2] == (B, HEADS) and kept.sums.shape[2] >= tokens
        grad = new(B, tokens, HEADS, WIDTH).transpose(1, 2)
        grads = _torch_attention.backward(grad, q, k, v, mask, context, kept, p)
        assert [each.shape for each in grads] == [q.shape] * 3


def test_what_the_kernels_do_not_take_is_left(on_gpu: None) -> None:
    with FakeTensorMode():
        new = functools.partial(torch.empty, dtype=torch.float16, device="cuda")
        assert _torch_attention.is_best(new(1, 1, 16, 64), None, 0.1)
        assert not _torch_attention.is_best(new(1, 1, 16, 64, dtype=torch.float32), None, 0.1)
        assert not _torch_attention.is_best(new(1, 1, 16, 12), None, 0.1)
        assert not _torch_attention.is_best(new(1, 1, 16, 264), None, 0.1)
        assert not _torch_attention.is_best(new(0, 1, 16, 64), None, 0.1)
        assert not _torch_attention.is_best(new(1, 1, 16, 64, device="cpu"), None, 0.1), "no dropout there"


@pytest.mark.parametrize(
    ("capability", "all_heads"),
    [((8, 0), True), ((8, 6), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)],
)
def test_heads_without_a_backward_pass_are_left(
    on_gpu: None, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], all_heads: bool
) -> None:
    """Flash attention's forward pass takes them there, and its backward pass raises."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with FakeTensorMode():
        of_size = {size: torch.empty(1, 1, 16, size, dtype=torch.float16, device="cuda") for size in (192, 224, 256)}
        mask = torch.empty(1, 1, 1, 16, dtype=torch.float16, device="cuda")
        assert _torch_attention.is_best(of_size[192], None, 0.1)
        assert _torch_attention.is_best(of_size[224], None, 0.0) is all_heads
        assert _torch_attention.is_best(of_size[256], None, 0.1) is all_heads
        assert _torch_attention.is_best(of_size[256], None, 0.0)
        assert _torch_attention.is_best(of_size[256], mask, 0.1), "the memory-efficient kernel takes all"


# ---- numbers -----------------------------------------------------------------------------------------------------
def _weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    return torch.softmax(scores if bias is None else scores + bias, -1)


def _drop(weights: Tensor, p: float, seed: Tensor) -> Tensor:
    keep = torch.rand(weights.shape, generator=torch.Generator().manual_seed(int(seed))) >= p
    return keep / (1 - p) if p else torch.ones_like(weights)


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float) -> tuple[Tensor, Tensor, Tensor]:
    seed, weights = torch.randint(1000, ()), _weights(q, k, bias)
    context = (weights * _drop(weights, p, seed)) @ v
    return context.transpose(1, 2).contiguous().transpose(1, 2), weights.sum(-1), seed


def _derive(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, p: float, seed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    weights = _weights(q, k, bias)
    factors = _drop(weights, p, seed)
    of_scores = weights * (factors * (grad @ v.mT) - (grad * out).sum(-1, keepdim=True)) / math.sqrt(q.shape[-1])
    return of_scores @ k, of_scores.mT @ q, (weights * factors).mT @ grad


def flash(q: Tensor, k: Tensor, v: Tensor, p: float = 0, *rest: Any, **options: Any) -> tuple[Any, ...]:
    context, sums, seed = _attend(q, k, v, None, p)
    return context, sums, None, None, q.shape[2], k.shape[2], seed, torch.zeros(()), torch.zeros(0)


def flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any, **options: Any) -> Any:
    _, _, _, length, _, p, causal, seed, _ = rest
    assert length == q.shape[2] and not causal
    return _derive(grad, q, k, v, None, out, p, seed)


def _check_bias(bias: Tensor, q: Tensor) -> None:
    """What the kernel for GPUs wants of it."""
    assert bias.shape == (*q.shape[:3], q.shape[2]) and bias.stride(3) == 1
    assert all(stride % 8 == 0 for stride in bias.stride()[:3]) and bias.storage_offset() % 8 == 0


def efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sums: bool, p: float = 0, *rest: Any, **o: Any) -> Any:
    assert sums
    _check_bias(bias, q)
    return *_attend(q, k, v, bias, p), torch.zeros(())


def efficient_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, *rest: Any) -> Any:
    _, seed, _, p, wanted = rest[:5]
    assert list(wanted) == [True, True, True, False]
    _check_bias(bias, q)
    return *_derive(grad, q, k, v, bias, out, p, seed), torch.zeros(0)


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The kernels' formulas under torch's names, for tensors of any dtype on the CPU. The names of those that ran."""
    ran: list[str] = []

    def noted(name: str, function: Any, *arguments: Any, **options: Any) -> Any:
        ran.append(name)
        return function(*arguments, **options)

    with torch.library._scoped_library("aten", "IMPL") as library:
        for function in (flash, flash_backward, efficient, efficient_backward):
            kind, _, rest = function.__name__.partition("_")
            name = f"_scaled_dot_product_{kind}_attention{'_' + rest if rest else ''}"
            library.impl(name, functools.partial(noted, function.__name__, function), "CPU")
        monkeypatch.setattr(_torch_attention, "is_best", lambda q, mask, p: True)
        monkeypatch.setattr(_torch_attention, "_is_on_cpu", lambda q: False)
        yield ran


def make(p: float) -> TransformerLayer:
    torch.manual_seed(0)
    return TransformerLayer(
        HEADS * WIDTH, HEADS, 40, attn_dropout=p, hidden_dropout=0.0, initializer_range=0.3, dtype=torch.float64
    )


def mask_of(shape: tuple[int, ...], tokens: int) -> Tensor:
    """Some keys left out, of a tensor that begins anywhere in its memory."""
    values = torch.zeros(1 + math.prod(shape), dtype=torch.float64)[1:].view(shape)
    values[..., tokens // 2 :: 3] = -10000.0
    return values


@pytest.mark.parametrize("tokens", [16, 13, 1])
@pytest.mark.parametrize("mask", [None, "keys", "all", "broadcast"])
def test_a_layer_is_the_same_on_them(
    stand_ins: list[str], monkeypatch: pytest.MonkeyPatch, tokens: int, mask: str | None
) -> None:
    shapes = {"keys": (B, 1, 1, tokens), "all": (B, HEADS, tokens, tokens), "broadcast": (1, 1, tokens, 1)}
    given = None if mask is None else mask_of(shapes[mask], tokens)
    x, grad = torch.randn(2, B, tokens, HEADS * WIDTH, dtype=torch.float64)
    results = []
    for torchs in (True, False):
        layer, leaf = make(0.0), x.clone().requires_grad_()
        if not torchs:
            monkeypatch.setattr(_torch_attention, "is_best", lambda q, mask, p: False)
        layer(leaf, given).backward(grad)
        results.append([leaf.grad, *(parameter.grad for parameter in layer.parameters())])
    kind = "flash" if mask is None else "efficient"
    assert stand_ins == [kind, f"{kind}_backward"]
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("masked", [True, False])
def test_gradients_with_dropout_agree_with_finite_differences(stand_ins: list[str], masked: bool) -> None:
    """What drops in the backward pass is what has dropped in the forward pass."""
    layer, tokens = make(0.3), 9
    mask = mask_of((B, 1, 1, tokens), tokens) if masked else None
    x, direction, grad = torch.randn(3, B, tokens, HEADS * WIDTH, dtype=torch.float64)

    def along(step: float) -> Tensor:
        torch.manual_seed(5)
        result: Tensor = layer((x + step * direction).requires_grad_(), mask)
        return result

    leaf = x.clone().requires_grad_()
    torch.manual_seed(5)
    layer(leaf, mask).backward(grad)
    assert leaf.grad is not None
    measured = ((along(1e-5) - along(-1e-5)) * grad).sum() / 2e-5
    torch.testing.assert_close((leaf.grad * direction).sum(), measured, rtol=1e-6, atol=1e-8)
