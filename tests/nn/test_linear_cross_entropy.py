"""Linear layer and cross entropy in one, against torch's two: in float64, in the dtypes that people train in, and as
programs use it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ds_plugin_sdk.bench.timing import peak_bytes
from ds_plugin_sdk.errors import InvalidTensorError, SdkError
from ds_plugin_sdk.nn import LinearCrossEntropyLoss, linear_cross_entropy
from ds_plugin_sdk.ops import linear_cross_entropy as ops

ROWS, HIDDEN, COLUMNS = 37, 24, 301


@pytest.fixture(scope="module", autouse=True)
def kernels(native: Callable[..., None]) -> None:
    native("cross_entropy")


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows at a time, and not as many in the last chunk."""
    monkeypatch.setattr(ops, "_LOGITS", 5 * COLUMNS)
    monkeypatch.setattr(ops, "_ROWS", 1)


def tensors(dtype: torch.dtype = torch.float64, bias: bool = True) -> tuple[list[Tensor], Tensor]:
    """Input, weight and bias, which want gradients, and targets, of which some are ignored."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(ROWS, HIDDEN), (COLUMNS, HIDDEN), (COLUMNS,)][: 3 if bias else 2]
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) / 2 for shape in shapes]
    target = torch.randint(0, COLUMNS, (ROWS,), generator=generator)
    target[5:9] = -100
    return [each.requires_grad_() for each in made], target


def plain(input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """The same in torch's own functions, with all logits."""
    z_loss, softcap = options.pop("z_loss", 0.0), options.pop("softcap", 0.0)
    logits = functional.linear(input, weight, bias)
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    loss = functional.cross_entropy(logits, target, **options)
    counted = logits[target != options.get("ignore_index", -100)]
    squares = torch.logsumexp(counted, dim=-1) ** 2
    return loss + z_loss * (squares.sum() if options.get("reduction") == "sum" else squares.mean())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum"},
        {"ignore_index": 3},
        {"label_smoothing": 0.1},
        {"label_smoothing": 1.0},
        {"z_loss": 1e-2},
        {"softcap": 3.0},
        {"reduction": "sum", "label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 30.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.usefixtures("chunks")
def test_it_is_torchs_in_float64(bias: bool, options: dict[str, Any]) -> None:
    leaves, target = tensors(bias=bias)
    target = target.clamp(min=0) if "ignore_index" in options else target
    offset = leaves[2] if bias else None
    loss = linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=offset, **options)
    expected = plain(leaves[0], leaves[1], target, offset, **dict(options))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    found, wanted = (torch.autograd.grad(3 * each, leaves) for each in (loss, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_torchs_default_of_the_ignored_index() -> None:
    """torch's linear_cross_entropy has None, which means -100 for targets that are columns."""
    leaves, target = tensors(bias=False)
    target[0] = -100
    options = {"linear_bias": None, "ignore_index": None}
    assert torch.equal(linear_cross_entropy(*leaves, target, **options), linear_cross_entropy(*leaves, target))


@pytest.mark.parametrize(
    ("dtype", "of_loss", "of_gradients"),
    [(torch.float32, 1e-6, 2e-6), (torch.bfloat16, 1e-6, 2**-7), (torch.float16, 1e-6, 2**-10)],
    ids=str,
)
@pytest.mark.usefixtures("chunks")
def test_multiplied_in_float32_it_is_no_further_from_float64_than_one_rounding(
    dtype: torch.dtype, of_loss: float, of_gradients: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "product_dtype", lambda input: torch.float32)
    leaves, target = tensors(dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    loss = linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2])
    expected = plain(exact[0], exact[1], target, exact[2])
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=of_loss, atol=0)
    loss.backward()
    for leaf, wanted in zip(leaves, torch.autograd.grad(expected, exact), strict=True):
        assert leaf.grad is not None and leaf.grad.dtype == dtype
        torch.testing.assert_close(leaf.grad.double(), wanted, rtol=0, atol=of_gradients * float(wanted.abs().max()))


@pytest.mark.parametrize(("product", "atol"), [(torch.float32, 1e-7), (torch.float16, 1e-5)], ids=str)
def test_small_gradients_in_float16_wait_for_the_scale_of_the_loss(
    product: torch.dtype, atol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divided by a million rows they are below the smallest number of float16, multiplied by the scale they are not."""
    monkeypatch.setattr(ops, "product_dtype", lambda input: product)
    (input, weight), target = tensors(torch.float16, bias=False)
    scale = 2.0**16
    loss = linear_cross_entropy(input, weight, target, reduction="sum") / 1e7 * scale
    loss.backward()
    exact = [leaf.detach().double().requires_grad_() for leaf in (input, weight)]
    (plain(*exact, target, None, reduction="sum") / 1e7 * scale).backward()
    torch.testing.assert_close(input.grad.double(), exact[0].grad, rtol=2**-9, atol=atol)


def test_16_bits_are_multiplied_as_they_are_where_the_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "product_dtype", lambda input: input.dtype)
    leaves, target = tensors(torch.bfloat16)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    loss = linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2])
    expected = plain(exact[0], exact[1], target, exact[2])
    torch.testing.assert_close(loss.double(), expected, rtol=1e-3, atol=0)
    loss.backward()
    for leaf, wanted in zip(leaves, torch.autograd.grad(expected, exact), strict=True):
        torch.testing.assert_close(leaf.grad.double(), wanted, rtol=0, atol=2**-6 * float(wanted.abs().max()))


def test_autocast_decides_on_the_dtype_and_gradients_keep_that_of_the_parameters() -> None:
    leaves, target = tensors(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2])
    loss.backward()
    low = [leaf.detach().bfloat16().requires_grad_() for leaf in leaves]
    expected = linear_cross_entropy(low[0], low[1], target, linear_bias=low[2])
    expected.backward()
    assert torch.equal(loss, expected)
    for leaf, other in zip(leaves, low, strict=True):
        assert leaf.grad.dtype == torch.float32
        assert torch.equal(leaf.grad, other.grad.float())


# ---- as programs use it ----------------------------------------------------------------------------------------------
def test_sequences_in_any_layout() -> None:
    (input, weight), target = tensors(bias=False)
    expected = linear_cross_entropy(input, weight, target)
    apart = input.detach().t().contiguous().t()
    assert torch.equal(linear_cross_entropy(apart, weight, target), expected)
    batch = torch.randn(4, 6, HIDDEN, dtype=torch.float64)
    targets = torch.randint(0, COLUMNS, (6, 4)).t()
    found = linear_cross_entropy(batch, weight, targets)
    wanted = linear_cross_entropy(batch.flatten(0, 1), weight, targets.reshape(-1))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("wanted", [*itertools.product([False, True], repeat=3)], ids=str)
def test_only_what_needs_a_gradient_gets_one(wanted: tuple[bool, ...]) -> None:
    leaves, target = tensors()
    for leaf, wants in zip(leaves, wanted, strict=True):
        leaf.requires_grad_(wants)
    loss = linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2])
    assert loss.requires_grad == any(wanted)
    if any(wanted):
        loss.backward()
    assert tuple(leaf.grad is not None for leaf in leaves) == wanted


def test_the_weight_of_an_embedding() -> None:
    torch.manual_seed(0)
    embedding = nn.Embedding(COLUMNS, HIDDEN, dtype=torch.float64)
    head = LinearCrossEntropyLoss(HIDDEN, COLUMNS, dtype=torch.float64)
    head.weight = embedding.weight
    tokens = torch.randint(0, COLUMNS, (3, 8))
    head(embedding(tokens)[:, :-1], tokens[:, 1:]).backward()
    found, embedding.weight.grad = embedding.weight.grad, None
    logits = functional.linear(embedding(tokens)[:, :-1], embedding.weight)
    functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    torch.testing.assert_close(found, embedding.weight.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_computes_it_again(use_reentrant: bool) -> None:
    leaves, target = tensors()
    loss = checkpoint(linear_cross_entropy, *leaves[:2], target, use_reentrant=use_reentrant)
    found = torch.autograd.grad(loss, leaves[:2]) if not use_reentrant else None
    if found is None:
        loss.backward()
        found = tuple(leaf.grad for leaf in leaves[:2])
    wanted = torch.autograd.grad(linear_cross_entropy(*leaves[:2], target), leaves[:2])
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_second_backward_pass_gives_the_same_and_a_second_derivative_is_an_error() -> None:
    (input, weight), target = tensors(bias=False)
    loss = linear_cross_entropy(input, weight, target)
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(SdkError, match="no derivative of a gradient"):
        torch.autograd.grad(loss, weight, create_graph=True)


def test_batched_gradients_are_those_one_by_one() -> None:
    (input, weight), target = tensors(bias=False)
    factors = torch.tensor([1.0, 3.0], dtype=torch.float64)
    loss = linear_cross_entropy(input, weight, target)
    one_by_one = [torch.autograd.grad(loss, weight, factor, retain_graph=True)[0] for factor in factors]
    (batched,) = torch.autograd.grad(loss, weight, factors, is_grads_batched=True)
    assert torch.equal(batched, torch.stack(one_by_one))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func's own
@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum", "label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 30.0}], ids=str
)
def test_transforms_of_torch_derive_all_logits(options: dict[str, Any]) -> None:
    """`torch.func` and forward-mode derivatives: tangents would be lost without a word."""
    leaves, target = tensors()
    input, weight, bias = (leaf.detach() for leaf in leaves)
    tangent = torch.randn_like(input)

    def ours(input: Tensor) -> Tensor:
        return linear_cross_entropy(input, weight, target, linear_bias=bias, **options)

    def torchs(input: Tensor) -> Tensor:
        return plain(input, weight, target, bias, **options)

    for transform in (torch.func.grad, torch.func.jacrev, torch.func.jacfwd, torch.func.hessian):
        torch.testing.assert_close(transform(ours)(input), transform(torchs)(input))
    torch.testing.assert_close(torch.func.jvp(ours, (input,), (tangent,)), torch.func.jvp(torchs, (input,), (tangent,)))
    expected = torch.func.jvp(torchs, (input,), (tangent,))[1]
    for wants in (False, True):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(input.clone().requires_grad_(wants), tangent)
            torch.testing.assert_close(forward_ad.unpack_dual(ours(dual)).tangent, expected)
    batch = torch.stack([input, 2 * input])
    one_by_one = torch.stack([*map(torch.func.grad(torchs), batch)])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(ours))(batch), one_by_one)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func's own
@pytest.mark.parametrize("cast", [False, True], ids=["float32", "autocast"])
def test_within_a_transform_dtypes_are_those_without(cast: bool) -> None:
    (input, weight), target = tensors(torch.float32, bias=False)
    input = input.detach()

    def loss(input: Tensor) -> Tensor:
        return linear_cross_entropy(input, weight, target, z_loss=0.1, reduction="sum")

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
        expected = loss(input)
        found = torch.vmap(loss)(input[None])
        value, tangent = torch.func.jvp(loss, (input,), (input,))
    assert found.dtype == value.dtype == tangent.dtype == torch.float32
    # By autocast in bfloat16, where the CPU is fast at it: products of other shapes are rounded otherwise.
    close = 2**-8 if cast else 1e-5
    torch.testing.assert_close(found[0], expected, rtol=close, atol=close)
    torch.testing.assert_close(value, expected, rtol=close, atol=close)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch's own call
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_program_keeps_tangents(backend: str) -> None:
    (input, weight), target = tensors(torch.float32, bias=False)
    input, weight = input.detach(), weight.detach()
    compiled = torch.compile(lambda input: linear_cross_entropy(input, weight, target), backend=backend)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(input, input)
        expected = forward_ad.unpack_dual(plain(dual, weight, target, None)).tangent
        torch.testing.assert_close(forward_ad.unpack_dual(compiled(dual)).tangent, expected)


def test_within_a_transform_what_does_not_fit_is_rejected() -> None:
    (input, weight), target = tensors(bias=False)
    with pytest.raises(InvalidTensorError, match="target has shape"):
        torch.func.grad(lambda input: linear_cross_entropy(input, weight, target[1:]))(input)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func's own
def test_an_op_drops_no_tangent() -> None:
    (input, weight), target = tensors(bias=False)
    with pytest.raises(SdkError, match="no forward-mode derivative"):
        torch.func.jvp(lambda input: ops.linear_cross_entropy(input, weight, target), (input,), (input,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(input.detach(), input.detach())
        with pytest.raises(SdkError, match="no forward-mode derivative"):
            ops.linear_cross_entropy(dual, weight, target)
        expected = ops.linear_cross_entropy(input, weight, target)
        each = torch.vmap(lambda input: ops.linear_cross_entropy(input, weight.detach(), target))
        torch.testing.assert_close(each(input.detach()[None])[0], expected.detach())
        with pytest.raises(SdkError, match="no forward-mode derivative"):
            each(dual[None])


def test_a_compiled_program_has_it_whole() -> None:
    leaves, target = tensors(torch.float32)

    def loss(input: Tensor, weight: Tensor) -> Tensor:
        return linear_cross_entropy(torch.tanh(input), weight, target)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    expected, found = loss(*leaves[:2]), compiled(*leaves[:2])
    assert torch.equal(found, expected)
    pairs = zip(torch.autograd.grad(found, leaves[:2]), torch.autograd.grad(expected, leaves[:2]), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# ---- edges -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [0, ROWS])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_nothing_to_learn_from_is_as_in_torch(rows: int, reduction: str) -> None:
    (input, weight), target = tensors(bias=False)
    target = torch.full_like(target, -100)[:rows]
    found = linear_cross_entropy(input[:rows], weight, target, reduction=reduction)
    expected = plain(input[:rows], weight, target, None, reduction=reduction)
    torch.testing.assert_close(found, expected, equal_nan=True)
    for gradient in torch.autograd.grad(found, (input, weight)):
        assert not gradient.any()


def test_a_nan_in_a_row_that_is_ignored_does_not_matter() -> None:
    (input, weight), target = tensors(bias=False)
    with torch.no_grad():
        input[5] = torch.nan
    loss = linear_cross_entropy(input, weight, target)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, (input, weight)))


def _changed(**changes: Any) -> dict[str, Any]:
    (input, weight, bias), target = tensors(torch.float32)
    return {"input": input, "linear_weight": weight, "target": target, "linear_bias": bias, **changes}


def _with_target(value: int) -> dict[str, Any]:
    arguments = _changed()
    arguments["target"][3] = value
    return arguments


WRONG = {
    "too large": (lambda: _with_target(COLUMNS), f"target has an entry {COLUMNS}"),
    "negative": (lambda: _with_target(-1), "target has an entry -1"),
    "int32": (lambda: _changed(target=torch.zeros(ROWS, dtype=torch.int32)), "target is int32"),
    "rows": (lambda: _changed(target=torch.zeros(3, dtype=torch.int64)), r"target has shape \[3\]"),
    "weight": (lambda: _changed(linear_weight=torch.zeros(COLUMNS, 5)), "weight has shape"),
    "bias": (lambda: _changed(linear_bias=torch.zeros(5)), "bias has shape"),
    "dtype": (lambda: _changed(linear_weight=torch.zeros(COLUMNS, HIDDEN).double()), "weight is float64"),
    "smoothing": (lambda: _changed(label_smoothing=1.5), "label_smoothing is 1.5"),
    "soft cap": (lambda: _changed(softcap=-1.0), "softcap is -1.0"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_what_does_not_fit_is_rejected(arguments: Callable[[], dict[str, Any]], message: str) -> None:
    with pytest.raises(InvalidTensorError, match=message):
        linear_cross_entropy(**arguments())


def test_another_reduction_is_an_error() -> None:
    with pytest.raises(ValueError, match="reduction='none'"):
        linear_cross_entropy(**_changed(reduction="none"))
    with pytest.raises(ValueError, match="reduction='none'"):
        LinearCrossEntropyLoss(4, 5, reduction="none")


# ---- memory ----------------------------------------------------------------------------------------------------------
def test_logits_are_never_held() -> None:
    input, weight = torch.randn(2048, 64, requires_grad=True), torch.randn(24_000, 64, requires_grad=True)
    target = torch.randint(0, 24_000, (2048,))

    def step(loss: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(loss(), (input, weight))

    ours = peak_bytes(step(lambda: linear_cross_entropy(input, weight, target)))
    torchs = peak_bytes(step(lambda: functional.cross_entropy(functional.linear(input, weight), target)))
    logits = 2048 * 24_000 * 4
    assert ours < logits / 2
    assert ours < torchs / 4


def test_the_gradient_of_the_weight_is_once_in_memory() -> None:
    """It is multiplied where it is; in float32 nothing else is as large."""
    input, weight = torch.randn(64, 256, requires_grad=True), torch.randn(32_000, 256, requires_grad=True)
    target = torch.randint(0, 32_000, (64,))
    peak = peak_bytes(lambda: torch.autograd.grad(linear_cross_entropy(input, weight, target), (input, weight)))
    logits = 64 * 32_000 * 4
    assert peak < weight.nbytes + 1.1 * logits


def test_in_bfloat16_the_gradient_of_the_weight_is_in_float32_only_as_a_sum_over_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ops, "product_dtype", lambda tensor: tensor.dtype)
    input, weight = (torch.randn(n, 256).bfloat16().requires_grad_() for n in (512, 32_000))
    target = torch.randint(0, 32_000, (512,))
    peak = peak_bytes(lambda: torch.autograd.grad(linear_cross_entropy(input, weight, target), (input, weight)))
    logits = 512 * 32_000 * 2
    grad = torch.randn(512, 32_000).bfloat16()
    products = (lambda: input @ weight.t(), lambda: grad @ weight, lambda: grad.t() @ input)
    with torch.no_grad():  # torch's own may add up in float32 first, or lay their operands out for AMX
        torchs = max(peak_bytes(each) - each().nbytes for each in products)
    assert peak < weight.nbytes + 1.1 * logits + torchs


# ---- the module ------------------------------------------------------------------------------------------------------
def _modules() -> Iterator[tuple[LinearCrossEntropyLoss, nn.Linear]]:
    for bias in (False, True):
        linear = nn.Linear(HIDDEN, COLUMNS, bias=bias, dtype=torch.float64)
        module = LinearCrossEntropyLoss(HIDDEN, COLUMNS, bias=bias, dtype=torch.float64, label_smoothing=0.1)
        module.load_state_dict(linear.state_dict())
        yield module, linear


def test_the_module_takes_the_state_of_a_linear_layer_and_says_what_it_is() -> None:
    (input, *_), target = tensors()
    for module, linear in _modules():
        expected = functional.cross_entropy(linear(input), target, label_smoothing=0.1)
        torch.testing.assert_close(module(input, target), expected, rtol=1e-12, atol=0)
        assert f"num_classes={COLUMNS}, bias={linear.bias is not None}" in str(module)
        assert module.weight.abs().max() <= HIDDEN**-0.5


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # TorchScript as such is deprecated
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # shapes are those of the example
def test_what_was_captured_without_gradients_is_not_trained_in_silence() -> None:
    loss = LinearCrossEntropyLoss(8, 50)
    x, target = torch.randn(6, 8), torch.randint(0, 50, (6,))
    with torch.no_grad():
        captured = torch.jit.trace(loss, (x, target))
    with pytest.raises(SdkError, match=r"no gradients were computed .*captured where they were not wanted"):
        captured(x, target).backward()
