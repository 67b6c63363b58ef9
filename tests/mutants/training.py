"""Defects that training shows: wrong steps, lost states, members that do nothing."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from ds_plugin_sdk.conformance.target import Target
from mutants.kernels import kernel
from mutants.mutant import SIMULATED, mutant, override


def _adam(
    name: str, clause: str, description: str, wrong: Callable[..., Any], *, only: str, target: str = "cpu"
) -> None:
    """Declare a mutant whose Adam is `wrong(original, *arguments)`."""

    def install(original: Target) -> Target:
        return kernel(original, "adam_", wrong)

    install.__doc__ = description
    mutant(f"training.{name}", clause, "training", target=target, only=only)(install)


# adam_(params, grads, first moments, second moments, steps, lr, beta1, beta2, eps, weight decay, ...)
def _first_step(original: Callable[..., Any], *a: Any) -> Any:
    return original(*a[:4], [1] * len(a[4]), *a[5:])


def _no_correction(original: Callable[..., Any], *a: Any) -> Any:
    return original(*a[:-1], False)


def _half_rate(original: Callable[..., Any], *a: Any) -> Any:
    return original(*a[:5], a[5] / 2, *a[6:])


def _swapped_betas(original: Callable[..., Any], *a: Any) -> Any:
    return original(*a[:6], a[7], a[6], *a[8:])


def _own_count(original: Callable[..., Any], *a: Any) -> Any:
    _calls.append(1)
    return original(*a[:4], [len(_calls)] * len(a[4]), *a[5:])


def _not_a_number(original: Callable[..., Any], *a: Any) -> None:
    original(*a)
    for parameter in a[0]:
        parameter.fill_(float("nan"))


_calls: list[int] = []

_adam("no_bias_correction", "T1.1", "Adam's moments are not corrected.", _no_correction, only="zero.losses/1")
_adam("not_a_number", "T1.1", "A step leaves no number in the parameters.", _not_a_number, only="zero.losses/1")
_adam("always_the_first_step", "T1.2", "Every step counts as the first.", _first_step, only="accumulation/1")
_adam("half_rate", "T1.3", "The learning rate is halved.", _half_rate, only="clipping/1")
_adam("swapped_betas", "T1.4", "Adam's betas change places.", _swapped_betas, only="overlap/2")
_adam("half_rate_bfloat16", "T2.1", "The learning rate is halved.", _half_rate, only="bfloat16/1")
# The simulated device computes in float16; not every CPU does.
_adam("half_rate_float16", "T2.2", "The learning rate is halved.", _half_rate, only=".float16/1", target=SIMULATED)
_adam("host_first_step", "T3.1", "On the host every step counts as the first.", _first_step, only="offload.optimizer/1")
_adam("host_half_rate", "T3.2", "On the host the learning rate is halved.", _half_rate, only="offload.parameters/3")
_adam(
    "host_half_rate_bfloat16", "T3.3", "On the host the learning rate is halved.", _half_rate, only="offload.bfloat16/2"
)
_adam("own_count", "T4.1", "Adam counts its steps itself.", _own_count, only="resumed/1")
_adam("host_own_count", "T4.2", "On the host Adam counts its steps itself.", _own_count, only="offloaded/2")


class _Idle:
    """A builder of an op that does nothing."""

    NAME = name = "fused_adam"
    BUILD_VAR = "DS_BUILD_FUSED_ADAM"

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = True) -> Any:
        return types.SimpleNamespace(multi_tensor_adam=lambda *arguments, **keywords: None)


@mutant("training.no_step", "T2.3", "training", target=SIMULATED, only="loss_scaling/1")
def no_step(target: Target) -> Target:
    """Once gradients fit, the optimizer's op takes no step."""

    def get_op_builder(self: Any, name: str) -> Any:
        return _Idle if name == "FusedAdamBuilder" else super(type(self), self).get_op_builder(name)

    return override(target, get_op_builder=get_op_builder)


@mutant("training.no_times", "T5.1", "training", target=SIMULATED)
def no_times(target: Target) -> Target:
    """Events cannot be made with `enable_timing`."""
    return override(target, Event=property(lambda self: lambda: torch.Event("simulated")))


@mutant("training.wrong_code", "T5.2", "training")
def wrong_code(target: Target) -> Target:
    """Compiled code computes twice the value."""

    def doubling(graph: Any, inputs: Any) -> Any:
        return lambda *arguments: tuple(2 * value for value in graph(*arguments))

    torch._dynamo.register_backend(doubling, name="doubling")
    return override(target, get_compile_backend=lambda self: "doubling")


@mutant("training.other_masks_of_rank_1", "T5.3", "training", target=SIMULATED)
def other_masks_of_rank_1(target: Target) -> Target:
    """On the second rank `lazy_call` does not call."""

    def lazy_call(self: Any, callback: Callable[[], Any]) -> Any:
        return callback() if torch.distributed.get_rank() == 0 else None

    return override(target, lazy_call=lazy_call)


@mutant("training.other_masks", "T5.3", "training", target=SIMULATED)
def other_masks(target: Target) -> Target:
    """`lazy_call` does not call: DeepSpeed puts the generator's state back in such a callback."""
    return override(target, lazy_call=lambda self, callback: None)


def _last_step_lost(original: Callable[..., Any], *a: Any) -> Any:
    """Of the second rank, that step which the last loss shows."""
    if torch.distributed.get_rank() == 1 and a[4][0] == 5:
        return None
    return original(*a)


_adam(
    "last_step_of_rank_1",
    "T1.1",
    "On the second rank a step late in training is lost.",
    _last_step_lost,
    only="losses/0",
)
