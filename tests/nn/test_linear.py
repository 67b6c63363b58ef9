"""Linear layers in training: torch's numbers, rounded once, from products in float32; and whose call is torch's own."""

from __future__ import annotations

import importlib
import math
import os
import platform
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError, checkpoint
from torch.utils.flop_counter import FlopCounterMode

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.nn import Linear, linear
from ds_plugin_sdk.ops import _products
from ds_plugin_sdk.ops.matmul import addmm_
from looking import Looking

# The function has the module's name.
training: Any = importlib.import_module("ds_plugin_sdk.nn.linear")

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}
dtypes = pytest.mark.parametrize("dtype", ROUNDING, ids=str)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU at which torch's products are slow, and products that are never too small."""
    monkeypatch.setattr(_products, "multiplies_fast", lambda dtype: False)
    monkeypatch.setattr(_products, "multiplies_floats_fast", lambda: False)
    for name in ("_LEAST", "_ROWS"):
        monkeypatch.setattr(training, name, 0)
    for name in ("_LEAST", "_LEAST_SIDE", "_LEAST_WIDENED"):
        monkeypatch.setattr(_products, name, 0)


@pytest.fixture
def calls(slow: None, monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The shape of the weight of each product that is ours."""
    seen: list[torch.Size] = []
    original = training.multiply
    monkeypatch.setattr(
        training,
        "multiply",
        lambda input, weight, *rest, **options: seen.append(weight.shape) or original(input, weight, *rest, **options),
    )
    return seen


def tensors(dtype: torch.dtype, *leading: int, inner: int = 40, outer: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((*leading, inner), (outer, inner), (outer,))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def assert_rounded_once(found: Tensor, exact: Tensor, dtype: torch.dtype, lost: float = 1e-5) -> None:
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(
        found.double(), exact, rtol=ROUNDING[dtype], atol=lost * float(exact.detach().abs().max())
    )


@dtypes
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("parts", [None, (5, 7, 11)], ids=["whole", "in parts"])
@pytest.mark.parametrize("leading", [(13,), (2, 3, 5), ()], ids=str)
def test_results_and_gradients_are_exact_ones_rounded_once(
    leading: tuple[int, ...],
    parts: tuple[int, int, int] | None,
    bias: bool,
    dtype: torch.dtype,
    calls: list[torch.Size],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if parts is not None:
        for name, size in zip(("_ROWS", "_COLUMNS", "_SUMMED"), parts, strict=True):
            monkeypatch.setattr(_products, name, size)
    leaves = tensors(dtype, *leading)[: 3 if bias else 2]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found, expected = linear(*leaves), functional.linear(*exact)
    assert calls == [(24, 40)]
    assert_rounded_once(found, expected, dtype)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    ours = torch.autograd.grad(found, leaves, grad)
    for one, wanted in zip(ours, torch.autograd.grad(expected, exact, grad.double()), strict=True):
        assert_rounded_once(one, wanted, dtype)


@pytest.mark.usefixtures("slow")
def test_sizes_of_nothing() -> None:
    for rows, inner, outer in ((0, 4, 5), (3, 0, 5), (3, 4, 0)):
        input, weight, bias = tensors(torch.bfloat16, rows, inner=inner, outer=outer)
        found = linear(input, weight, bias)
        assert torch.equal(found, functional.linear(input, weight, bias))
        found.sum().backward()
        assert [input.grad.shape, weight.grad.shape] == [input.shape, weight.shape]
        assert not weight.grad.any()


@pytest.mark.usefixtures("slow")
def test_a_weight_by_columns_as_gpt2_keeps_it() -> None:
    input, weight, bias = tensors(torch.bfloat16, 13)
    turned = weight.detach().t().contiguous().requires_grad_()
    found, expected = training.multiply(input, turned, bias, transposed=True), linear(input, weight, bias)
    assert torch.equal(found, expected)
    found.sum().backward()
    assert turned.grad.is_contiguous() and torch.equal(turned.grad, torch.autograd.grad(expected.sum(), weight)[0].t())


@pytest.mark.usefixtures("slow")
def test_only_what_wants_a_gradient_gets_one() -> None:
    leaves = tensors(torch.bfloat16, 13)
    for wanted in range(3):
        for index, leaf in enumerate(leaves):
            leaf.requires_grad_(index == wanted).grad = None
        linear(*leaves).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == [index == wanted for index in range(3)]


@pytest.mark.usefixtures("slow")
def test_the_weight_itself_is_kept_as_zero_3_needs_it() -> None:
    """It takes numbers out of memory after the forward pass and gathers them before the backward pass."""
    input, weight, bias = tensors(torch.bfloat16, 13)
    expected = torch.autograd.grad(linear(input, weight, bias).sum(), input)[0]
    parameter = nn.Parameter(weight.detach().clone())
    found = linear(input, parameter, bias)
    gathered, parameter.data = parameter.data, torch.empty(0, dtype=torch.bfloat16)
    parameter.data = gathered.clone()
    gathered.zero_()
    assert torch.equal(torch.autograd.grad(found.sum(), input)[0], expected)


@pytest.mark.usefixtures("slow")
def test_a_weight_that_was_changed_in_between_is_an_error() -> None:
    input, weight, _ = tensors(torch.bfloat16, 13)
    found = linear(input, weight)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found.sum().backward()


@pytest.mark.usefixtures("slow")
def test_nothing_is_kept_that_no_gradient_needs() -> None:
    input, weight, bias = tensors(torch.bfloat16, 13)
    kept: list[torch.Size] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear(input, weight.detach(), bias)
        linear(input.detach(), weight)
        linear(input.detach(), weight.detach(), bias)
    kept = [shape for shape in kept if shape != (0,)]
    assert kept == [(24, 40), (13, 40)]


@pytest.mark.usefixtures("slow")
def test_autocast_keeps_no_copy_of_a_weight() -> None:
    """DeepSpeed's ZeRO 3 could not take it out of memory."""
    input, weight, _ = tensors(torch.float32, 13)
    kept: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16),
    ):
        linear(input, weight)
    assert sum(each is weight for each in kept) == 1 and all(each.shape != weight.shape for each in kept[:-1])


@pytest.mark.usefixtures("slow")
def test_batches_of_gradients() -> None:
    leaves = tensors(torch.bfloat16, 5)
    found = linear(*leaves)
    grads = torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(3)).bfloat16()
    batched = torch.autograd.grad(found, leaves, grads, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(found, leaves, grad, retain_graph=True) for grad in grads]
    for together, parts in zip(batched, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(parts), rtol=2**-6, atol=2**-4)


@pytest.mark.usefixtures("slow")
def test_second_derivatives() -> None:
    def second(function: Any, leaves: list[Tensor]) -> Tensor:
        (first,) = torch.autograd.grad(function(*leaves).square().sum(), leaves[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaves[1])[0]

    leaves = tensors(torch.bfloat16, 13)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = second(functional.linear, exact)
    error = (second(linear, leaves).double() - wanted).abs().max() / wanted.abs().max()
    assert error < 0.03


def test_autocast_casts_as_torchs_does(calls: list[torch.Size]) -> None:
    leaves = tensors(torch.float32, 13)
    rounded = [leaf.detach().bfloat16().double() for leaf in leaves]
    with torch.autocast("cpu", torch.bfloat16):
        found = linear(*leaves)
        gradients = torch.autograd.grad(found.float().sum(), leaves)
    assert len(calls) == 1
    assert_rounded_once(found, functional.linear(*rounded), torch.bfloat16)
    assert [each.dtype for each in gradients] == [torch.float32] * 3
    wanted = rounded[1].sum(dim=0).expand(13, 40)
    torch.testing.assert_close(gradients[0].double(), wanted, rtol=2**-7, atol=1e-4)


@pytest.mark.usefixtures("slow")
def test_checkpoints_and_saved_tensor_hooks() -> None:
    input, weight, bias = tensors(torch.bfloat16, 13)
    expected = torch.autograd.grad(linear(input, weight, bias).sum(), (input, weight))
    for reentrant in (True, False):
        found = checkpoint(linear, input, weight, bias, use_reentrant=reentrant)
        found.sum().backward()
        assert torch.equal(input.grad, expected[0]) and torch.equal(weight.grad, expected[1])
        input.grad = weight.grad = bias.grad = None
    with torch.autograd.graph.save_on_cpu():
        found = linear(input, weight, bias)
    assert torch.equal(torch.autograd.grad(found.sum(), weight)[0], expected[1])


@pytest.mark.usefixtures("slow")
def test_a_checkpoint_may_be_counted_in_one_of_its_passes() -> None:
    input, weight, bias = tensors(torch.bfloat16, 13)
    expected = torch.autograd.grad(linear(input, weight, bias).sum(), (input, weight))
    for forward, backward in ((counted, nullcontext), (nullcontext, counted)):
        with forward():
            found = checkpoint(linear, input, weight, bias, use_reentrant=False)
        with backward():
            gradients = torch.autograd.grad(found.sum(), (input, weight))
        for gradient, each in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, each, rtol=2**-7, atol=2**-7)


@pytest.mark.usefixtures("slow")
def test_modes_of_operators_see_torchs() -> None:
    input, weight, bias = tensors(torch.bfloat16, 13)
    expected = functional.linear(input, weight, bias)
    with counted() as counter:
        assert torch.equal(linear(input, weight, bias), expected)
    assert counter.get_total_flops() == 2 * 13 * 24 * 40


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("frozen", [False, True])
def test_a_mode_in_one_pass_of_a_checkpoint_is_an_error_not_a_wrong_gradient(frozen: bool) -> None:
    """torch keeps the weight transposed, and a square one looks alike."""
    input, weight, _ = tensors(torch.bfloat16, 24, inner=24)
    weight.requires_grad_(not frozen)
    with Looking():
        found = checkpoint(linear, input, weight, use_reentrant=False)
    with pytest.raises(CheckpointError, match="different metadata"):
        found.sum().backward()
    assert input.grad is None


def counted() -> FlopCounterMode:
    return FlopCounterMode(display=False)


class Subclass(Tensor):
    pass


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch.func's own
def test_all_other_calls_are_torchs(calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    input, weight, bias = (leaf.detach() for leaf in tensors(torch.bfloat16, 13))
    expected = functional.linear(input, weight, bias)
    assert torch.equal(linear(input.as_subclass(Subclass), weight, bias).as_subclass(Tensor), expected)
    mapped = torch.func.vmap(linear, in_dims=(0, None, None))(input, weight, bias)
    torch.testing.assert_close(mapped, expected, rtol=2**-6, atol=2**-6)
    torch.func.jvp(lambda x: linear(x, weight), (input,), (input,))
    torch.compile(linear, backend="eager", fullgraph=True)(input, weight, bias)
    linear(input.double(), weight.double())
    assert linear(input.to("meta"), weight.to("meta"), bias.to("meta")).is_meta
    nested = torch.nested.nested_tensor([input, input], layout=torch.jagged)
    assert torch.equal(linear(nested, weight).unbind()[0], functional.linear(input, weight))
    monkeypatch.setattr(_products, "multiplies_fast", lambda dtype: True)
    monkeypatch.setattr(_products, "multiplies_floats_fast", lambda: True)
    assert torch.equal(linear(input, weight, bias), expected)
    linear(input.float(), weight.float(), bias.float())
    assert not calls


@pytest.mark.parametrize(
    ("change", "autocast"),
    [
        (lambda input, weight, bias: (input, weight.float(), bias), False),
        (lambda input, weight, bias: (input[:, :-1], weight, bias), False),
        (lambda input, weight, bias: (input, weight[:, :-1], bias), False),
        (lambda input, weight, bias: (input, weight, bias.repeat(2)), False),
        (lambda input, weight, bias: (input, weight, bias.float()), False),
        (lambda input, weight, bias: (input, weight[None, None], None), False),
        (lambda input, weight, bias: (input.int(), weight, bias), True),
        (lambda input, weight, bias: (input, weight.double(), bias), True),
    ],
)
def test_what_torch_rejects_is_rejected(change: Any, autocast: bool, calls: list[torch.Size]) -> None:
    given = change(*(leaf.detach() for leaf in tensors(torch.bfloat16, 13)))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for function in (functional.linear, linear):
            with pytest.raises(RuntimeError):
                function(*given)
    assert not calls


def test_a_bias_that_torch_broadcasts_is_torchs(calls: list[torch.Size]) -> None:
    input, weight, bias = (leaf.detach() for leaf in tensors(torch.bfloat16, 13))
    for other in (bias[:1], bias[0]):
        assert torch.equal(linear(input, weight, other), functional.linear(input, weight, other))
    assert not calls


def test_a_default_device_changes_nothing(calls: list[torch.Size]) -> None:
    with torch.device("cpu"):
        linear(*tensors(torch.bfloat16, 13))
    assert len(calls) == 1


def test_small_products_are_torchs(calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    input, weight, _ = tensors(torch.bfloat16, 13)
    for name, more in (("_ROWS", 14), ("_LEAST", 13 * 24 * 40 + 1)):
        monkeypatch.setattr(training, name, more)
        linear(input, weight)
        assert not calls
        monkeypatch.setattr(training, name, more - 1)
        linear(input, weight)
        assert calls.pop()


def test_products_too_small_to_be_widened_are_torchs(slow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow that is: it takes no longer than to make floats of them."""
    a, b = torch.randn(13, 40).half(), torch.randn(40, 24).half()
    for least, torchs in ((13 * 40 * 24 + 1, 1), (13 * 40 * 24, 0)):
        monkeypatch.setattr(_products, "_LEAST_WIDENED", least)
        with torch.profiler.profile() as profiler:
            found = _products.product(a, b)
        assert sum(event.name == "aten::mm" for event in profiler.events()) == torchs
        assert_rounded_once(found, a.double() @ b.double(), torch.float16)


def test_thin_products_of_floats_are_torchs(calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    for sizes in ((13, 24, 40), (40, 13, 24), (24, 40, 13)):
        rows, inner, outer = sizes
        input, weight, _ = tensors(torch.float32, rows, inner=inner, outer=outer)
        for least, ours in ((14, False), (13, True)):
            monkeypatch.setattr(_products, "_LEAST_SIDE", least)
            linear(input, weight)
            assert bool(calls) == ours
            calls.clear()
    monkeypatch.setattr(_products, "has_kernel", lambda: False)  # nor can one be compiled
    linear(*tensors(torch.float32, 13))
    assert not calls


def test_who_lets_torch_multiply_floats_in_bfloat16_gets_that(calls: list[torch.Size]) -> None:
    input, weight, _ = tensors(torch.float32, 13)
    linear(input, weight)
    assert calls.pop()
    torch.set_float32_matmul_precision("medium")
    try:
        linear(input, weight)
        assert _products.torchs_from(torch.float32) <= _products._MANY_ON_AMD
    finally:
        torch.set_float32_matmul_precision("highest")
    assert not calls


def test_the_module_is_torchs_by_another_function(calls: list[torch.Size]) -> None:
    torch.manual_seed(0)
    module = Linear(40, 24, dtype=torch.bfloat16)
    theirs = nn.Linear(40, 24, dtype=torch.bfloat16)
    theirs.load_state_dict(module.state_dict())
    input = tensors(torch.bfloat16, 13)[0]
    torch.testing.assert_close(module(input), theirs(input), rtol=2**-7, atol=2**-8)
    assert calls == [(24, 40)]


def cpu(vendor: str, family: int, flags: str) -> Any:
    return _products._X86(vendor, family, frozenset(flags.split()))


@pytest.mark.parametrize(
    ("dtype", "vendor", "flags", "fast"),
    [
        (torch.bfloat16, "GenuineIntel", "avx2 avx512f", False),
        (torch.bfloat16, "GenuineIntel", "avx512f avx512_bf16", False),
        (torch.bfloat16, "GenuineIntel", "avx512_bf16 amx_bf16", True),
        (torch.bfloat16, "AuthenticAMD", "avx2", False),
        (torch.bfloat16, "AuthenticAMD", "avx512_bf16", True),
        (torch.float16, "GenuineIntel", "avx512_bf16 amx_bf16", False),
        (torch.float16, "GenuineIntel", "avx512_fp16", True),
        (torch.float16, "AuthenticAMD", "avx512_bf16", False),
    ],
)
def test_which_cpu_is_fast(dtype: torch.dtype, vendor: str, flags: str, fast: bool) -> None:
    assert _products._is_fast(dtype, cpu(vendor, 0, flags)) == fast


@pytest.mark.parametrize(
    ("flags", "answer", "amx"),
    [
        ("avx512_bf16 amx_bf16", 0, True),
        ("avx512_bf16 amx_bf16", -1, False),  # in a container whose seccomp filter does not know the call
        ("amx_bf16", 0, False),
        ("avx512_bf16", 0, False),
    ],
)
def test_amx_is_what_linux_gives(flags: str, answer: int, amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernels ask for it: else models would leave to torch what the op then takes, or the other way round."""
    library = SimpleNamespace(syscall=lambda *arguments: answer)
    monkeypatch.setattr(_products, "ctypes", SimpleNamespace(CDLL=lambda name: library))
    assert _products._has_amx(frozenset(flags.split())) == amx


@pytest.mark.parametrize(
    ("dtype", "vendor", "family", "flags", "inputs"),
    [
        (torch.float32, "GenuineIntel", 6, "avx2", 24),
        (torch.float32, "AuthenticAMD", 25, "avx2 avx512f", 24),
        (torch.float32, "AuthenticAMD", 25, "avx2", 256),
        (torch.float32, "AuthenticAMD", 26, "avx2 avx512f", math.inf),
        (torch.bfloat16, "AuthenticAMD", 26, "avx512f avx512_bf16", 8),
        (torch.bfloat16, "GenuineIntel", 6, "avx512f avx512_bf16", math.inf),
        (torch.bfloat16, "GenuineIntel", 6, "avx512_bf16 amx_bf16", 129),
        (torch.float16, "GenuineIntel", 6, "avx512_fp16", 24),
        (torch.float16, "GenuineIntel", 6, "avx512f", math.inf),
        (torch.float64, "AuthenticAMD", 26, "avx2 avx512f", 24),
    ],
)
def test_from_how_many_inputs_on_the_op_is_torchs(
    dtype: torch.dtype, vendor: str, family: int, flags: str, inputs: float
) -> None:
    assert _products._torchs_from(dtype, cpu(vendor, family, flags)) == inputs


@pytest.mark.parametrize(
    ("vendor", "family", "flags", "zen5"),
    [
        ("AuthenticAMD", 26, "avx512f", True),
        ("AuthenticAMD", 27, "avx512f", True),
        ("AuthenticAMD", 26, "avx2", False),  # a virtual machine may hide it
        ("AuthenticAMD", 25, "avx512f", False),
        ("GenuineIntel", 26, "avx512f", False),
    ],
)
def test_which_cpu_multiplies_floats_at_half_its_rate_by_torch(
    vendor: str, family: int, flags: str, zen5: bool
) -> None:
    assert _products._is_zen5(cpu(vendor, family, flags)) == zen5


def test_a_gradient_of_what_is_added_is_an_error() -> None:
    a, b = torch.ones(3, 5, requires_grad=True), torch.ones(5, 4)
    for given in ((a, b), (b.t(), a.t())):
        with pytest.raises(SdkError, match="no derivative"):
            addmm_(torch.zeros(given[0].shape[0], given[1].shape[1]), *given, beta=0)
    with pytest.raises(SdkError, match="no derivative"):
        torch.func.grad(lambda a: addmm_(torch.zeros(3, 4), a, b).sum())(a.detach())
    with torch.no_grad():
        assert addmm_(torch.zeros(3, 4), a, b).eq(5).all()


def test_the_rule_for_floats_is_that_of_the_kernels() -> None:
    """What `_products` takes for a slow product the op does by loops of its own, and no other."""
    if platform.machine() != "x86_64" or "DS_PLUGIN_CPU_LEVEL" in os.environ:
        pytest.skip("no x86-64, or DS_PLUGIN_CPU_LEVEL asks for other loops than this CPU's")
    for size in (_products._LEAST_SIDE, _products._LEAST_SIDE - 1):
        a, b = torch.randn(50, 1000), torch.randn(1000, size)
        # Sums of another order: of so many terms some differ in their last digit.
        by_torch = torch.equal(addmm_(torch.zeros(50, size), a, b), torch.zeros(50, size).addmm_(a, b))
        assert by_torch == (_products.multiplies_floats_fast() or size < _products._LEAST_SIDE)
