"""Models that are trained, wrapped or not, accelerated before or after: gradients and steps are the plain model's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import assert_as_plain, logits, make, tokens
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ds_plugin_sdk.integrations.transformers import accelerate

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """This process is the only rank."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def gradients(model: Any, called: Any) -> list[torch.Tensor]:
    called(tokens(), labels=tokens()).loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in found]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("order", ["before", "after", "for a while", "removed", "called before", "called and removed"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradients_in_distributed_data_parallel(name: str, order: str) -> None:
    plain, model = make(name), make(name)
    expected = gradients(plain, plain)
    wrapped = DistributedDataParallel(model) if order in ("after", "for a while") else None
    handle = accelerate(model)
    if "called" in order:
        logits(model)
    wrapped = wrapped or DistributedDataParallel(model)
    if order != "after":
        assert_as_plain(model)
    if "removed" in order or order == "for a while":
        handle.remove()
    torch.testing.assert_close(gradients(model, wrapped), expected)
    assert_as_plain(model)
    torch.testing.assert_close(gradients(plain, plain), gradients(model, wrapped))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradients_in_fully_shard(name: str, order: str) -> None:
    plain, model = make(name), make(name)
    expected = gradients(plain, plain)
    if order == "before":
        str(accelerate(model))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    if order == "after":
        accelerate(model)
    torch.testing.assert_close(gradients(model, model), expected)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrap", ["layers", "root"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_fully_shard_gathers_new_weights_after_an_evaluation(name: str, wrap: str) -> None:
    """It does so into the memory of the same parameters, and torch does not count it as a change."""
    plain, model = make(name), make(name)
    handle = accelerate(model)
    mesh = init_device_mesh("cpu", (1,))
    if wrap == "layers":
        for layer in model.transformer.h if name == "gpt2" else model.model.layers:
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        torch.testing.assert_close(logits(model), logits(plain), rtol=1e-3, atol=1e-3)
        for each in (plain, model):
            state = {key: 0.9 * value for key, value in each.state_dict().items()}
            each.load_state_dict(state)
    torch.testing.assert_close(gradients(model, model), gradients(plain, plain), rtol=1e-3, atol=1e-3)
    handle.remove()
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("group")
def test_parameters_that_fully_shard_has_gathered_stay_where_they_are() -> None:
    plain, model = make("llama"), make("llama")
    fully_shard(model, mesh=init_device_mesh("cpu", (1,))).unshard()
    handle = accelerate(model)
    assert "its memory is also another tensor's" in str(handle)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-3, atol=1e-3)
    model.reshard()
    model.load_state_dict({key: 0.9 * value for key, value in model.state_dict().items()})
    plain.load_state_dict({key: 0.9 * value for key, value in plain.state_dict().items()})
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_what_is_written_through_another_tensor_counts(name: str) -> None:
    plain, model = make(name), make(name)
    held = [[parameter.data for parameter in each.parameters()] for each in (plain, model)]
    accelerate(model)
    assert_as_plain(model)
    for tensor in [*held[0], *held[1]]:
        tensor.mul_(0.9)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-3, atol=1e-3)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "sgd": functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=1e-2, fused=True),
}
ORDERS = ["evaluated first", "evaluated between", "evaluated before the step", "trained first", "removed"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_optimizers_find_gradients_and_states_where_parameters_are(name: str, optimizer: str, order: str) -> None:
    """torch's fused steps go through the memory of all three side by side, whatever their strides."""

    def trained(accelerated: bool) -> tuple[Any, list[float]]:
        model, losses = make(name), []
        steps = OPTIMIZERS[optimizer](model.parameters())
        handle = accelerate(model) if accelerated and order != "trained first" else None
        if order == "evaluated first":
            logits(model)
        for step in range(5):
            loss = model(tokens(), labels=tokens()).loss
            loss.backward()
            if order == "evaluated before the step":
                logits(model)
            steps.step()
            steps.zero_grad(set_to_none=step % 2 == 0)
            losses.append(loss.item())
            if step == 2:
                if accelerated and order == "trained first":
                    accelerate(model)
                logits(model)
                if handle is not None and order == "removed":
                    handle.remove()
        return model, losses

    (plain, expected), (model, losses) = trained(False), trained(True)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-3, atol=1e-3)


def test_parameters_keep_their_strides() -> None:
    model = make("gpt2")
    strides = [parameter.stride() for parameter in model.parameters()]
    handle = accelerate(model)
    state = model.state_dict()
    assert_as_plain(model)
    assert [parameter.stride() for parameter in model.parameters()] == strides
    state["transformer.h.0.mlp.c_fc.weight"].mul_(1.5)
    assert_as_plain(model)
    handle.remove()
    assert [parameter.stride() for parameter in model.parameters()] == strides
