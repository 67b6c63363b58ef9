"""The transformer layer against plain torch, in float64 and in the dtypes that people train in."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ds_plugin_sdk.errors import InvalidTensorError, SdkError
from ds_plugin_sdk.nn import TransformerLayer
from ds_plugin_sdk.ops import _products
from looking import Looking

HIDDEN, HEADS, INTER, BATCH = 48, 4, 80, 3
OPTIONS = ("attn_dropout_checkpoint", "normalize_invertible", "gelu_checkpoint")


@pytest.fixture(scope="module", autouse=True)
def kernels(native: Callable[..., None]) -> None:
    native("transformer")


def make(dtype: torch.dtype = torch.float64, **options: Any) -> TransformerLayer:
    """A layer whose biases and norms are not what they are at first."""
    torch.manual_seed(0)
    layer = TransformerLayer(HIDDEN, HEADS, INTER, initializer_range=0.2, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return layer.to(dtype)


def inputs(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Input, mask of keys, and gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(BATCH, tokens, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    mask = torch.where(torch.rand(BATCH, 1, 1, tokens, generator=generator) < 0.2, -10000.0, 0.0).to(dtype)
    mask[..., 0] = 0
    return x, mask, grad


def plain(layer: TransformerLayer, x: Tensor, mask: Tensor | None) -> Tensor:
    """The layer without dropout, in torch's own functions."""
    w = layer

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, (HIDDEN,), weight, bias, layer.layer.eps)

    def attention(x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in functional.linear(x, w.attn_qkvw, w.attn_qkvb).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(HIDDEN // HEADS)
        scores = scores if mask is None else scores + mask
        return functional.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), w.attn_ow, w.attn_ob)

    def feed_forward(x: Tensor) -> Tensor:
        inter = functional.linear(x, w.inter_w, w.inter_b)
        gelu = functional.gelu(inter, approximate="tanh" if layer.layer.tanh else "none")
        return functional.linear(gelu, w.output_w, w.output_b)

    if layer.layer.pre_layer_norm:
        x = x + attention(norm(x, w.norm_w, w.norm_b))
        return x + feed_forward(norm(x, w.attn_nw, w.attn_nb))
    x = norm(x + attention(x), w.attn_nw, w.attn_nb)
    return norm(x + feed_forward(x), w.norm_w, w.norm_b)


def train(layer: TransformerLayer, run: Callable[..., Tensor], x: Tensor, mask: Any, grad: Tensor) -> dict[str, Tensor]:
    """The result and all gradients of a step."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    result = run(x, mask)
    result.backward(grad)
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"result": result.detach(), "input": x.grad, **grads}


def distance(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """The norm of each difference, relative to the norm of what is expected."""
    return {
        name: ((value.double() - expected[name].double()).norm() / expected[name].double().norm()).item()
        for name, value in actual.items()
    }


# Measured: at most 1e-15, 9e-7, 0.012 and 0.0015.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 0.03, torch.float16: 0.004}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 16, 37])
@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_a_layer_agrees_with_plain_torch(dtype: torch.dtype, tokens: int, pre: bool, approximate: str) -> None:
    options = {"attn_dropout": 0.0, "hidden_dropout": 0.0, "pre_layer_norm": pre, "approximate": approximate}
    layer = make(dtype, **options)
    x, mask, grad = inputs(tokens, dtype)
    exact = make(torch.float64, **options)
    exact.load_state_dict(layer.state_dict())
    expected = train(exact, functools.partial(plain, exact), x.double(), mask.double(), grad.double())
    actual = train(layer, layer, x, mask, grad)
    assert all(value.dtype == dtype for value in actual.values())
    if tokens == 1:  # with one key queries and keys have no gradient
        for side in (actual, expected):
            side["attn_qkvw"], side["attn_qkvb"] = side["attn_qkvw"][2 * HIDDEN :], side["attn_qkvb"][2 * HIDDEN :]
    # A bias of the keys changes no softmax: its gradient is nothing but rounding.
    for side in (actual, expected):
        bias = side["attn_qkvb"]
        side["attn_qkvb"] = bias if tokens == 1 else torch.cat((bias[:HIDDEN], bias[2 * HIDDEN :]))
    errors = distance(actual, expected)
    assert max(errors.values()) < TOLERANCE[dtype], errors


@pytest.mark.parametrize("shape", [(1, 1, 20, 20), (BATCH, HEADS, 20, 20), (20, 20), (BATCH, 1, 1, 20)], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_masks_broadcast(shape: tuple[int, ...], p: float) -> None:
    layer = make(torch.float32, attn_dropout=p, hidden_dropout=0.0)
    x, _, grad = inputs(20, torch.float32)
    mask = torch.randn(shape)
    results = []
    for each in (mask, mask.expand(BATCH, HEADS, 20, 20).contiguous()):
        torch.manual_seed(4)
        results.append(train(layer, layer, x, each, grad))
    assert max(distance(*results).values()) < 1e-5


def test_evaluation_drops_nothing_and_can_be_differentiated() -> None:
    layer = make(normalize_invertible=True).eval()
    x, mask, grad = inputs(16, torch.float64)
    expected = train(layer, functools.partial(plain, layer), x, mask, grad)
    assert max(distance(train(layer, layer, x, mask, grad), expected).values()) < 1e-12
    with torch.no_grad():
        torch.testing.assert_close(layer(x, mask), expected["result"])


# ---------------------------------------------------------------------------------- autocast


def without_constants(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the gradient of the keys' bias, which is nothing but rounding."""
    bias = tensors["attn_qkvb"]
    return tensors | {"attn_qkvb": torch.cat((bias[:HIDDEN], bias[2 * HIDDEN :]))}


@pytest.mark.parametrize("backward_inside", [True, False], ids=["backward inside", "backward outside"])
@pytest.mark.parametrize("entering", [torch.float32, None], ids=["float32 input", "autocast's input"])
@pytest.mark.parametrize("options", [(), OPTIONS], ids=["keeping", "saving memory"])
@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in_its_dtype_and_gradients_reach_float32_leaves(
    dtype: torch.dtype, pre: bool, options: tuple[str, ...], entering: torch.dtype | None, backward_inside: bool
) -> None:
    saving = dict.fromkeys(options, True)
    layer = make(torch.float32, attn_dropout=0.0, hidden_dropout=0.0, pre_layer_norm=pre, **saving)
    exact = make(torch.float64, attn_dropout=0.0, hidden_dropout=0.0, pre_layer_norm=pre)
    x, mask, grad = inputs(37, torch.float32)
    expected = train(exact, functools.partial(plain, exact), x.double(), mask.double(), grad.double())

    x = x.to(entering or dtype).requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        result = layer(x, mask)
        if backward_inside:
            result.backward(grad.to(dtype))
    if not backward_inside:
        result.backward(grad.to(dtype))
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert result.dtype == dtype and x.grad is not None and x.grad.dtype == x.dtype
    assert {value.dtype for value in grads.values() if value is not None} == {torch.float32}
    actual: dict[str, Any] = {"result": result.detach(), "input": x.grad, **grads}
    errors = distance(without_constants(actual), without_constants(expected))
    assert max(errors.values()) < TOLERANCE[dtype], errors


def test_autocast_drops_what_a_seed_says_and_can_be_computed_again() -> None:
    layer = make(torch.float32)
    x, mask, grad = inputs(16, torch.float32)
    results = []
    for run in (layer, lambda *arguments: checkpoint(layer, *arguments, use_reentrant=False)):
        torch.manual_seed(9)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(train(layer, run, x, mask, grad.bfloat16()))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert results[0]["result"].dtype == torch.bfloat16


def test_autocast_takes_an_input_of_another_dtype_than_the_parameters() -> None:
    layer = make(torch.bfloat16, attn_dropout=0.0, hidden_dropout=0.0)
    x, mask, grad = inputs(16, torch.bfloat16)
    expected = train(layer, layer, x, mask, grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = train(layer, layer, x.float(), mask.float(), grad)
    assert actual["input"].dtype == torch.float32
    assert all(torch.equal(actual[name].to(value.dtype), value) for name, value in expected.items())


def test_autocast_leaves_float64_as_torch_does() -> None:
    layer = make(torch.float64).eval()
    x, mask, _ = inputs(16, torch.float64)
    expected = layer(x, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layer(x, mask), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_keeps_a_mask_of_float32_s_least_number_finite(dtype: torch.dtype) -> None:
    """A row with nothing to attend to then gives some mean of the values, not NaN."""
    layer = make(torch.float32).eval()
    x, _, _ = inputs(16, torch.float32)
    mask = torch.zeros(BATCH, 1, 1, 16)
    mask[0] = torch.finfo(torch.float32).min
    with torch.autocast("cpu", dtype=dtype):
        result = layer(x, mask)
    assert result[0].isfinite().all()
    assert distance({"rest": result[1:]}, {"rest": layer(x, mask)[1:]})["rest"] < TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile, each Function
@pytest.mark.parametrize("inverted", [False, True])
def test_a_layer_compiles_under_autocast(inverted: bool) -> None:
    layer = make(torch.float32, normalize_invertible=inverted)
    x, mask, grad = inputs(16, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for run in (layer, compiled):
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(train(layer, run, x, mask, grad.bfloat16()))
    assert results[1]["result"].dtype == torch.bfloat16
    assert max(distance(without_constants(results[1]), without_constants(results[0])).values()) < 0.02


# ---------------------------------------------------------------------------------- dropout


def every_option() -> Iterator[dict[str, bool]]:
    for pre in (True, False):
        yield {"pre_layer_norm": pre}
        yield from ({"pre_layer_norm": pre, option: True} for option in OPTIONS)
        yield {"pre_layer_norm": pre, **dict.fromkeys(OPTIONS, True)}


@pytest.mark.parametrize(
    "options", list(every_option()), ids=lambda options: ", ".join(k for k, v in options.items() if v)
)
def test_gradients_with_dropout_agree_with_finite_differences(options: dict[str, bool]) -> None:
    layer = make(attn_dropout=0.2, hidden_dropout=0.3, **options)
    x, mask, _ = inputs(5, torch.float64)
    names, values = zip(*layer.named_parameters(), strict=True)

    def step(x: Tensor, *parameters: Tensor) -> Tensor:
        torch.manual_seed(2)
        result: Tensor = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x, mask))
        return result

    assert torch.autograd.gradcheck(step, (x.requires_grad_(), *values), fast_mode=True)


@pytest.mark.parametrize(
    "options", list(every_option()), ids=lambda options: ", ".join(k for k, v in options.items() if v)
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_kept_changes_nothing(options: dict[str, bool], dtype: torch.dtype) -> None:
    x, mask, grad = inputs(37, dtype)
    results = []
    for chosen in (options, {"pre_layer_norm": options["pre_layer_norm"]}):
        layer = make(dtype, **chosen)
        torch.manual_seed(6)
        results.append(train(layer, layer, x, mask, grad))
    same = torch.equal(results[0]["result"], results[1]["result"])
    assert same and max(distance(*results).values()) < TOLERANCE[dtype]


def test_dropout_follows_the_seed() -> None:
    layer = make(torch.float32)
    x, mask, grad = inputs(16, torch.float32)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(train(layer, layer, x, mask, grad))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    assert not torch.equal(results[0]["result"], results[2]["result"])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_layer_that_is_computed_again_drops_the_same(reentrant: bool) -> None:
    layer = make(torch.float32)
    x, mask, grad = inputs(16, torch.float32)
    results = []
    for run in (layer, lambda *arguments: checkpoint(layer, *arguments, use_reentrant=reentrant)):
        torch.manual_seed(9)
        results.append(train(layer, run, x, mask, grad))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


# ---------------------------------------------------------------------------------- memory


def kept_bytes(p: float, **options: Any) -> int:
    """Bytes that a layer keeps for the backward pass, beside parameters, input and output."""
    layer = make(torch.float32, attn_dropout=p, hidden_dropout=p, **options)
    x, mask, _ = inputs(TOKENS, torch.float32)
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = layer(x.requires_grad_(), mask)
    known = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), mask, x, result)}
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in known)


TOKENS = 64
HIDDEN_BYTES = BATCH * TOKENS * HIDDEN * 4
INTER_BYTES = BATCH * TOKENS * INTER * 4
SCORE_BYTES = BATCH * HEADS * TOKENS * TOKENS * 4
# Seeds, and mean and deviation of each row in both norms.
SMALL_BYTES = 24 + 4 * BATCH * TOKENS * 4


@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
def test_a_layer_keeps_what_it_says_and_no_masks(pre: bool) -> None:
    """Queries, keys and values; context; both sums or norms; the two sides of gelu; scores before and after dropout."""
    assert kept_bytes(0.1, pre_layer_norm=pre) == 7 * HIDDEN_BYTES + 2 * INTER_BYTES + 2 * SCORE_BYTES + SMALL_BYTES


@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
def test_options_save_memory(pre: bool) -> None:
    everything = kept_bytes(0.1, pre_layer_norm=pre)
    saved = {option: everything - kept_bytes(0.1, pre_layer_norm=pre, **{option: True}) for option in OPTIONS}
    # Norms before: their input is mostly another layer's output, so that what counts is the inner one's.
    assert saved == {
        "attn_dropout_checkpoint": SCORE_BYTES,
        "normalize_invertible": HIDDEN_BYTES if pre else 2 * HIDDEN_BYTES,
        "gelu_checkpoint": INTER_BYTES,
    }


def test_without_dropout_no_scores_are_kept() -> None:
    rows = BATCH * HEADS * TOKENS * 4
    assert kept_bytes(0.0) == 7 * HIDDEN_BYTES + 2 * INTER_BYTES + rows + SMALL_BYTES


def allocated(function: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that torch's allocator has given out more after a call than before, and what the call returned."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function()
    return sum(event.self_cpu_memory_usage for event in profile.key_averages()), result


@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
def test_the_allocator_sees_the_saving(pre: bool) -> None:
    x, mask, _ = inputs(TOKENS, torch.float32)
    taken = {}
    for name, options in {"all": {}, "saving": dict.fromkeys(OPTIONS, True)}.items():
        layer = make(torch.float32, pre_layer_norm=pre, **options)
        layer(x.requires_grad_(), mask)
        taken[name], _result = allocated(lambda layer=layer: layer(x, mask))
    norms = 1 if pre else 2
    assert taken["all"] - taken["saving"] == SCORE_BYTES + norms * HIDDEN_BYTES + INTER_BYTES


# ---------------------------------------------------------------------------------- errors, state


def test_what_cannot_be_right_is_rejected() -> None:
    layer = make(torch.float32)
    x, mask, _ = inputs(8, torch.float32)
    with pytest.raises(InvalidTensorError, match="attn_qkvw is torch"):
        layer(x.double(), mask.double())
    with pytest.raises(InvalidTensorError, match="the mask is"):
        layer(x, mask[..., 1:])
    with pytest.raises(InvalidTensorError, match="input has shape"):
        layer(x[0], mask)
    inverted = make(torch.float32, normalize_invertible=True)
    with torch.no_grad():
        inverted.attn_nw[3] = 0
    with pytest.raises(InvalidTensorError, match="weight of 0 cannot be inverted"):
        inverted(x, mask)


@pytest.mark.parametrize(
    "options",
    [{"num_heads": 5}, {"num_heads": 0}, {"attn_dropout": 1.0}, {"hidden_dropout": -0.1}, {"approximate": ""}],
)
def test_options_out_of_range_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"TransformerLayer: {next(iter(options))}="):
        TransformerLayer(48, **{"num_heads": 4, **options})


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile, each Function
def test_a_layer_compiles() -> None:
    layer = make(torch.float32)
    x, mask, grad = inputs(16, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = []
    for run in (layer, compiled):
        torch.manual_seed(3)
        results.append(train(layer, run, x, mask, grad))
    assert max(distance(results[1], results[0]).values()) < 1e-5


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile, each Function
def test_a_weight_that_cannot_be_inverted_is_an_error_in_a_compiled_layer_too() -> None:
    layer = make(torch.float32, normalize_invertible=True)
    x, mask, _ = inputs(16, torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(x, mask)
    with torch.no_grad():
        layer.attn_nw[3] = 0
    with pytest.raises(RuntimeError, match="weight of 0 cannot be inverted"):
        compiled(x, mask)


@pytest.mark.parametrize("pre", [True, False], ids=["pre", "post"])
@pytest.mark.parametrize("p", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8)], ids=["no batch", "no tokens"])
def test_a_layer_of_nothing_gives_nothing(shape: tuple[int, ...], p: float, pre: bool) -> None:
    """The last batch of an expert, or of a pipeline."""
    layer = TransformerLayer(8, 2, attn_dropout=p, hidden_dropout=p, pre_layer_norm=pre)
    x = torch.randn(shape, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert all(param.grad is not None and not param.grad.any() for param in layer.parameters())


def test_a_gradient_that_is_derived_again_is_an_error() -> None:
    layer, x = TransformerLayer(8, 2, attn_dropout=0, hidden_dropout=0), torch.randn(2, 3, 8, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(layer(x).square().sum(), x)
    assert torch.equal(first, plain)
    with pytest.raises(SdkError, match="no derivative of a gradient"):
        first.square().sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func's own
def test_torch_func_is_an_error_that_says_so() -> None:
    """As are gradients for several directions at once."""
    layer, (input, *_) = make().eval(), inputs(5, torch.float64)
    parameters = dict(layer.named_parameters())
    several = {name: torch.stack([each, each]) for name, each in parameters.items()}

    def call(parameters: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(layer, parameters, (input,))

    torch.testing.assert_close(call(parameters), layer(input))
    for transformed, given in (
        (torch.func.vmap(call), several),
        (torch.func.grad(lambda all: call(all).sum()), parameters),
    ):
        with pytest.raises(SdkError, match=r"no torch\.func"):
            transformed(given)
    output = layer(input.requires_grad_())
    with pytest.raises(SdkError, match=r"no torch\.func"):
        torch.autograd.grad(output, input, torch.stack([output, output]), is_grads_batched=True)


def test_products_of_floats_by_our_own_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients are those by torch's; who watches operators or functions sees torch's."""
    layer, (input, *_) = make(torch.float32, pre_layer_norm=False).eval(), inputs(5, torch.float32)
    leaves = (input.requires_grad_(), *layer.parameters())
    expected = layer(input)
    gradients = torch.autograd.grad(expected.square().sum(), leaves)
    ours = Mock(wraps=_products.addmm_)
    monkeypatch.setattr(_products, "addmm_", ours)
    monkeypatch.setattr(_products, "multiplies_floats_fast", lambda: False)
    for name in ("_LEAST", "_LEAST_SIDE"):
        monkeypatch.setattr(_products, name, 0)
    found = layer(input)
    torch.testing.assert_close(found, expected)
    for one, wanted in zip(torch.autograd.grad(found.square().sum(), leaves), gradients, strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-4)
    assert ours.call_count == 12
    with FlopCounterMode(display=False):
        layer(input).sum().backward()
    with Looking():
        layer(input)
    assert ours.call_count == 12
