"""Models that torch's data parallelism wraps, accelerated before or after: their gradients are the plain model's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
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

with warnings.catch_warnings():
    # transformers' own dependencies warn of each other's releases.
    warnings.simplefilter("ignore")
    from transformers.pytorch_utils import Conv1D

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


def turned(model: Any) -> bool:
    """Whether the linear layers of a GPT-2 lie as products of few inputs want them."""
    strides = {module.weight.stride(0) == 1 for module in model.modules() if isinstance(module, Conv1D)}
    assert len(strides) == 1
    return strides.pop()


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
def test_what_a_wrapped_model_leaves_alone_is_named() -> None:
    model = make("gpt2")
    wrapped = DistributedDataParallel(model)
    handle = accelerate(model)
    assert wrapped is not None and not turned(model)
    assert "DistributedDataParallel" in handle.left["transformer.h.1.mlp.c_fc"]
    handle.remove()
    assert accelerate(model, weights="int8").layers  # copies: nothing moves


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


def test_weights_turn_when_they_are_first_read() -> None:
    """Not by training, nor by a report: what is wrapped after accelerate() is wrapped as torch makes it."""
    model = make("gpt2")
    handle = accelerate(model)
    gradients(model, model)
    assert "whole layers     2" in str(handle)
    assert not turned(model)
    assert_as_plain(model)
    assert turned(model)
    assert "whole layers     2" in str(handle)
    handle.remove()
    assert not turned(model)
