"""RMS norm, activations, rotary embedding by one op each: torch's numbers, rounded once; and whose call is torch's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.nn import Linear, RMSNorm, geglu, gelu, rms_norm, rotary, swiglu
from ds_plugin_sdk.ops.rotary import angles
from looking import Looking

fused: Any = importlib.import_module("ds_plugin_sdk.nn._fused")

ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
dtypes = pytest.mark.parametrize("dtype", ROUNDING, ids=str)

pytestmark = pytest.mark.compiler


class Function(NamedTuple):
    """One of ours, by its tensors; the same in torch's own functions; and how many tensors have gradients."""

    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]


def turn(x: Tensor, interleaved: bool) -> Tensor:
    """The formula, in the dtype of x."""
    cos, sin = (each.unsqueeze(1).to(x.dtype) for each in ANGLES)
    a, b = (x[..., 0:20:2], x[..., 1:20:2]) if interleaved else (x[..., :10], x[..., 10:20])
    pairs = [a * cos - b * sin, b * cos + a * sin]
    both = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat([both, x[..., 20:]], dim=-1)


ANGLES = angles(torch.arange(5, 12), 20)
HEADS = ((2, 3, 7, 24),)
FUNCTIONS = {
    "rms_norm": Function(
        lambda x, w: rms_norm(x, (33,), w, 1e-5),
        lambda x, w: functional.rms_norm(x, (33,), w, 1e-5),
        ((5, 7, 33), (33,)),
    ),
    "gelu": Function(gelu, functional.gelu, ((5, 7, 33),)),
    "gelu, tanh": Function(
        lambda x: gelu(x, approximate="tanh"), lambda x: functional.gelu(x, approximate="tanh"), ((33,),)
    ),
    "swiglu": Function(swiglu, lambda x, y: functional.silu(x) * y, ((5, 33), (5, 33))),
    "geglu": Function(geglu, lambda x, y: functional.gelu(x) * y, ((5, 33), (5, 33))),
    "geglu, tanh": Function(
        lambda x, y: geglu(x, y, approximate="tanh"),
        lambda x, y: functional.gelu(x, approximate="tanh") * y,
        ((5, 33), (5, 33)),
    ),
    "rotary": Function(lambda x: rotary(x, *ANGLES), lambda x: turn(x, False), HEADS),
    "rotary, whole heads": Function(lambda x: rotary(x, *ANGLES), lambda x: turn(x, False), ((2, 3, 7, 20),)),
    "rotary, interleaved": Function(lambda x: rotary(x, *ANGLES, interleaved=True), lambda x: turn(x, True), HEADS),
}
functions = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.fixture(autouse=True)
def kernels(native: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is too small."""
    native("transformer", "rotary")
    monkeypatch.setattr(fused, "_LEAST", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which ops were called by ours."""
    seen: list[str] = []
    original = fused.Fused.call

    def call(self: Any, *tensors: Tensor, **options: Any) -> Tensor:
        seen.append(self.op)
        return original(self, *tensors, **options)

    monkeypatch.setattr(fused.Fused, "call", call)
    yield seen


def leaves(function: Function, dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in function.shapes]


@functions
@dtypes
def test_results_and_gradients_are_exact_ones_rounded_once(name: str, dtype: torch.dtype, calls: list[str]) -> None:
    function = FUNCTIONS[name]
    tensors = leaves(function, dtype)
    exact = [each.detach().double().requires_grad_() for each in tensors]
    found, expected = function.ours(*tensors), function.torchs(*exact)
    assert len(calls) == 1
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    ours = torch.autograd.grad(found, tensors, grad)
    theirs = torch.autograd.grad(expected, exact, grad.double())
    for one, wanted, least in zip((found, *ours), (expected, *theirs), (1e-6, *[2e-5] * 3), strict=False):
        assert one.dtype == dtype
        largest = float(wanted.detach().abs().max())
        torch.testing.assert_close(one.double(), wanted, rtol=ROUNDING[dtype], atol=least * max(largest, 1))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func's own
@functions
def test_other_calls_are_torchs(name: str, calls: list[str]) -> None:
    function = FUNCTIONS[name]
    tensors = leaves(function, torch.float32)
    exact = [each.detach().double() for each in tensors]
    torch.testing.assert_close(function.ours(*exact), function.torchs(*exact))
    torch.func.jvp(function.ours, tuple(tensors), tuple(map(torch.ones_like, tensors)))
    several = torch.func.vmap(function.ours)(*(torch.stack([each, each]) for each in tensors))
    torch.testing.assert_close(several[1], function.torchs(*tensors))
    torch.compile(function.ours, backend="eager", fullgraph=True)(*tensors)

    class Tagged(Tensor):
        pass

    assert type(function.ours(tensors[0].detach().as_subclass(Tagged), *tensors[1:])) is Tagged
    meta = [each.detach().to("meta") for each in tensors]
    if "rotary" not in name:
        assert function.ours(*meta).is_meta
    assert not calls


@functions
def test_gradients_of_gradients_and_batches_of_them_are_torchs(name: str, calls: list[str]) -> None:
    function = FUNCTIONS[name]
    tensors = leaves(function, torch.float32)

    def derived(call: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(call(*tensors).square().sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(each.pow(3).sum() for each in first), tensors)

    torch.testing.assert_close(derived(function.ours), derived(function.torchs), rtol=1e-3, atol=1e-3)
    output = function.ours(*tensors)
    grads = torch.randn(4, *output.shape, generator=torch.Generator().manual_seed(3))
    together = torch.autograd.grad(output, tensors, grads, is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(output, tensors, grad, retain_graph=True) for grad in grads]
    torch.testing.assert_close(together, tuple(map(torch.stack, zip(*apart, strict=True))), rtol=1e-5, atol=1e-5)
    assert len(calls) == 2


@functions
def test_only_what_wants_a_gradient_gets_one(name: str) -> None:
    function = FUNCTIONS[name]
    tensors = leaves(function, torch.float32)
    for wanted in range(len(tensors)):
        for index, each in enumerate(tensors):
            each.requires_grad_(index == wanted).grad = None
        first = function.ours(*tensors)
        assert first.requires_grad
        torch.autograd.grad(first.sum(), tensors[wanted], create_graph=True)
        function.ours(*tensors).sum().backward()
        assert [each.grad is not None for each in tensors] == [index == wanted for index in range(len(tensors))]
    with torch.no_grad():
        assert not function.ours(*tensors).requires_grad


@functions
def test_checkpoints_saved_tensor_hooks_and_changes_in_place(name: str) -> None:
    function = FUNCTIONS[name]
    tensors = leaves(function, torch.float32)
    expected = torch.autograd.grad(function.ours(*tensors).sum(), tensors)
    again = checkpoint(function.ours, *tensors, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(again.sum(), tensors), expected))
    with torch.autograd.graph.save_on_cpu():
        output = function.ours(*tensors)
    assert all(map(torch.equal, torch.autograd.grad(output.sum(), tensors), expected))
    if "rotary" not in name:  # which keeps no input
        output = function.ours(*tensors)
        with torch.no_grad():
            tensors[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


@functions
def test_modes_of_operators_see_the_op_and_may_end_before_the_backward_pass(name: str, calls: list[str]) -> None:
    """As those that count operations: a checkpoint calls again what was called before, without them."""
    function = FUNCTIONS[name]
    tensors = leaves(function, torch.float32)
    with FlopCounterMode(display=False):
        output = checkpoint(function.ours, *tensors, use_reentrant=False)
    output.sum().backward()
    assert len(calls) == 2


@pytest.mark.parametrize("gate", [swiglu, geglu])
def test_a_mode_in_one_pass_of_a_checkpoint_makes_no_gradient_wrong(gate: Callable[..., Tensor]) -> None:
    """Of a gate without a gradient torch keeps another tensor of the same shape."""
    frozen, up = torch.randn(7, 40), torch.randn(7, 40, requires_grad=True)
    expected = torch.autograd.grad(gate(frozen, up).sum(), up)[0]
    for forward, backward in ((Looking, nullcontext), (nullcontext, Looking)):
        with forward():
            output = checkpoint(gate, frozen, up, use_reentrant=False)
        with backward():
            torch.testing.assert_close(torch.autograd.grad(output.sum(), up)[0], expected)


@functions
def test_layouts_are_those_of_torch(name: str) -> None:
    function = FUNCTIONS[name]
    tensors = [each.detach() for each in leaves(function, torch.float32)]
    if len(tensors[0].shape) > 1 and "rms_norm" not in name:
        tensors = [each.transpose(0, -2).contiguous().transpose(0, -2) for each in tensors]
    found, expected = function.ours(*tensors), function.torchs(*tensors)
    torch.testing.assert_close(found, expected)
    if "rotary" in name:  # the formula here makes its result anew
        expected = tensors[0]
    assert found.stride() == expected.stride()


def test_tensors_that_depend_on_each_other_are_derived_once() -> None:
    """Gradients of gradients, and batches of them, do not go past the function's own tensors."""
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    half: list[int] = []
    w.register_hook(lambda grad: half.append(1) or grad * 0.5)

    def two(norm: Callable[..., Tensor], gate: Callable[..., Tensor]) -> Tensor:
        y = norm(torch.tanh(norm(x * 1, (8,), w, 1e-5)), (8,), w, 1e-5)
        return gate(y, 2 * y) + gate(y, y)

    def derived(norm: Callable[..., Tensor], gate: Callable[..., Tensor]) -> list[Tensor]:
        first = torch.autograd.grad(two(norm, gate).square().sum(), (x, w), create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), (x, w))
        output = two(norm, gate)
        grads = torch.stack([torch.ones_like(output), torch.linspace(0, 1, 32).view(4, 8)])
        return [*first, *second, *torch.autograd.grad(output, (x, w), grads, is_grads_batched=True)]

    expected = derived(functional.rms_norm, lambda gate, up: functional.silu(gate) * up)
    hooks = len(half)
    for found, each in zip(derived(rms_norm, swiglu), expected, strict=True):
        # Second derivatives reach 1e6, and cancel.
        torch.testing.assert_close(found, each, rtol=1e-3, atol=1e-5 * float(each.detach().abs().max()))
    assert len(half) == 2 * hooks > 0


@pytest.mark.parametrize("frozen", ["weight", "both"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")  # it is what is tried
def test_what_is_frozen_after_the_forward_pass_is_left_out(frozen: str) -> None:
    """A penalty on gradients, while the norm is not trained."""

    def penalty(norm: Callable[..., Tensor]) -> tuple[Tensor, Tensor | None]:
        torch.manual_seed(0)
        x, w = torch.randn(4, 8, requires_grad=True), torch.ones(8, requires_grad=True)
        before = torch.randn(8, 8, requires_grad=True)
        output = norm(x @ before if frozen == "weight" else x, (8,), w, 1e-5)
        w.requires_grad_(False)
        if frozen == "both":
            x.requires_grad_(False)
            output.square().sum().backward(create_graph=True)
            return output, w.grad
        (first,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        first.square().sum().backward()
        assert before.grad is not None
        return before.grad, w.grad

    torch.testing.assert_close(penalty(rms_norm), penalty(functional.rms_norm), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func's own
def test_forward_derivatives_of_a_backward_pass() -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def tangent(norm: Callable[..., Tensor]) -> Tensor:
        output = norm(x, (8,), w, 1e-5)
        with forward_ad.dual_level():
            grad = forward_ad.make_dual(torch.ones_like(output), torch.linspace(0, 1, 32).view(4, 8))
            (found,) = torch.autograd.grad(output, x, grad)
            return forward_ad.unpack_dual(found).tangent

    torch.testing.assert_close(tangent(rms_norm), tangent(functional.rms_norm))


def test_tensors_of_inference_mode_are_for_torch(calls: list[str]) -> None:
    with torch.inference_mode():
        x = torch.randn(4, 8)
    w = torch.randn(8, requires_grad=True)
    rms_norm(x, (8,), w, 1e-5).sum().backward()
    assert w.grad is not None and not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_far_from_zero(dtype: torch.dtype, calls: list[str]) -> None:
    """Nothing is left of a gate that is far below it; one far above passes everything."""
    gate = torch.tensor([-3e38, -1e30, -1e4, -200.0, 200.0, 1e4, 1e30, 3e38], dtype=dtype, requires_grad=True)
    up = torch.full((8,), 0.5, dtype=dtype, requires_grad=True)
    for call in (swiglu, geglu, lambda gate, up: geglu(gate, up, approximate="tanh")):
        of_gate, of_up = torch.autograd.grad(call(gate, up).float().sum(), (gate, up))
        assert not of_gate[:4].any() and not of_up[:4].any()
        assert torch.equal(of_gate[4:], up.detach()[4:]) and torch.equal(of_up[4:], gate.detach()[4:])
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("shape", "cos"),
    [
        ((1, 7, 7, 8), (7, 4)),
        ((1, 2, 7, 8), (1, 1, 4)),
        ((1, 2, 7, 2), (1, 7, 5)),
        ((2, 7, 8), (1, 7, 4)),
    ],
    ids=str,
)
def test_angles_of_another_shape_are_an_error(shape: tuple[int, ...], cos: tuple[int, ...]) -> None:
    with pytest.raises(InvalidTensorError, match="rotary"):
        rotary(torch.randn(shape), torch.ones(cos), torch.ones(cos))
    with pytest.raises(InvalidTensorError, match="rotary"):
        rotary(torch.ones(1, 2, 7, 8, dtype=torch.int32), torch.ones(1, 7, 4), torch.ones(1, 7, 4))


def test_shapes_that_do_not_fit(calls: list[str]) -> None:
    x, weight = torch.randn(7, 33), torch.randn(33)
    torch.testing.assert_close(rms_norm(x, (33,), weight, 1e-5), functional.rms_norm(x, (33,), weight, 1e-5))
    assert calls == ["add_rms_norm"]
    # Torch's own errors and broadcasts.
    with pytest.raises(RuntimeError):
        rms_norm(x, (32,), torch.randn(32))
    assert swiglu(torch.randn(5, 33), torch.randn(33)).shape == (5, 33)
    with pytest.raises(ValueError, match="approximate='erf'"):
        geglu(x, x, approximate="erf")
    torch.testing.assert_close(rms_norm(x, (33,)), functional.rms_norm(x, (33,)))
    assert calls == ["add_rms_norm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_eps_it_is_torchs(dtype: torch.dtype, calls: list[str]) -> None:
    x, weight = (torch.randn(4, 33) * 2.0**-11).to(dtype), torch.randn(33).to(dtype)
    exact = functional.rms_norm(x.double(), (33,), weight.double(), torch.finfo(torch.float32).eps)
    assert (exact - functional.rms_norm(x.double(), (33,), weight.double(), 0.0)).abs().max() > 0.1
    for found in (rms_norm(x, (33,), weight), functional.rms_norm(x, (33,), weight)):
        torch.testing.assert_close(found.double(), exact, rtol=2 * ROUNDING[dtype], atol=1e-6)
    assert calls == ["add_rms_norm"]


def test_the_module_has_torchs_state_and_numbers(calls: list[str]) -> None:
    ours, torchs = RMSNorm(33), nn.RMSNorm(33)
    ours.load_state_dict(torchs.state_dict())
    x = torch.randn(4, 33)
    torch.testing.assert_close(ours(x), torchs(x))
    assert calls == ["add_rms_norm"]
    torch.testing.assert_close(RMSNorm(33, elementwise_affine=False)(x), torchs(x))
    torch.testing.assert_close(RMSNorm((4, 33))(x), nn.RMSNorm((4, 33))(x))
    assert calls == ["add_rms_norm"]


@pytest.mark.parametrize("call", [lambda x: rms_norm(x, (33,), torch.ones(33)), gelu], ids=["rms_norm", "gelu"])
def test_autocast_is_torchs(call: Callable[..., Tensor], calls: list[str]) -> None:
    x = torch.randn(4, 33)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(x).dtype == torch.float32
    assert not calls


def test_angles_that_want_gradients_get_them(calls: list[str]) -> None:
    x, cos, sin = torch.randn(1, 2, 7, 24), *(each.clone().requires_grad_() for each in ANGLES)
    grads = torch.autograd.grad(rotary(x, cos, sin).sum(), (cos, sin))
    assert all(each.shape == ANGLES[0].shape for each in grads) and not calls


class Block(nn.Module):
    """One of each, as models call them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = RMSNorm(33), Linear(33, 33)
        self.weight = nn.Parameter(torch.full((33,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.norm(x))
        x = gelu(rms_norm(x, (33,), self.weight, 1e-5), approximate="tanh")
        return swiglu(geglu(gelu(x), x), x)


def test_torch_fx_traces_them() -> None:
    block, x = Block(), torch.randn(5, 7, 33, requires_grad=True)
    traced = torch.fx.symbolic_trace(block)
    expected = block(x)
    torch.testing.assert_close(traced(x), expected)
    grads = torch.autograd.grad(expected.sum(), [x, *block.parameters()])
    torch.testing.assert_close(torch.autograd.grad(traced(x).sum(), [x, *block.parameters()]), grads)
    assert functional.rms_norm in {node.target for node in traced.graph.nodes}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler asks for it
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # what is looked up, not computed
@pytest.mark.parametrize("name", ["rms_norm", "gelu", "swiglu"])
def test_a_backward_pass_that_is_compiled(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a forward pass that was not: torch's compiled autograd."""
    from torch._dynamo import compiled_autograd

    monkeypatch.setattr(fused, "_LEAST", 1)
    function = FUNCTIONS[name]
    tensors = [torch.randn(shape, requires_grad=True) for shape in function.shapes]
    expected = torch.autograd.grad(function.torchs(*tensors).square().sum(), tensors)
    result = function.ours(*tensors).square().sum()
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        result.backward()
    for tensor, gradient in zip(tensors, expected, strict=True):
        torch.testing.assert_close(tensor.grad, gradient, rtol=1e-4, atol=1e-5)
