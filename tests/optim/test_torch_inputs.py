"""torch's own inputs for its optimizers' tests, on ours: torch's result where we offer the options, else an error.

The inputs are those of ``torch.testing._internal.common_optimizers``, for CPUs with every implementation
(``foreach``, ``fused``, ``differentiable``) and for CUDA (``capturable``, tensors as options). What is asked of each is
what torch's test_optim.py asks. torch has neither Lion nor LAMB: these get Adam's inputs.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_plugin_sdk.errors import InvalidTensorError, UnsupportedOptionError
from ds_plugin_sdk.optim import FusedAdagrad, FusedAdam, FusedLamb, FusedLion

common = pytest.importorskip(
    "torch.testing._internal.common_optimizers",
    reason=f"torch {torch.__version__} cannot import the inputs of its optimizers' tests",
    exc_type=ImportError,
)

STEPS = 4
NOT_OFFERED = ("amsgrad", "capturable", "differentiable", "lr_decay", "maximize")


@dataclass(frozen=True)
class Pair:
    """One of our optimizers, what of torch's it is compared with, and whose inputs it gets."""

    name: str
    make: Callable[..., Optimizer]
    torch_make: Callable[..., Optimizer] | None
    inputs_of: str
    options: dict[str, Any]


PAIRS = [
    Pair("Adam", FusedAdam, torch.optim.Adam, "Adam", {"adamw": False}),
    Pair("AdamW", FusedAdam, torch.optim.AdamW, "AdamW", {"weight_decay": 0.01}),
    Pair("Adagrad", FusedAdagrad, torch.optim.Adagrad, "Adagrad", {}),
    Pair("Lion", FusedLion, None, "Adam", {}),
    Pair("Lamb", FusedLamb, None, "Adam", {}),
]


def info_of(pair: Pair) -> Any:
    return next(info for info in common.optim_db if info.optim_cls.__name__ == pair.inputs_of)


def inputs_of(pair: Pair) -> Iterator[Any]:
    for device in ("cpu", "cuda"):
        yield from common._get_optim_inputs_including_global_cliquey_kwargs(device, torch.float32, info_of(pair))


def is_offered(kwargs: dict[str, Any]) -> bool:
    return not any(kwargs.get(option) for option in NOT_OFFERED)


Case = tuple[Pair, dict[str, Any]]
CASES = {f"{pair.name}: {input.desc}": (pair, input.kwargs) for pair in PAIRS for input in inputs_of(pair)}
OFFERED = {name: case for name, case in CASES.items() if is_offered(case[1])}
OTHERS = {name: case for name, case in CASES.items() if name not in OFFERED}
each_offered = pytest.mark.parametrize(("pair", "kwargs"), OFFERED.values(), ids=OFFERED)
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)


@pytest.fixture(scope="module", autouse=True)
def lamb_kernels(native: Callable[..., None]) -> None:
    native("lamb")


def ours(pair: Pair, params: Any, kwargs: dict[str, Any]) -> Optimizer:
    return pair.make(params, **{**pair.options, **copy.deepcopy(kwargs)})


def parameters(transposed: bool = False) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(10, 5, generator=generator), torch.randn(10, generator=generator)
    return [torch.nn.Parameter(weight.t().contiguous().t() if transposed else weight), torch.nn.Parameter(bias)]


def loss_of(params: list[torch.nn.Parameter]) -> Tensor:
    weight, bias = params
    inputs = torch.linspace(-1, 1, 15).view(3, 5)
    loss: Tensor = (inputs @ weight.t() + bias).square().sum()
    return loss


def train(optimizer: Optimizer, steps: int = STEPS) -> list[Tensor]:
    params = [param for group in optimizer.param_groups for param in group["params"]]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(params)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return [param.detach().clone() for param in params]


def assert_equal(left: list[Tensor], right: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def assert_close(left: list[Tensor], right: list[Tensor]) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_torch_gave_inputs_of_both_kinds() -> None:
    for pair in PAIRS:
        assert sum(case[0] is pair for case in OFFERED.values()) >= 5
        assert sum(case[0] is pair for case in OTHERS.values()) >= 5


@pytest.mark.parametrize(("pair", "kwargs"), OTHERS.values(), ids=OTHERS)
def test_an_input_with_an_option_that_we_do_not_offer_is_an_error(pair: Pair, kwargs: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedOptionError, match=f"{pair.make.__name__} does not implement"):
        ours(pair, parameters(), kwargs)
    with pytest.raises(UnsupportedOptionError, match=f"{pair.make.__name__} does not implement"):
        pair.make([{"params": parameters(), **kwargs}])
    if pair.torch_make is not None:
        capturable = {"capturable", "differentiable"} & {name for name in kwargs if kwargs[name]}
        theirs = pair.torch_make(parameters(), **copy.deepcopy(kwargs))
        if not capturable:  # neither runs on a CPU as it stands
            train(theirs)
        with pytest.raises(UnsupportedOptionError, match=f"{pair.make.__name__} does not implement"):
            pair.make(parameters(), **pair.options).load_state_dict(theirs.state_dict())


@each_offered
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
def test_an_input_gives_torch_s_result(pair: Pair, kwargs: dict[str, Any], transposed: bool) -> None:
    """Where torch has the optimizer; of the others, that the loss falls."""
    params = parameters(transposed)
    before = loss_of(params).item()
    result = train(ours(pair, params, kwargs))
    assert loss_of(params).item() < before
    if pair.torch_make is not None:
        assert_close(result, train(pair.torch_make(parameters(transposed), **copy.deepcopy(kwargs))))


@each_offered
def test_state_dict_deepcopy_and_pickle_go_on_alike(pair: Pair, kwargs: dict[str, Any]) -> None:
    optimizer = ours(pair, parameters(), kwargs)
    before = train(optimizer)
    copied, pickled = copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    params = [torch.nn.Parameter(param) for param in before]
    loaded = ours(pair, params, {})
    loaded.load_state_dict(torch.load(file, weights_only=True))
    named = ours(pair, [(str(i), torch.nn.Parameter(param.clone())) for i, param in enumerate(before)], kwargs)
    named.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert named.param_groups[0]["param_names"] == ["0", "1"]
    expected = train(optimizer)
    for other in (copied, pickled, loaded, named):
        assert_equal(train(other), expected)
    assert copied.state_dict().keys() == optimizer.state_dict().keys()


@each_offered
def test_a_state_dict_from_before_an_option_was_known_is_loaded(pair: Pair, kwargs: dict[str, Any]) -> None:
    """Without torch's later flags, and with the step as a number and as a tensor."""
    optimizer = ours(pair, parameters(), kwargs)
    before = train(optimizer)
    for as_tensor in (True, False):
        saved = copy.deepcopy(optimizer.state_dict())
        for group in saved["param_groups"]:
            for flag in info_of(pair).not_og_supported_flags:
                group.pop(flag, None)
        for state in saved["state"].values():
            state["step"] = torch.tensor(float(state["step"])) if as_tensor else state["step"]
        twin = copy.deepcopy(optimizer)
        older = ours(pair, [torch.nn.Parameter(param.clone()) for param in before], kwargs)
        older.load_state_dict(saved)
        assert_equal(train(older), train(twin))


@each_offered
def test_gradients_are_not_modified_and_no_gradient_is_no_step(pair: Pair, kwargs: dict[str, Any]) -> None:
    params = parameters()
    optimizer = ours(pair, params, kwargs)
    before = [param.detach().clone() for param in params]
    optimizer.step()
    assert_equal([param.detach() for param in params], before)
    loss_of(params).backward()
    grads = [param.grad for param in params if param.grad is not None]
    kept = [grad.clone() for grad in grads]
    optimizer.step()
    assert_equal(grads, kept)
    empty = torch.nn.Parameter(torch.empty(0, 3))
    empty.grad = torch.empty(0, 3)
    ours(pair, [empty], kwargs).step()


@each_offered
def test_a_parameter_group_added_later_steps_with_its_own_options(pair: Pair, kwargs: dict[str, Any]) -> None:
    def trained(make: Callable[..., Optimizer], kwargs: dict[str, Any]) -> list[Tensor]:
        weight, bias = parameters()
        optimizer = make([weight], **copy.deepcopy(kwargs))
        loss_of([weight, bias]).backward()
        optimizer.step()
        optimizer.add_param_group({"params": [bias], "lr": 1e-2, "weight_decay": 0.2})
        return train(optimizer)

    result = trained(pair.make, {**pair.options, **kwargs})
    assert not torch.equal(result[1], parameters()[1])
    if pair.torch_make is not None:
        assert_close(result, trained(pair.torch_make, kwargs))


def schedules(pair: Pair) -> list[Any]:
    infos = [info_of(pair), next(info for info in common.optim_db if info.optim_cls is torch.optim.SGD)]
    return [schedulers for info in infos for schedulers in info.scheduler_inputs]


@each_pair
def test_torch_s_schedulers_drive_the_learning_rate(pair: Pair) -> None:
    """A number, or a tensor, which schedulers change in place."""

    def trained(make: Callable[..., Optimizer], schedulers: Any, rate: float | Tensor, **kwargs: Any) -> list[Tensor]:
        optimizer = make(parameters(), lr=rate, **kwargs)
        made = [scheduler(optimizer) for scheduler in schedulers]
        for _ in range(STEPS):
            result = train(optimizer, 1)
            for scheduler in made:
                is_plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*((1.0,) if is_plateau else ()))
        return result

    constant, changed = trained(pair.make, [], 0.01, **pair.options), 0
    for schedulers in schedules(pair):
        result = trained(pair.make, schedulers, 0.01, **pair.options)
        changed += not torch.equal(result[0], constant[0])
        for rate in (torch.tensor(0.01), torch.tensor([0.01])):
            assert_close(trained(pair.make, schedulers, rate, **pair.options), result)
        if pair.torch_make is not None:
            assert_close(result, trained(pair.torch_make, schedulers, 0.01))
    assert changed >= 5


@each_pair
def test_a_grad_scaler_skips_a_step_with_infinities(pair: Pair) -> None:
    def trained(make: Callable[..., Optimizer], kwargs: dict[str, Any]) -> list[Tensor]:
        params = parameters()
        optimizer, scaler = make(params, **kwargs), torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(params)).backward()
            before = [param.detach().clone() for param in params]
            if step == 1:
                assert params[0].grad is not None
                params[0].grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before[0], params[0]) == (step == 1)
        assert scaler.get_scale() == 512.0
        return [param.detach() for param in params]

    result = trained(pair.make, pair.options)
    if pair.torch_make is not None:
        assert_close(result, trained(pair.torch_make, {}))


@each_pair
def test_hooks_run_once_and_in_order(pair: Pair) -> None:
    optimizer, calls = ours(pair, parameters(), {}), []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("after saving"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after loading"))
    train(optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["before", "after", "before saving", "after saving", "before loading", "after loading"]


@each_pair
@pytest.mark.parametrize("kind", ["complex", "sparse"])
def test_complex_and_sparse_gradients_are_errors_and_modify_nothing(pair: Pair, kind: str) -> None:
    param = torch.nn.Parameter(torch.ones(4, 2, dtype=torch.complex64 if kind == "complex" else torch.float32))
    before = param.detach().clone()
    param.grad = torch.ones_like(param) if kind == "complex" else torch.ones(4, 2).to_sparse()
    texts = {"complex": "expected float32.*\n.*torch.optim, such as AdamW", "sparse": "not strided.*\n.*SparseAdam"}
    with pytest.raises(InvalidTensorError, match=texts[kind]):
        ours(pair, [param], {}).step()
    dense = torch.nn.Parameter(torch.ones(3))
    dense.grad = torch.ones(3)
    with pytest.raises(InvalidTensorError, match=texts[kind].partition("\n")[2]):
        ours(pair, [dense, param], {}).step()
    assert torch.equal(param, before)


# What torch's implementations cannot do and ours can: tensors as options beside foreach, a tensor beside a number.
MORE_THAN_TORCH = ("as a Tensor is not supported", "must be either both floats or both Tensors")


@each_pair
def test_torch_s_errors_are_errors(pair: Pair) -> None:
    found = 0
    for error in info_of(pair).optim_error_inputs_func("cpu", torch.float32):
        kwargs, given = error.optimizer_error_input.kwargs, error.optimizer_error_input.params
        if any(text in error.error_regex for text in MORE_THAN_TORCH):
            train(ours(pair, parameters(), kwargs))
        elif error.error_type is UserWarning:
            with pytest.warns(UserWarning, match=error.error_regex):
                ours(pair, given, kwargs)
        else:
            with pytest.raises((error.error_type, UnsupportedOptionError)):
                ours(pair, parameters() if given is None else given, kwargs)
        found += 1
    assert found >= 7
