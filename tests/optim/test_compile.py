"""Steps under torch.compile: nothing is compiled again from step to step, and results are those without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_plugin_sdk.optim import FusedAdagrad, FusedAdam, FusedLamb, FusedLion

FUSED = {"adam": FusedAdam, "adagrad": FusedAdagrad, "lion": FusedLion, "lamb": FusedLamb}
every_optimizer = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)


@pytest.fixture(scope="module", autouse=True)
def lamb_kernels(native: Callable[..., None]) -> None:
    native("lamb")


class Compiled:
    """A backend that counts graphs, and runs them as they are."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


class Training:
    """Parameters, an optimizer, and a learning rate that changes at each step."""

    def __init__(self, make: Callable[..., Optimizer]) -> None:
        torch.manual_seed(0)
        self.params = [torch.nn.Parameter(torch.randn(7, 5)) for _ in range(3)]
        self.optimizer = make(self.params, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)

    def loss(self) -> Tensor:
        inputs = torch.linspace(-1, 1, 15).view(3, 5)
        return torch.stack([(inputs @ param.t()).square().mean() for param in self.params]).sum()

    def backward(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss.detach()  # compilers ask what they are given for its gradient, and torch warns if it is no leaf

    def whole_step(self) -> None:
        self.backward()
        self.optimizer.step()


def graphs_after(steps: int, training: Training, step: Callable[[], Any], compiled: Compiled) -> list[int]:
    numbers = []
    for _ in range(steps):
        step()
        training.scheduler.step()
        numbers.append(compiled.graphs)
    return numbers


@every_optimizer
@pytest.mark.parametrize("what", ["step", "step with a closure", "whole step"])
def test_no_step_is_compiled_again(make: Callable[..., Optimizer], what: str) -> None:
    plain, training, compiled = Training(make), Training(make), Compiled()
    if what == "whole step":
        step = torch.compile(training.whole_step, backend=compiled)
    else:
        step_alone = torch.compile(training.optimizer.step, backend=compiled)

        def step() -> None:
            if what == "step":
                training.backward()
                step_alone()
            else:
                step_alone(training.backward)

    numbers = graphs_after(12, training, step, compiled)
    assert len(set(numbers)) == 1, numbers
    assert what != "whole step" or numbers[0] >= 1, "the loss was not compiled"
    graphs_after(12, plain, plain.whole_step, compiled)
    assert all(torch.equal(a, b) for a, b in zip(training.params, plain.params, strict=True))


@every_optimizer
def test_what_a_closure_calls_may_be_compiled(make: Callable[..., Optimizer]) -> None:
    training, compiled = Training(make), Compiled()
    training.loss = torch.compile(training.loss, backend=compiled)  # type: ignore[method-assign]  # for this test
    assert graphs_after(4, training, lambda: training.optimizer.step(training.backward), compiled) == [1, 1, 1, 1]
