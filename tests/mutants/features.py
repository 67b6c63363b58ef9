"""Defects that DeepSpeed's features show, and one that its own tests show."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.settings import export
from mutants.kernels import kernel
from mutants.mutant import SIMULATED, mutant, override

# torch's stubs lack half of what is there.
dist: Any = torch.distributed

Function = Callable[..., Any]


def _op(name: str, clause: str, description: str, op: str, wrong: Function, *, only: str) -> None:
    """Declare a mutant whose op is `wrong(original, *arguments)`."""

    def install(original: Target) -> Target:
        return kernel(original, op, wrong)

    install.__doc__ = description
    mutant(f"features.{name}", clause, "features", only=only)(install)


def _half_rate(original: Function, *a: Any) -> Any:
    return original(*a[:5], a[5] / 2, *a[6:])


def _own_count(original: Function, *a: Any) -> Any:
    _calls.append(1)
    return original(*a[:4], [len(_calls)] * len(a[4]), *a[5:])


_calls: list[int] = []


def _nothing(original: Function, *a: Any) -> None:
    return None


_op("half_rate", "F1.1", "Adam's learning rate is halved.", "adam_", _half_rate, only="zero/stage_1")
_op("no_lion", "F3.1", "Lion takes no step.", "lion_", _nothing, only="optimizers/lion")
_op("accumulated", "F4.1", "Adam's learning rate is halved.", "adam_", _half_rate, only="memory/gradient_accumulation")
_op("half_rate_bfloat16", "F5.1", "Adam's learning rate is halved.", "adam_", _half_rate, only="types/bfloat16")
_op("own_count", "F7.1", "Adam counts its steps itself.", "adam_", _own_count, only="checkpoints/stage_1")
_op("no_adam", "F8.1", "Adam takes no step.", "adam_", _nothing, only="data/curriculum")
_op("rate_between", "F10.1", "Adam's learning rate is halved.", "adam_", _half_rate, only="inference/hybrid_engine")


@mutant("features.own_parts_kept", "F2.1", "features", only="parallelism/ulysses")
def own_parts_kept(target: Target) -> Target:
    """`all_to_all_single` keeps the parts."""
    dist.all_to_all_single = lambda output, input, *rest, **more: output.copy_(input)
    return target


@mutant("features.losses_of_rank_1", "F1.1", "features", only="zero/stage_1")
def losses_of_rank_1(target: Target) -> Target:
    """On the second rank a loss is read before it is there."""
    read = torch.Tensor.item

    def item(self: torch.Tensor) -> Any:
        early = self.grad_fn is not None and dist.is_initialized() and dist.get_rank() == 1
        return 0.0 if early else read(self)

    torch.Tensor.item = item  # type: ignore[method-assign, assignment]  # the defect of this mutant
    return target


@mutant("features.always_overflows", "F5.1", "features", target=SIMULATED, only="types/autocast_float16")
def always_overflows(target: Target) -> Target:
    """What looks for infinities in gradients, for torch's GradScaler, says that there are some."""
    torch._amp_foreach_non_finite_check_and_unscale_ = lambda gradients, found, scale: found.fill_(1.0)  # type: ignore[assignment]  # the defect
    return target


@mutant("features.wrong_code", "F6.1", "features", only="compilation/compiled")
def wrong_code(target: Target) -> Target:
    """Compiled code computes twice the value."""

    def doubling(graph: Any, inputs: Any) -> Any:
        return lambda *arguments: tuple(2 * value for value in graph(*arguments))

    torch._dynamo.register_backend(doubling, name="doubling")
    return override(target, get_compile_backend=lambda self: "doubling")


@mutant("features.no_times", "F9.1", "features", target=SIMULATED, only="tools/wall_clock_breakdown")
def no_times(target: Target) -> Target:
    """Events cannot be made with `enable_timing`."""
    return override(target, Event=property(lambda self: lambda: torch.Event("simulated")))


@mutant("deepspeed.half_rate", "U1.1", "deepspeed")
def half_rate(target: Target) -> Target:
    """Adam's learning rate is halved, which a test of a folder like DeepSpeed's sees."""
    export({"DS_PLUGIN_DEEPSPEED_TESTS": str(Path(__file__).with_name("deepspeed_tests"))})
    return kernel(target, "adam_", _half_rate)
