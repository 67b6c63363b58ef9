"""Level ``training``: unmodified DeepSpeed on the target, against plain torch on the CPU in float32.

ZeRO           T1   stages, accumulation, clipping, overlap
data types     T2   bfloat16, float16 with loss scaling
offload        T3   optimizer and parameters on the host
checkpoints    T4   saved and resumed
the rest       T5   activation checkpointing, compilation, timers

A small model is trained for a few steps by two ranks, or by one where there is only one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ds_plugin_sdk.accelerator import installed
from ds_plugin_sdk.conformance.check import Clause, Parameters, check, expect, expect_equal
from ds_plugin_sdk.conformance.in_turn import InTurn, Task
from ds_plugin_sdk.conformance.programs import small_model
from ds_plugin_sdk.conformance.runtime.support import indexed
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.losses import largest_difference

_SECONDS = 600.0

# Largest difference of a loss of about 1.5 that falls to about 0.1. In float32 sums are taken in other orders; in the
# others weights and activations are rounded to 8 and 11 bits.
TOLERANCE = {"float32": 2e-5, "bfloat16": 4e-2, "float16": 1e-2}

_STAGES = ("0", "1", "2", "3")

_Cases = Callable[[Target], Iterable[Parameters]]

# The tasks of the program: what each check asks for.
_planned: list[Callable[[Target], Iterable[Task]]] = []


def ranks(target: Target) -> int:
    """How many ranks train."""
    return 1 if indexed(target) and int(target.accelerator.device_count()) < 2 else 2


def _tasks(target: Target) -> list[Task]:
    tasks: dict[str, Task] = {}
    for plan in _planned:
        for name, parameters in plan(target):
            tasks.setdefault(f"{name} {sorted(parameters.items())}", (name, parameters))
    return list(tasks.values())


_runs = InTurn("train", _tasks, ranks=ranks, timeout=_SECONDS)


def _results(target: Target, task: str, options: dict[str, Any]) -> list[Any]:
    """What each rank gave."""
    expect(
        installed("deepspeed"),
        "DeepSpeed is not installed, and nothing can be trained",
        hint="pip install 'ds-plugin-sdk[deepspeed]', or run the other levels: --level runtime --level ops",
    )
    return _runs.result(target, task, **options)


def _stage_cases(*stages: str) -> _Cases:
    return lambda target: ({"stage": stage} for stage in stages)


def _needs(dtype: torch.dtype) -> Callable[[Target], str | None]:
    return lambda target: None if dtype in target.dtypes else f"the accelerator does not declare {dtype}"


def _training(
    name: str,
    number: str,
    text: str,
    reason: str,
    *,
    stages: Iterable[str] = _STAGES,
    task: str = "losses",
    needs: Callable[[Target], str | None] = lambda target: None,
    **options: Any,
) -> None:
    """Declare a check that trains with some options under ZeRO stages and compares the losses."""

    def of(stage: str) -> dict[str, Any]:
        return {"stage": int(stage), **options}

    def plan(target: Target) -> Iterable[Task]:
        return [] if needs(target) else [(task, of(stage)) for stage in stages]

    def run(target: Target, stage: str) -> None:
        _expect_losses(_results(target, task, of(stage)), target, **of(stage))

    _planned.append(plan)
    check(
        f"training.{name}",
        Clause(number, text, reason),
        cases=_stage_cases(*stages),
        needs=needs,
        timeout=_SECONDS,
    )(run)


def _expect_losses(
    losses: Sequence[list[float]],
    target: Target,
    *,
    stage: int,
    dtype: str = "float32",
    accumulation: int = 1,
    clip: bool = False,
    **options: Any,
) -> None:
    # Without ZeRO, DeepSpeed makes the states of these types' optimizers by a step with gradients of zero.
    empty_step = stage == 0 and dtype != "float32"
    expected = small_model.plain_losses(ranks(target), accumulation=accumulation, clip=clip, empty_step=empty_step)
    for rank, (found, right) in enumerate(zip(losses, expected, strict=True)):
        worst = largest_difference(found, right)
        expect(
            worst <= TOLERANCE[dtype],
            f"losses of rank {rank} are {_rounded(found)}, off by {worst:.2g}",
            why=f"plain torch on the CPU in float32 has {_rounded(right)}; allowed is {TOLERANCE[dtype]:g}",
        )


def _rounded(losses: Iterable[float]) -> list[float]:
    return [round(loss, 5) for loss in losses]


_SAME = "gives the losses of plain torch on the CPU in float32"

_training(
    "zero.losses",
    "T1.1",
    f"Training in float32 under every ZeRO stage {_SAME}, to 2e-5.",
    "The stages differ in who holds what, not in what is computed.",
)
_training(
    "zero.accumulation",
    "T1.2",
    f"The same with gradients accumulated over three micro steps {_SAME}.",
    "Large batches are trained this way.",
    accumulation=3,
)
_training(
    "zero.clipping",
    "T1.3",
    f"The same with the gradients' norm clipped {_SAME}.",
    "The norm is summed over all ranks' shards; every large model clips.",
    clip=True,
)
_training(
    "zero.overlap",
    "T1.4",
    f"The same with `overlap_comm` {_SAME}.",
    "Reductions run on side streams while the backward pass runs; a wait that is missing shows here.",
    stages=("1", "2", "3"),
    overlap=True,
)
_training(
    "dtypes.bfloat16",
    "T2.1",
    f"Training in bfloat16 with float32 masters {_SAME}, to 4e-2.",
    "How most models are trained.",
    dtype="bfloat16",
    needs=_needs(torch.bfloat16),
)
_training(
    "dtypes.float16",
    "T2.2",
    f"Training in float16 with loss scaling {_SAME}, to 1e-2.",
    "Older models and smaller devices.",
    dtype="float16",
    needs=_needs(torch.float16),
)
_training(
    "offload.optimizer",
    "T3.1",
    f"Training with the optimizer offloaded to the host {_SAME}.",
    "Gradients go to pinned memory, DeepSpeedCPUAdam steps there, parameters come back.",
    stages=("1", "2", "3"),
    offload="optimizer",
)
_training(
    "offload.parameters",
    "T3.2",
    f"Training with parameters and optimizer offloaded to the host {_SAME}.",
    "Models that do not fit into the devices.",
    stages=("3",),
    offload="optimizer+param",
)
_training(
    "offload.bfloat16",
    "T3.3",
    f"Training in bfloat16 with the optimizer offloaded {_SAME}, to 4e-2.",
    "The usual way to offload: copies in bfloat16, steps in float32.",
    stages=("2", "3"),
    offload="optimizer",
    dtype="bfloat16",
    needs=_needs(torch.bfloat16),
)
_training(
    "engine.timers",
    "T5.1",
    f"Training with `wall_clock_breakdown` {_SAME}.",
    "DeepSpeed then times every phase by the accelerator's events, or by the host.",
    stages=("1",),
    timers=True,
)
_training(
    "engine.compile",
    "T5.2",
    f"Training after `engine.compile()` {_SAME}.",
    "The model is compiled with the accelerator's backend.",
    stages=("1",),
    task="compiled",
)


def _plan(task: str, stages: Iterable[str], **options: Any) -> Callable[[Target], Iterable[Task]]:
    return lambda target: [(task, {"stage": int(stage), **options}) for stage in stages]


_planned.append(
    lambda target: [] if torch.float16 not in target.dtypes else _plan("scale", ("1", "3"), dtype="float16")(target)
)


@check(
    "training.dtypes.loss_scaling",
    Clause(
        "T2.3",
        "From a loss scale that overflows, steps are skipped and the scale is halved until gradients fit; then the "
        "loss falls.",
        reason="Overflow is seen on the device, reduced over all ranks and read by the host.",
    ),
    cases=_stage_cases("1", "3"),
    needs=_needs(torch.float16),
    timeout=_SECONDS,
)
def loss_scaling(target: Target, stage: str) -> None:
    for told in _results(target, "scale", {"stage": int(stage), "dtype": "float16"}):
        first, last, skipped = told["losses"][0], told["losses"][-1], told["skipped"]
        expect(skipped > 5, f"{skipped} of 40 steps were skipped from a loss scale of 2**40")
        expect_equal(told["scale"], 2.0 ** (40 - skipped), f"the loss scale after {skipped} skipped steps")
        expect(last < 0.7 * first, f"the loss went from {first:.4f} to {last:.4f} in 40 steps", why="it should fall")


_planned.append(_plan("resumed", _STAGES))


@check(
    "training.checkpoints.resumed",
    Clause(
        "T4.1",
        "A run that is resumed from a checkpoint, by another engine or by the one that wrote it, has the losses of an "
        "uninterrupted one, to 1e-5: a device need not add up in one order.",
        reason="Long runs are interrupted; what is not restored shows as a jump.",
    ),
    cases=_stage_cases(*_STAGES),
    timeout=_SECONDS,
)
def resumed(target: Target, stage: str) -> None:
    for told in _results(target, "resumed", {"stage": int(stage)}):
        _expect_losses_of_one_run(told)


def _expect_losses_of_one_run(told: Mapping[str, list[float]]) -> None:
    for run in ("resumed", "gone back"):
        same = all(abs(a - b) <= 1e-5 * max(1.0, abs(b)) for a, b in zip(told[run], told["went on"], strict=True))
        expect(
            same,
            f"losses of the run that has {run} are {told[run]}",
            why=f"without an interruption they are {told['went on']}",
        )


_planned.append(_plan("resumed", ("2", "3"), offload="optimizer"))


@check(
    "training.checkpoints.offloaded",
    Clause(
        "T4.2",
        "The same with the optimizer offloaded to the host.",
        reason="Its states lie in pinned memory, and are saved from and restored into it.",
    ),
    cases=_stage_cases("2", "3"),
    timeout=_SECONDS,
)
def offloaded(target: Target, stage: str) -> None:
    for told in _results(target, "resumed", {"stage": int(stage), "offload": "optimizer"}):
        _expect_losses_of_one_run(told)


_planned.append(lambda target: [("recomputed", {})])


@check(
    "training.engine.recomputed",
    Clause(
        "T5.3",
        "A block with dropout has the same gradients with `deepspeed.checkpointing.checkpoint` as without.",
        reason="The RNG states that it saves and restores are the accelerator's.",
    ),
    timeout=_SECONDS,
)
def recomputed(target: Target) -> None:
    for rank, told in enumerate(_results(target, "recomputed", {})):
        worst = largest_difference(told["recomputed"], told["plain"])
        what = f"gradients of the recomputed block are off by {worst:.2g} on rank {rank}"
        expect(worst <= 1e-5, what, why="it dropped other elements")
