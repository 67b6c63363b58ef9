"""The ops of a transformer layer: what the generic checks of ops do not know about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_plugin_sdk.conformance import op_info
from ds_plugin_sdk.conformance.ops import every_op
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.errors import InvalidTensorError, SdkError
from ds_plugin_sdk.ops import _philox
from ds_plugin_sdk.ops.transformer import (
    activation_and_mul,
    dropout_add,
    dropout_add_layer_norm,
    fused_bias_gelu,
    masked_softmax_dropout,
    new_seed,
)

OPS = [op.name for op in op_info.infos() if op.family == "transformer"]
KERNELS, REFERENCES = torch.ops.ds_plugin, torch.ops.ds_plugin_reference


@pytest.fixture(scope="module", autouse=True)
def transformer_kernels(kernels: None, native: Callable[..., None]) -> None:
    native("transformer")


# ---------------------------------------------------------------------------------- the generic checks, on the kernels


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.find("cpu")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kernels_agree_with_formulas(target: Target, op: str, dtype: str) -> None:
    every_op.accuracy(target, op, dtype)
    if op_info.find(op).differentiable:
        every_op.gradients(target, op, dtype)


@pytest.mark.parametrize("op", [name for name in OPS if op_info.find(name).differentiable])
def test_derivatives_agree_with_finite_differences(target: Target, op: str) -> None:
    every_op.gradcheck(target, op)


# ---------------------------------------------------------------------------------- random numbers


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (-1, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_authors_answers(key: int, counter: tuple[int, ...], words: tuple[int, ...]) -> None:
    """The known answers of Random123, https://github.com/DEShawResearch/random123 (tests/kat_vectors)."""
    a, b, c, d = (torch.tensor(word) for word in counter)
    assert tuple(int(word) for word in _philox.philox(torch.tensor(key), (a, b, c, d))) == words


@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (2, 64), (5, 65), (2, 3, 200)])
@pytest.mark.parametrize("seed", [0, -1, 2**62 + 12345])
def test_the_kernel_drops_what_the_reference_drops(shape: tuple[int, ...], seed: int) -> None:
    key = torch.tensor([seed])
    kept = dropout_add(torch.ones(shape), p=0.3, seed=key) != 0
    assert torch.equal(kept.view(-1, shape[-1]), _philox.keep(key, kept.numel() // shape[-1], shape[-1], 0.3))


def test_masks_look_random() -> None:
    """Shares, and those of equal neighbours in both directions and under the next seed, within five deviations."""
    p, rows, columns = 0.1, 2000, 1000
    first, second = (dropout_add(torch.ones(rows, columns), p=p, seed=torch.tensor([s])) == 0 for s in (7, 8))
    deviation = 5 / (rows * (columns - 1)) ** 0.5

    def expect(events: Tensor, share: float) -> None:
        assert abs(events.double().mean().item() - share) < deviation * (share * (1 - share)) ** 0.5

    expect(first, p)
    expect(first[:, 1:] & first[:, :-1], p * p)
    expect(first[1:] & first[:-1], p * p)
    expect(first[:, 16:] & first[:, :-16], p * p)  # two words of one counter
    expect(first & second, p * p)


def test_seeds_follow_torch() -> None:
    torch.manual_seed(3)
    first = new_seed(3)
    torch.manual_seed(3)
    assert torch.equal(new_seed(3), first) and first.unique().numel() == 3


def test_what_is_kept_grows() -> None:
    x = torch.ones(4, 100, dtype=torch.bfloat16)
    result = dropout_add(x, p=0.75, seed=torch.tensor([1]))
    assert set(result.flatten().tolist()) == {0.0, 4.0}


# ---------------------------------------------------------------------------------- memory


def kept_bytes(function: Callable[[], Any]) -> int:
    """Bytes of tensors that autograd keeps for the backward pass."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(kept.values())


def test_no_mask_is_kept() -> None:
    seed = new_seed()
    x = torch.randn(32, 64, requires_grad=True)
    weight, bias = torch.ones(64, requires_grad=True), torch.zeros(64, requires_grad=True)
    one = x.numel() * 4
    assert kept_bytes(lambda: dropout_add(x, x, p=0.1, seed=seed)) == 8
    assert kept_bytes(lambda: masked_softmax_dropout(x, p=0.1, seed=seed)) == one + 8
    assert (
        kept_bytes(lambda: dropout_add_layer_norm(x, weight, bias, x, p=0.1, seed=seed))
        == one + 8 + 64 * 4 + 2 * 32 * 4
    )


# ---------------------------------------------------------------------------------- sums over rows


def test_sums_do_not_depend_on_threads() -> None:
    grad, rows = torch.randn(1000, 300), torch.randn(1000, 300)
    stats, weight = torch.rand(2, 1000) + 0.5, torch.randn(300)
    arguments = (grad, None, rows, stats[0], stats[1], weight, None, new_seed(), 0.2, True)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(KERNELS.dropout_add_layer_norm_backward(*arguments))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_sums_over_many_rows_stay_exact() -> None:
    """Within 1e-5 of the sum of absolute values over 100,000 rows; one float adding up alone is off by 1e-3."""
    grad = torch.rand(100_000, 3)
    _, sums = KERNELS.dropout_add_backward(grad, None, 0.0, True)
    torch.testing.assert_close(sums.double(), grad.double().sum(dim=0), rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------- masks of the softmax


@pytest.mark.parametrize(
    "mask",
    [
        torch.randn(2, 1, 1, 40),
        torch.randn(1, 1, 24, 40),
        torch.randn(2, 3, 24, 40),
        torch.randn(40),
        torch.randn(24, 1),
        torch.randn(()),
        torch.randn(2, 1, 40, 24).transpose(2, 3),
        torch.randn(2, 1, 1, 1).expand(2, 3, 24, 40),
        torch.randn(3, 1, 80)[..., ::2],
    ],
    ids=lambda mask: str(list(mask.shape)),
)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_masks_broadcast(mask: Tensor, p: float) -> None:
    scores, seed = torch.randn(2, 3, 24, 40), new_seed()
    native = KERNELS.masked_softmax_dropout(scores, mask, 0.7, seed, p)
    reference = REFERENCES.masked_softmax_dropout(scores, mask, 0.7, seed, p)
    torch.testing.assert_close(native, reference, rtol=1e-5, atol=1e-7)


def test_a_row_with_nothing_to_attend_to_gives_zeros() -> None:
    scores = torch.randn(4, 20, requires_grad=True)
    mask = torch.zeros(4, 20)
    mask[2] = -torch.inf
    result = masked_softmax_dropout(scores, mask)
    result.sum().backward()
    assert scores.grad is not None
    assert result[2].eq(0).all() and scores.grad[2].eq(0).all() and result[[0, 1, 3]].sum(dim=1).allclose(torch.ones(3))


# ---------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("ops", [KERNELS, REFERENCES], ids=["kernel", "reference"])
@pytest.mark.parametrize("p", [-0.1, 1.0, float("nan")])
def test_shares_out_of_range_are_rejected(ops: Any, p: float) -> None:
    with pytest.raises((InvalidTensorError, RuntimeError), match="expected at least 0 and less than 1"):
        ops.dropout_add(torch.ones(2, 3), None, None, new_seed(), p)


@pytest.mark.parametrize("seed", [None, torch.tensor([1, 2]), torch.tensor([1.0])], ids=["none", "two", "float"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_without_a_fitting_seed_is_rejected(seed: Tensor | None, dtype: torch.dtype) -> None:
    with pytest.raises(InvalidTensorError, match="seed"):
        dropout_add(torch.ones(2, 3, dtype=dtype), p=0.5, seed=seed)


@pytest.mark.parametrize("ops", [KERNELS, REFERENCES], ids=["kernel", "reference"])
@pytest.mark.parametrize("name", ["mean", "rstd"])
@pytest.mark.parametrize("wrong", [torch.ones(3), torch.ones(2, dtype=torch.float64)], ids=["shape", "dtype"])
def test_statistics_that_do_not_fit_are_rejected(ops: Any, name: str, wrong: Tensor) -> None:
    rows, weight = torch.ones(2, 3), torch.ones(3)
    mean, rstd = ({"mean": torch.zeros(2), "rstd": torch.ones(2)} | {name: wrong}).values()
    with pytest.raises((InvalidTensorError, RuntimeError), match=name):
        ops.dropout_add_layer_norm_backward(rows, None, rows, mean, rstd, weight, None, None, 0.0, False)


@pytest.mark.parametrize("ops", [KERNELS, REFERENCES], ids=["kernel", "reference"])
@pytest.mark.parametrize(
    "call",
    [
        lambda ops, grad, x, row: ops.dropout_add_backward(grad, None, 0.0, True),
        lambda ops, grad, x, row: ops.dropout_add_layer_norm_backward(
            grad, None, x, row[:2], row[:2], row, None, None, 0.0, True
        ),
        lambda ops, grad, x, row: ops.fused_bias_gelu_backward(grad, x, row, True),
        lambda ops, grad, x, row: ops.masked_softmax_dropout_backward(grad, x, 1.0, None, 0.0),
    ],
    ids=["dropout", "norm", "gelu", "softmax"],
)
def test_a_gradient_that_does_not_fit_is_called_so(ops: Any, call: Callable[..., Any]) -> None:
    grad, x, row = torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3), torch.ones(3)
    with pytest.raises((InvalidTensorError, RuntimeError), match="grad_output"):
        call(ops, grad, x, row)


def test_a_mask_that_wants_a_gradient_is_rejected() -> None:
    with pytest.raises(InvalidTensorError, match="mask requires a gradient"):
        masked_softmax_dropout(torch.ones(2, 3), torch.zeros(3, requires_grad=True))


# ---------------------------------------------------------------------------------- tracing


@pytest.mark.parametrize(
    ("call", "post"),
    [
        (fused_bias_gelu, Tensor.sum),
        (fused_bias_gelu, lambda y: y.pow(3).sum()),
        (lambda x: activation_and_mul(x, x, "silu"), Tensor.sum),
        (lambda x: dropout_add(x, x), lambda y: y.pow(3).sum()),
    ],
    ids=["gelu", "gelu, cubed", "activation_and_mul", "dropout_add, cubed"],
)
def test_a_gradient_that_is_derived_again_is_an_error(call: Any, post: Callable[[Tensor], Tensor]) -> None:
    """To torch what a kernel computes is a constant: a second derivative would be zero, or a part, without a word."""
    x = torch.randn(3, 8, requires_grad=True)
    (first,) = torch.autograd.grad(post(call(x)), x, create_graph=True)
    (plain,) = torch.autograd.grad(post(call(x)), x)
    assert torch.equal(first, plain)
    with pytest.raises(SdkError, match="no derivative of a gradient"):
        (first * first).sum().backward()


def test_ops_compile_without_a_break() -> None:
    def block(x: Tensor, weight: Tensor, bias: Tensor, seed: Tensor) -> Tensor:
        normed, total = dropout_add_layer_norm(x, weight, bias, x, bias=bias, p=0.1, seed=seed)
        return masked_softmax_dropout(fused_bias_gelu(normed, bias) + total, p=0.1, seed=seed)

    arguments = [torch.randn(6, 32), torch.ones(32), torch.zeros(32)]
    seed = new_seed()
    results = []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        leaves = [argument.clone().requires_grad_() for argument in arguments]
        result = function(*leaves, seed)
        result.square().sum().backward()
        results.append([result.detach(), *(leaf.grad for leaf in leaves)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(eager, compiled)
