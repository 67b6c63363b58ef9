"""Options that no optimizer of ours implements: an error wherever they come from, not another result."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from ds_plugin_sdk.errors import GraphCaptureError, UnsupportedOptionError
from ds_plugin_sdk.optim import FusedAdagrad, FusedAdam, FusedLamb, FusedLion

FUSED: dict[str, Callable[..., Optimizer]] = {
    "adam": FusedAdam,
    "adagrad": FusedAdagrad,
    "lion": FusedLion,
    "lamb": FusedLamb,
}
every_optimizer = pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
# Each with a value that changes the result, and one that does not.
OPTIONS = {
    "amsgrad": (True, False),
    "capturable": (True, False),
    "differentiable": (True, False),
    "grad_averaging": (False, True),
    "lr_decay": (0.5, 0),
    "maximize": (True, False),
}


@pytest.fixture(scope="module", autouse=True)
def lamb_kernels(native: Callable[..., None]) -> None:
    native("lamb")


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4))


def stepped(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


@every_optimizer
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_that_would_change_the_result_is_an_error_wherever_it_comes_from(
    make: Callable[..., Optimizer], option: str
) -> None:
    value, _ = OPTIONS[option]
    expected = pytest.raises(UnsupportedOptionError, match=rf"{make.__name__} does not implement {option}.*={value}")
    with expected:
        make([parameter()], **{option: value})
    with expected:
        make([{"params": [parameter()], option: value}])
    optimizer = stepped(make([parameter()], lr=0.1))
    with expected:
        optimizer.add_param_group({"params": [parameter()], option: value})
    assert len(optimizer.param_groups) == 1
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update({option: value, "lr": 0.5})
    with expected:
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1, "something was loaded"
    optimizer.param_groups[0][option] = value
    before = copy.deepcopy(optimizer.param_groups[0]["params"])
    with expected:
        stepped(optimizer)
    assert all(map(torch.equal, before, optimizer.param_groups[0]["params"]))


@every_optimizer
@pytest.mark.parametrize("options", [{option: value} for option, (_, value) in OPTIONS.items()], ids=str)
def test_an_option_that_changes_nothing_is_accepted(make: Callable[..., Optimizer], options: dict[str, Any]) -> None:
    options = {**options, "foreach": True, "fused": None}
    params = [parameter() for _ in range(4)]
    stepped(make([params[0]], **options))
    stepped(make([{"params": [params[1]], **options}]))
    loaded = make([params[2]])
    saved = loaded.state_dict()
    saved["param_groups"][0].update(options)
    loaded.load_state_dict(saved)
    stepped(loaded)
    stepped(make([params[3]]))
    assert all(torch.equal(param, params[3]) for param in params)


@every_optimizer
def test_an_option_that_nobody_knows_is_an_error(make: Callable[..., Optimizer]) -> None:
    with pytest.raises(TypeError, match=f"{make.__name__}.*'momentun'"):
        make([parameter()], momentun=0.9)


@every_optimizer
def test_groups_carry_what_their_owner_puts_there(make: Callable[..., Optimizer]) -> None:
    optimizer = stepped(make([{"params": [parameter()], "name": "head", "initial_lr": 0.1}]))
    other = make([parameter()])
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["name"] == "head"


def test_torch_s_decoupled_weight_decay_is_adamw() -> None:
    for theirs, expected in ((torch.optim.Adam, False), (torch.optim.AdamW, True)):
        for start in (False, True):
            optimizer = FusedAdam([parameter()], adamw=start)
            optimizer.load_state_dict(stepped(theirs([parameter()])).state_dict())
            assert optimizer.param_groups[0]["adamw"] is expected
            assert optimizer.state_dict()["param_groups"][0]["decoupled_weight_decay"] is expected
    group = {"params": [parameter()], "decoupled_weight_decay": False}
    optimizer = FusedAdam([group])
    assert optimizer.param_groups[0]["adamw"] is False
    optimizer.param_groups[0]["decoupled_weight_decay"] = True  # as torch's ZeroRedundancyOptimizer puts it there
    stepped(optimizer)
    assert optimizer.param_groups[0]["adamw"] is True


@every_optimizer
def test_a_captured_step_is_an_error(make: Callable[..., Optimizer], monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose current stream is being captured, as `torch.cuda` says it, and here `torch.cpu`."""
    assert callable(torch.cuda.is_current_stream_capturing)
    optimizer = stepped(make([param := parameter()]))
    before = param.detach().clone()
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: True, raising=False)
    with pytest.raises(GraphCaptureError, match=f"a step of {make.__name__} is captured in a graph"):
        optimizer.step()
    assert torch.equal(param, before)
    assert optimizer.state[param]["step"] == 1
    monkeypatch.setattr(torch.cpu, "is_current_stream_capturing", lambda: False)
    optimizer.step()
    assert not torch.equal(param, before)


@every_optimizer
def test_a_pickled_optimizer_goes_on(make: Callable[..., Optimizer]) -> None:
    optimizer = stepped(make([parameter()], lr=0.1))
    twin = pickle.loads(pickle.dumps(optimizer))
    stepped(optimizer)
    stepped(twin)
    left, right = (each.param_groups[0]["params"][0] for each in (optimizer, twin))
    assert torch.equal(left, right)
    assert twin.state[right]["step"] == 2
