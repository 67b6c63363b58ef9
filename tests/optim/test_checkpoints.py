"""State dicts of torch's, apex's and DeepSpeed's optimizers, in both directions; hooks on the way.

DeepSpeed's own optimizers: `tests/integrations/deepspeed/test_optimizer_checkpoints.py`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict as distributed
from torch.optim import Optimizer

from ds_plugin_sdk.errors import CheckpointError
from ds_plugin_sdk.optim import FusedAdagrad, FusedAdam, FusedLamb, FusedLion


@pytest.fixture(scope="module", autouse=True)
def lamb_kernels(native: Callable[..., None]) -> None:
    native("lamb")


class ApexAdam(Optimizer):
    """AdamW with what apex's FusedAdam keeps: moments by parameter, and the step in the group."""

    def __init__(self, params: Any, lr: float, weight_decay: float) -> None:
        defaults = {"lr": lr, "bias_correction": True, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            (beta1, beta2), lr, t = group["betas"], group["lr"], group["step"]
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                v = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                p.mul_(1 - lr * group["weight_decay"])
                p.addcdiv_(m / (1 - beta1**t), (v / (1 - beta2**t)).sqrt() + group["eps"], value=-lr)


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(17, 5)), torch.nn.Parameter(torch.randn(9))]


def train(optimizer: Optimizer, steps: int, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach() for param in params]


def take_over(new: Optimizer, old: Optimizer) -> None:
    """Parameters and states of another optimizer."""
    with torch.no_grad():
        for mine, its in zip(new.param_groups[0]["params"], old.param_groups[0]["params"], strict=True):
            mine.copy_(its)
    new.load_state_dict(copy.deepcopy(old.state_dict()))


def assert_go_on_alike(left: Optimizer, right: Optimizer, seed: int) -> None:
    for a, b in zip(train(left, 3, seed), train(right, 3, seed), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


NAMESAKES: dict[str, tuple[Callable[..., Optimizer], Callable[..., Optimizer]]] = {
    "torch's AdamW": (
        lambda: FusedAdam(parameters(), lr=1.0),
        lambda: torch.optim.AdamW(parameters(), lr=1e-2, weight_decay=0.1),
    ),
    "torch's Adam": (
        lambda: FusedAdam(parameters(), lr=1.0),
        lambda: torch.optim.Adam(parameters(), lr=1e-2, weight_decay=0.1),
    ),
    "torch's Adagrad": (
        lambda: FusedAdagrad(parameters(), lr=1.0),
        lambda: torch.optim.Adagrad(parameters(), lr=1e-2, weight_decay=0.1),
    ),
    "apex's FusedAdam": (
        lambda: FusedAdam(parameters(), lr=1.0),
        lambda: ApexAdam(parameters(), lr=1e-2, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize(("make_ours", "make_theirs"), NAMESAKES.values(), ids=NAMESAKES)
def test_state_dicts_go_both_ways(make_ours: Callable[..., Optimizer], make_theirs: Callable[..., Optimizer]) -> None:
    ours, theirs = make_ours(), make_theirs()
    train(theirs, 5, seed=1)
    take_over(ours, theirs)
    assert {state["step"] for state in ours.state.values()} == {5}
    assert_go_on_alike(ours, theirs, seed=2)
    fresh = make_theirs()
    take_over(fresh, ours)
    assert_go_on_alike(ours, fresh, seed=3)


OF_TORCH: dict[str, tuple[Callable[..., Optimizer], Callable[..., Optimizer]]] = {
    "AdamW": (FusedAdam, torch.optim.AdamW),
    "Adam": (lambda *args, **kwargs: FusedAdam(*args, adamw=False, **kwargs), torch.optim.Adam),
    "Adagrad": (FusedAdagrad, torch.optim.Adagrad),
}
# Of options that change the result the state dict has the last word. (With differentiable=True torch steps on no leaf.)
TORCH_OPTIONS = ["foreach", "fused", "maximize", "capturable", "amsgrad", "lr_decay"]


@pytest.mark.parametrize(
    ("name", "option"),
    [
        (name, option)
        for name, (_, make_torch) in OF_TORCH.items()
        for option in [None, *TORCH_OPTIONS]
        if option is None or option in inspect.signature(make_torch).parameters
    ],
)
def test_torch_goes_on_from_ours_whatever_options_it_was_made_with(name: str, option: str | None) -> None:
    make, make_torch = OF_TORCH[name]
    train(ours := make(parameters(), lr=1e-2, weight_decay=0.1), 3, seed=1)
    theirs = make_torch(parameters(), **({option: True} if option else {}))
    take_over(theirs, ours)
    assert_go_on_alike(ours, theirs, seed=2)
    saved = theirs.state_dict()["param_groups"][0]
    assert make_torch(parameters()).state_dict()["param_groups"][0].keys() <= saved.keys(), "torch's lacks an option"


@pytest.mark.parametrize("option", [None, "foreach", "fused"])
@pytest.mark.parametrize(("make", "make_torch"), OF_TORCH.values(), ids=OF_TORCH)
def test_ours_goes_on_from_torch_whatever_computed_its_steps(
    make: Callable[..., Optimizer], make_torch: Callable[..., Optimizer], option: str | None
) -> None:
    train(
        theirs := make_torch(parameters(), lr=1e-2, weight_decay=0.1, **({option: True} if option else {})), 3, seed=1
    )
    ours = make(parameters())
    take_over(ours, theirs)
    assert_go_on_alike(ours, theirs, seed=2)
    take_over(theirs, ours)
    assert_go_on_alike(ours, theirs, seed=3)


def test_a_step_in_the_group_does_not_go_stale() -> None:
    ours = FusedAdam(parameters(), lr=1e-2)
    train(theirs := ApexAdam(parameters(), lr=1e-2, weight_decay=0.0), 5, seed=1)
    take_over(ours, theirs)
    train(ours, 3, seed=2)
    assert "step" not in ours.param_groups[0]
    assert ours.state_dict()["param_groups"][0]["step"] == 8


@pytest.mark.parametrize("number", [torch.tensor(4.0), torch.tensor([4], dtype=torch.int32)], ids=["float", "int32"])
def test_a_step_in_the_group_may_be_a_tensor(number: Tensor) -> None:
    train(theirs := ApexAdam(parameters(), lr=1e-2, weight_decay=0.0), 4, seed=1)
    theirs.param_groups[0]["step"] = number
    ours = FusedAdam(parameters())
    take_over(ours, theirs)
    assert {state["step"] for state in ours.state.values()} == {4}


def test_a_step_that_only_one_state_counted_is_that_of_the_group() -> None:
    """DeepSpeed's FusedAdam and FusedLion count in the state of the last parameter."""
    train(reference := FusedAdam(parameters(), lr=1e-2), 5, seed=1)
    ours = FusedAdam(parameters(), lr=1e-2)
    saved = copy.deepcopy(reference.state_dict())
    del saved["param_groups"][0]["step"], saved["param_groups"][0]["state_dtype"]
    saved["state"][0]["step"] = 0
    ours.load_state_dict(saved)
    assert [state["step"] for state in ours.state.values()] == [5, 5]


def test_who_took_over_our_groups_may_count_elsewhere() -> None:
    """DeepSpeed's FusedAdam that has loaded a state dict of ours from before the first step."""
    train(reference := FusedAdam(parameters(), lr=1e-2), 5, seed=1)
    saved = copy.deepcopy(reference.state_dict())
    saved["param_groups"][0]["step"] = 0
    saved["state"][0]["step"] = 0
    ours = FusedAdam(parameters(), lr=1e-2)
    ours.load_state_dict(saved)
    assert [state["step"] for state in ours.state.values()] == [5, 5]


@pytest.mark.parametrize("count", [1, 2])
def test_a_step_that_was_set_back_stays_so(count: int) -> None:
    """Bias correction anew, with the moments that there are."""
    train(reference := FusedAdam(parameters(), lr=1e-2), 5, seed=1)
    for state in list(reference.state.values())[:count]:
        state["step"] = 0
    take_over(ours := FusedAdam(parameters(), lr=1e-2), reference)
    for other in (ours, copy.deepcopy(reference)):
        assert [state["step"] for state in other.state.values()] == [0, 0 if count == 2 else 5]
    assert_go_on_alike(ours, reference, seed=2)


def test_a_parameter_that_has_not_stepped_begins_with_its_first_step() -> None:
    first, second = parameters()
    optimizer = FusedAdam([first, second], lr=1e-2)
    first.grad = torch.ones_like(first)
    optimizer.step()
    optimizer.step()
    second.grad = torch.ones_like(second)
    other = FusedAdam(parameters(), lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    optimizer.step()
    other.param_groups[0]["params"][0].grad, other.param_groups[0]["params"][1].grad = first.grad, second.grad
    other.step()
    assert [state["step"] for state in other.state.values()] == [3, 1]


@pytest.mark.parametrize("make", [FusedAdam, FusedLamb])
def test_moments_that_nobody_numbered_are_an_error(make: Callable[..., Optimizer]) -> None:
    optimizer = make(parameters(), lr=0.25)
    train(optimizer, 2, seed=1)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["step"]
    for state in saved["state"].values():
        del state["step"]
    saved["param_groups"][0]["lr"] = 0.5
    with pytest.raises(CheckpointError, match=f'{make.__name__} cannot go on .* number the steps\\n.*set "step"'):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.25, "something was loaded"


@pytest.mark.parametrize("make", [FusedLion, FusedAdagrad])
def test_where_the_step_has_no_part_in_the_formula_nobody_need_number_it(make: Callable[..., Optimizer]) -> None:
    train(reference := make(parameters(), lr=1e-2), 3, seed=1)
    saved = copy.deepcopy(reference.state_dict())
    del saved["param_groups"][0]["step"]
    for state in saved["state"].values():
        del state["step"]
    ours = make(parameters(), lr=1e-2)
    take_over(ours, reference)
    ours.load_state_dict(saved)
    assert_go_on_alike(ours, reference, seed=2)


@pytest.mark.parametrize(("saved", "dtype"), [("bfloat16", "float32"), ("bfloat16", "float16"), ("float64", "float32")])
@pytest.mark.parametrize("state_dtype", [None, torch.float32])
def test_states_of_a_dtype_that_no_op_takes_become_those_of_new_ones(
    saved: str, dtype: str, state_dtype: torch.dtype | None
) -> None:
    """Pretraining in bfloat16, gone on with in float32."""
    kind = getattr(torch, dtype)
    before = torch.nn.Parameter(torch.ones(4, dtype=getattr(torch, saved)))
    source = torch.optim.AdamW([before])
    before.grad = torch.ones_like(before)
    source.step()
    after = torch.nn.Parameter(before.detach().to(kind))
    ours = FusedAdam([after], state_dtype=state_dtype)
    ours.load_state_dict(source.state_dict())
    state = ours.state[after]["exp_avg"]
    assert state.dtype == (state_dtype or kind) and torch.allclose(state, source.state[before]["exp_avg"].to(state))
    after.grad = torch.ones_like(after)
    ours.step()


def test_a_step_that_only_the_group_counts_is_that_of_parameters_that_have_not_moved_either() -> None:
    """As LoRA's first matrix, whose gradients are zeros as long as the second is zero."""
    params = parameters()
    apex = ApexAdam(params, lr=1e-2, weight_decay=0.0)
    for _ in range(10):
        for param in params:
            param.grad = torch.zeros_like(param)
        apex.step()
    ours = FusedAdam(parameters(), lr=1e-2)
    ours.load_state_dict(apex.state_dict())
    assert [state["step"] for state in ours.state.values()] == [10, 10]


def test_hooks_of_a_state_dict_see_all_of_it_and_may_return_another() -> None:
    train(ours := FusedAdam(parameters()), 1, seed=1)
    ours.register_state_dict_post_hook(lambda _, packed: {"optimizer": packed, "version": 1})
    saved = ours.state_dict()
    assert saved["version"] == 1
    group = saved["optimizer"]["param_groups"][0]
    assert group["step"] == 1 and group["decoupled_weight_decay"] is True


@pytest.mark.parametrize("make", [FusedAdam, FusedAdagrad, FusedLion, FusedLamb])
def test_another_optimizer_s_states_are_an_error(make: Callable[..., Optimizer]) -> None:
    other = torch.optim.SGD(parameters(), lr=1e-2, momentum=0.9)
    train(other, 1, seed=1)
    with pytest.raises(CheckpointError, match=f"not one of {make.__name__}.*a state has momentum_buffer, and no"):
        make(parameters()).load_state_dict(other.state_dict())


def test_hooks_see_and_replace_what_is_loaded() -> None:
    """A hook before loading may return another state dict; one after it has the last word."""
    train(source := FusedAdam(parameters(), lr=1e-2), 2, seed=1)
    replaced = copy.deepcopy(source.state_dict())
    replaced["state"][0]["exp_avg"].fill_(3.0)
    ours = FusedAdam(parameters(), lr=1e-2)
    ours.register_load_state_dict_pre_hook(lambda _, __: replaced)

    def after(optimizer: Optimizer) -> None:
        optimizer.state[optimizer.param_groups[0]["params"][1]]["exp_avg"] = torch.full((9,), 7.0)

    ours.register_load_state_dict_post_hook(after)
    ours.load_state_dict(source.state_dict())
    first, second = ours.param_groups[0]["params"]
    assert ours.state[first]["exp_avg"].unique().tolist() == [3.0]
    assert ours.state[second]["exp_avg"].unique().tolist() == [7.0]


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("make", [FusedAdam, FusedAdagrad, FusedLion, FusedLamb])
def test_torch_s_distributed_state_dicts_are_saved_and_loaded(make: Callable[..., Optimizer], flat: bool) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = parameters()

    options = distributed.StateDictOptions(flatten_optimizer_state_dict=flat)
    model, other = Model(), Model()
    optimizer, loaded = make(model.parameters(), lr=1e-2), make(other.parameters(), lr=1.0)
    train(optimizer, 3, seed=1)
    saved = distributed.get_optimizer_state_dict(model, optimizer, options=options)
    distributed.set_optimizer_state_dict(other, loaded, copy.deepcopy(saved), options=options)
    other.load_state_dict(model.state_dict())
    for a, b in zip(train(optimizer, 3, seed=2), train(loaded, 3, seed=2), strict=True):
        assert torch.equal(a, b)
