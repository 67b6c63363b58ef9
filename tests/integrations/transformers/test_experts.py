"""Experts: the weights that a token's router has chosen, one product each."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import LLAMA, logits, tokens
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from counted_calls import CountedCalls

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    import transformers
    from transformers.integrations import moe

from ds_plugin_sdk.integrations.transformers import accelerate
from ds_plugin_sdk.integrations.transformers.experts import is_experts

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS: dict[str, Callable[..., transformers.PreTrainedConfig]] = {
    "qwen3_moe": lambda **o: transformers.Qwen3MoeConfig(
        **LLAMA, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=3, head_dim=8, **_SPECIAL, **o
    ),
    "mixtral": lambda **o: transformers.MixtralConfig(
        **LLAMA, num_local_experts=4, num_experts_per_tok=2, **_SPECIAL, **o
    ),
}


def make(name: str = "qwen3_moe", implementation: str = "grouped_mm", **options: Any) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name](**options)).eval()
    for parameter in model.parameters():
        if parameter.dim() == 3:
            nn.init.normal_(parameter, std=0.3)
    model.set_experts_implementation(implementation)
    return model


def experts_of(model: Any, layer: int = 0) -> Any:
    return model.model.layers[layer].mlp.experts


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_they_give_what_transformers_gives(name: str, implementation: str) -> None:
    model = make(name, implementation)
    expected = logits(model)
    with accelerate(model) as handle:
        assert len(handle.experts) == 2 and "experts" in str(handle)
        with CountedCalls() as counted:
            ours = logits(model)
        assert counted.calls["linear"] > 2 * 2 * 3  # two products of each expert that is chosen
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
    assert handle.experts == [] and torch.equal(logits(model), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_in_other_dtypes(dtype: torch.dtype) -> None:
    """16 bits: no further from float64 than transformers' own."""
    model = make(implementation="eager").double()
    hidden = torch.randn(7, 32, dtype=torch.float64)
    chosen, shares = torch.rand(7, 6).topk(3).indices, torch.rand(7, 3, dtype=torch.float64)
    with torch.no_grad():
        exact = experts_of(model)(hidden, chosen, shares)
        experts, arguments = experts_of(model.to(dtype)), (hidden.to(dtype), chosen, shares.to(dtype))
        plain = experts(*arguments)
        with accelerate(model) as handle:
            assert handle.experts
            ours = experts(*arguments)
    assert ours.dtype == dtype
    assert (ours - exact).norm() <= 1.05 * (plain - exact).norm() + 1e-12 * exact.norm()


@pytest.mark.parametrize(("weights", "bound"), [("int8", 0.02), ("int4", 0.25)])
def test_their_weights_are_quantized(weights: Any, bound: float) -> None:
    model = make()
    hidden = torch.randn(5, 32)
    chosen, shares = torch.rand(5, 6).topk(3).indices, torch.rand(5, 3)
    with torch.no_grad():
        exact = experts_of(model)(hidden, chosen, shares)
        with accelerate(model, weights):
            ours = experts_of(model)(hidden, chosen, shares)
    assert 0 < (ours - exact).norm() < bound * exact.norm()


@pytest.mark.parametrize("weights", [None, "int8"])
def test_weights_that_change_are_followed(weights: Any) -> None:
    model = make()

    def follows() -> None:
        other = copy.deepcopy(model)
        with accelerate(other, weights):
            torch.testing.assert_close(logits(model), logits(other), rtol=1e-3, atol=1e-3)

    with accelerate(model, weights) as handle:
        before = logits(model)
        parameters = [each for each in model.parameters() if each.dim() == 3]
        for change in (
            lambda each: each.mul_(1.3),
            lambda each: each.data.add_(0.05),
            lambda each: setattr(each, "data", -each.data),
            lambda each: each.copy_(each.flip(0)),
        ):
            with torch.no_grad():
                for parameter in parameters:
                    change(parameter)
            follows()
            assert not torch.allclose(logits(model), before, atol=1e-2)
            before = logits(model)
        experts_of(model).down_proj = nn.Parameter(torch.zeros_like(experts_of(model).down_proj))
        follows()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(tokens(), labels=tokens()).loss.backward()
        optimizer.step()
        follows()
        assert len(handle.experts) == 2


def test_each_of_many_experts_is_followed() -> None:
    """As those that are pruned or loaded one by one."""
    torch.manual_seed(0)
    many = transformers.Qwen3MoeConfig(
        **LLAMA, moe_intermediate_size=16, num_experts=130, num_experts_per_tok=1, head_dim=8, **_SPECIAL
    )
    model = transformers.AutoModelForCausalLM.from_config(many).eval()
    hidden, share = torch.randn(1, 32), torch.ones(1, 1)
    with torch.no_grad(), accelerate(model, "int8"):
        experts = experts_of(model)
        for index in range(130):
            chosen = torch.tensor([[index]])
            before = experts(hidden, chosen, share)
            experts.down_proj.data[index] *= 2
            torch.testing.assert_close(experts(hidden, chosen, share), 2 * before, rtol=0.05, atol=1e-3)


def test_what_cannot_serve_any_more_is_not_kept() -> None:
    model = make()
    with torch.no_grad(), accelerate(model) as handle:
        logits(model)
        kept = StorageWeakRef(experts_of(model).down_proj.untyped_storage())
        model.to("meta")
        assert handle.experts == [] and kept.expired()


def test_another_dtype_and_back() -> None:
    model, hidden = make(), torch.randn(2, 32)
    arguments = torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.rand(2, 3)
    experts = experts_of(model)
    before = experts.gate_up_proj
    with torch.no_grad():
        expected = experts(hidden, *arguments)
        with accelerate(model) as handle:
            experts.gate_up_proj = nn.Parameter(before.bfloat16())
            assert "model.layers.0.mlp.experts" not in handle.experts
            experts.gate_up_proj = before
            assert "model.layers.0.mlp.experts" in handle.experts
            torch.testing.assert_close(experts(hidden, *arguments), expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_the_models_own() -> None:
    model, other = make(), make()
    with accelerate(model):
        for each in (model, other):
            each(tokens(), labels=tokens()).loss.backward()
    for ours, plain in zip(model.parameters(), other.parameters(), strict=True):
        if plain.grad is not None:
            torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-3, atol=1e-5)


def another_function(*args: Any) -> torch.Tensor:
    result: torch.Tensor = 2 * moe.grouped_mm_experts_forward(*args)
    return result


@functools.wraps(moe.grouped_mm_experts_forward)
def wrapped_function(*args: Any) -> torch.Tensor:
    return another_function(*args)


def another_gate(hidden: torch.Tensor) -> torch.Tensor:
    gate, up = hidden.chunk(2, dim=-1)
    return gate * up


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook": lambda experts: experts.register_forward_hook(lambda module, args, output: 2 * output),
    "another forward": lambda experts: setattr(experts, "forward", lambda hidden, *_: hidden),
    "another gate": lambda experts: setattr(experts, "_apply_gate", another_gate),
    "another activation": lambda experts: setattr(experts, "act_fn", nn.Sigmoid()),
    "no gate": lambda experts: setattr(experts, "_apply_gate", lambda both: both.chunk(2, dim=-1)[1]),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_what_is_changed_counts(name: str, implementation: str) -> None:
    model, other = make(implementation=implementation), make(implementation=implementation)
    CHANGES[name](experts_of(other, 1))
    with accelerate(model):
        logits(model)
        CHANGES[name](experts_of(model, 1))
        torch.testing.assert_close(logits(model), logits(other), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("function", [another_function, wrapped_function])
def test_another_function_in_the_registry_is_called(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = make(), make()
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "grouped_mm", function)
    monkeypatch.setitem(moe.ALL_EXPERTS_FUNCTIONS._global_mapping, "mine", another_function)
    with accelerate(model) as handle:
        for name in ("grouped_mm", "mine"):
            for each in (model, other):
                each.config._experts_implementation = name
            assert handle.experts == []
            torch.testing.assert_close(logits(model), logits(other), rtol=1e-4, atol=1e-4)


def test_classes_with_a_registry_of_their_own_are_left() -> None:
    own = moe.ExpertsInterface()
    own["grouped_mm"] = another_function
    kind = type(experts_of(make()))
    other = moe.use_experts_implementation(
        type("Others", (kind,), {"forward": kind.forward.__wrapped__}), experts_interface=own
    )
    assert is_experts(experts_of(make()))
    assert not is_experts(other(make().config))


@pytest.mark.parametrize(
    ("rows", "chosen"), [(2, (2, 0)), (4, (2, 3))], ids=["no expert for a token", "fewer choices than tokens"]
)
def test_shapes_that_do_not_fit_are_for_transformers(rows: int, chosen: tuple[int, int]) -> None:
    model = make(implementation="eager")
    arguments = torch.randn(rows, 32), torch.zeros(chosen, dtype=torch.int64), torch.rand(chosen)
    with torch.no_grad():
        expected = experts_of(model)(*arguments)
        with accelerate(model):
            torch.testing.assert_close(experts_of(model)(*arguments), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [0, 1, 40])
def test_any_number_of_tokens(count: int) -> None:
    model = make()
    hidden, shares = torch.randn(count, 32), torch.rand(count, 3)
    chosen = torch.rand(count, 6).topk(3).indices
    chosen[:, 1] = chosen[:, 0]  # twice the same
    with torch.no_grad():
        expected = experts_of(model)(hidden, chosen, shares)
        with accelerate(model):
            torch.testing.assert_close(experts_of(model)(hidden, chosen, shares), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [-1, 6])
def test_experts_that_there_are_not_are_for_transformers(wrong: int) -> None:
    """Whatever it does with them."""
    model = make(implementation="eager")
    arguments = torch.randn(2, 32), torch.tensor([[0, 1, 2], [0, 1, wrong]]), torch.rand(2, 3)

    def said() -> str:
        try:
            with torch.no_grad():
                return str(experts_of(model)(*arguments))
        except RuntimeError as error:
            return str(error)

    expected = said()
    with accelerate(model):
        assert said() == expected


def test_what_is_not_known_is_left() -> None:
    model = make()
    experts_of(model).is_transposed = True
    experts_of(model, 1)._is_expert_parallel = True
    with accelerate(model) as handle:
        assert handle.experts == []
        assert len([why for why in handle.left.values() if "by columns or on several ranks" in why]) == 2
