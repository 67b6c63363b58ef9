"""The optimizers against their namesakes in torch.optim, and how they keep state."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.optim import FusedAdagrad, FusedAdam, FusedLion

Make = Callable[[Any], Optimizer]


class TorchLion(Optimizer):
    """Lion as its paper's listing has it; torch has none."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_((m * beta1 + p.grad * (1 - beta1)).sign_(), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


PAIRS: dict[str, tuple[Make, Make]] = {
    "AdamW": (
        lambda params: FusedAdam(params, lr=1e-2, weight_decay=0.1),
        lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    ),
    "Adam with L2": (
        lambda params: FusedAdam(params, lr=1e-2, weight_decay=0.1, adamw=False),
        lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1),
    ),
    "Adagrad": (
        lambda params: FusedAdagrad(params, lr=1e-2, weight_decay=0.1, initial_accumulator_value=0.1),
        lambda params: torch.optim.Adagrad(params, lr=1e-2, weight_decay=0.1, initial_accumulator_value=0.1),
    ),
    "Lion": (
        lambda params: FusedLion(params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
        lambda params: TorchLion(params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1),
    ),
}
FUSED: dict[str, Callable[..., Optimizer]] = {"adam": FusedAdam, "adagrad": FusedAdagrad, "lion": FusedLion}


def model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(17, 33), torch.nn.LayerNorm(33), torch.nn.Linear(33, 5))
    return layers.to(dtype)


def train(network: torch.nn.Module, optimizer: Optimizer, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(8, 17, generator=generator).to(next(network.parameters()).dtype)
        network(inputs).float().square().mean().backward()
        optimizer.step()


def parameters(network: torch.nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in network.parameters()]


def assert_close(left: list[Tensor], right: list[Tensor], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


@pytest.mark.parametrize(("ours", "theirs"), PAIRS.values(), ids=PAIRS)
def test_twenty_steps_follow_torch(ours: Make, theirs: Make) -> None:
    left, right, before = model(), model(), parameters(model())
    train(left, ours(left.parameters()), 20)
    train(right, theirs(right.parameters()), 20)
    assert_close(parameters(left), parameters(right))
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(parameters(left), before, strict=True))


@pytest.mark.parametrize("state_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_low_precision_parameters(
    make: Callable[..., Optimizer], dtype: torch.dtype, state_dtype: torch.dtype | None
) -> None:
    low, full = model(dtype), model(dtype).float()
    # An eps that float16 states can hold their own against.
    options: dict[str, Any] = {"lr": 1e-3} if make is FusedLion else {"lr": 1e-3, "eps": 1e-4}
    optimizer = make(low.parameters(), state_dtype=state_dtype, **options)
    train(low, optimizer, 10)
    train(full, make(full.parameters(), **options), 10)
    assert_close([p.float() for p in parameters(low)], parameters(full), rtol=0.05, atol=0.02)
    states = {value.dtype for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)}
    assert states == {state_dtype or dtype}


def test_a_group_of_several_dtypes_is_stepped_by_dtype() -> None:
    mixed, alone = model(), model()
    for network in (mixed, alone):
        network[1].bfloat16()

    def gradients(network: torch.nn.Module) -> None:
        torch.manual_seed(3)
        for param in network.parameters():
            param.grad = torch.randn(param.shape).to(param.dtype)

    optimizer = FusedAdam(mixed.parameters(), lr=1e-2)
    others = [FusedAdam([param], lr=1e-2) for param in alone.parameters()]
    for _ in range(3):
        gradients(mixed)
        gradients(alone)
        optimizer.step()
        for other in others:
            other.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters(mixed), parameters(alone), strict=True))
    assert {state["step"] for state in optimizer.state.values()} == {3}


def test_parameters_without_gradients_wait() -> None:
    network = model()
    optimizer = FusedAdam(network.parameters(), lr=1e-2)
    first, *others = network.parameters()
    first.grad = torch.ones_like(first)
    before = parameters(network)
    optimizer.step()
    assert not torch.equal(first, before[0])
    assert all(torch.equal(a, b) for a, b in zip(others, before[1:], strict=True))
    assert first in optimizer.state
    assert others[0] not in optimizer.state or not optimizer.state[others[0]]


def test_each_parameter_counts_its_own_steps() -> None:
    """A parameter that joins late is corrected for the bias of its own first step, as in torch."""
    left, right = model(), model()
    ours, theirs = (
        FusedAdam(left.parameters(), lr=1e-2),
        torch.optim.AdamW(right.parameters(), lr=1e-2, weight_decay=0),
    )
    for step in range(4):
        for network, optimizer in ((left, ours), (right, theirs)):
            torch.manual_seed(step)
            for i, param in enumerate(network.parameters()):
                param.grad = torch.randn_like(param) if i % 2 == 0 or step >= 2 else None
            optimizer.step()
    assert_close(parameters(left), parameters(right), rtol=1e-5, atol=1e-6)
    assert {state["step"] for state in ours.state.values()} == {2, 4}


def test_groups_have_their_own_options() -> None:
    fast, slow = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(4))
    optimizer = FusedAdam([{"params": [fast], "lr": 0.1}, {"params": [slow]}], lr=0.01)
    fast.grad = slow.grad = torch.ones(4)
    optimizer.step()
    torch.testing.assert_close(fast.detach(), torch.full((4,), -0.1))
    torch.testing.assert_close(slow.detach(), torch.full((4,), -0.01))


def test_a_scheduler_drives_the_learning_rate() -> None:
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = FusedLion([param], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    for _ in range(2):
        param.grad = torch.ones(4)
        optimizer.step()
        scheduler.step()
    torch.testing.assert_close(param.detach(), torch.full((4,), -0.15))


def test_closure_is_evaluated_with_gradients() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param], lr=0.1)

    def closure() -> Tensor:
        loss = (param**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4
    assert (param < 1).all()


@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
def test_training_continues_from_a_checkpoint(make: Callable[..., Optimizer]) -> None:
    straight, resumed = model(), model()
    train(straight, optimizer := make(straight.parameters()), 5)
    file = io.BytesIO()
    torch.save({"model": straight.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(straight, optimizer, 5, seed=2)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed.load_state_dict(saved["model"])
    other = make(resumed.parameters())
    other.load_state_dict(saved["optimizer"])
    train(resumed, other, 5, seed=2)
    assert all(torch.equal(a, b) for a, b in zip(parameters(straight), parameters(resumed), strict=True))


def test_float32_states_survive_a_checkpoint_of_a_bfloat16_model() -> None:
    network = model(torch.bfloat16)
    train(network, optimizer := FusedAdam(network.parameters(), state_dtype=torch.float32), 3)
    other = FusedAdam(model(torch.bfloat16).parameters(), state_dtype=torch.float32)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for left, right in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert left["exp_avg"].dtype == right["exp_avg"].dtype == torch.float32
        assert torch.equal(left["exp_avg"], right["exp_avg"])


@pytest.mark.parametrize(("ours", "theirs"), [PAIRS["AdamW"], PAIRS["Adagrad"]], ids=["AdamW", "Adagrad"])
def test_checkpoints_of_torch_are_understood_and_understand_ours(ours: Make, theirs: Make) -> None:
    left, right = model(), model()
    optimizer = theirs(right.parameters())
    train(right, optimizer, 3)
    left.load_state_dict(right.state_dict())
    loaded = ours(left.parameters())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(left, loaded, 3, seed=2)
    train(right, optimizer, 3, seed=2)
    assert_close(parameters(left), parameters(right))
    optimizer.load_state_dict(copy.deepcopy(loaded.state_dict()))
    train(left, loaded, 3, seed=3)
    train(right, optimizer, 3, seed=3)
    assert_close(parameters(left), parameters(right))


def test_a_copy_steps_on_its_own() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdam([param], lr=0.1)
    param.grad = torch.ones(4)
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    before = param.detach().clone()
    twin.param_groups[0]["params"][0].grad = torch.ones(4)
    twin.step()
    assert torch.equal(param, before)
    assert twin.param_groups[0]["params"][0][0] < before[0]


def test_states_that_were_replaced_are_used() -> None:
    """Code that moves or reloads states puts new tensors into `optimizer.state`."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = FusedAdagrad([param], lr=0.1)
    param.grad = torch.ones(4)
    optimizer.step()
    replacement = optimizer.state[param]["sum"] = torch.full((4,), 8.0)
    optimizer.step()
    torch.testing.assert_close(replacement, torch.full((4,), 9.0))


def test_a_gradient_that_does_not_fit_is_rejected() -> None:
    param = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = FusedAdam([param])
    param.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(InvalidTensorError, match=r"grads\[0\] is not strided"):
        optimizer.step()
    assert (param == 1).all()
    assert optimizer.state[param]["step"] == 0


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (FusedAdam, {"lr": -1.0}, r"FusedAdam: lr=-1.0; expected at least 0"),
        (FusedAdam, {"betas": (0.9, 1.0)}, r"FusedAdam: betas\[1\]=1.0; expected at least 0 and less than 1"),
        (FusedAdagrad, {"eps": -1e-3}, r"FusedAdagrad: eps=-0.001"),
        (FusedAdagrad, {"initial_accumulator_value": -1.0}, r"initial_accumulator_value=-1.0"),
        (FusedLion, {"weight_decay": float("nan")}, r"FusedLion: weight_decay=nan"),
        (FusedAdam, {"state_dtype": torch.float16}, r"FusedAdam: state_dtype=torch.float16; expected torch.float32"),
        (FusedLion, {"state_dtype": "float32"}, r"FusedLion: state_dtype='float32'"),
    ],
    ids=str,
)
def test_options_are_checked(make: Callable[..., Optimizer], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([torch.nn.Parameter(torch.ones(1))], **options)
