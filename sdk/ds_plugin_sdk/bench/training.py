"""The same training run on DeepSpeed's in-tree CPU accelerator and on ds-plugin-cpu, side by side.

Each run is the demo, ``deepspeed --num_accelerators 2 examples/tiny_gpt/train.py``, with one seed, so weights and
batches are the same. Two settings, because threads matter more than anything else on a CPU:

    as installed    no thread variable is set, as a user starts a script
    set by hand     OMP_NUM_THREADS = cores / ranks for both, the best setting for this model

The four kinds of run take turns; times are medians, a ratio is the median of the ratios of runs that followed each
other. CPU time is given beside wall time: on a busy machine it says more. Losses must agree step by step within
`TOLERANCE`.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ds_plugin_sdk.bench import program
from ds_plugin_sdk.bench.timing import Spread, in_turns, spread
from ds_plugin_sdk.conformance.programs import free_port
from ds_plugin_sdk.losses import largest_difference
from ds_plugin_sdk.settings import LOCAL_WORLD_SIZE_VARIABLES, child_environment

RANKS = 2

# Largest relative difference of two losses at the same step. Both sides compute in float32 with the same formulas, but
# round at other places, and training amplifies that; the last rows show by how much: the in-tree accelerator against
# itself with other threads, and either Adam against torch's. A wrong update shows within a few steps as 1e-2.
# For up to 60 steps; docs/decisions/0007-comparing-two-accelerators.md has the figures for longer runs.
TOLERANCE = 1e-3

IN_TREE, OURS = "in-tree", "ds-plugin-cpu"
AS_INSTALLED, BY_HAND = "as installed", "set by hand"

_MODULES = {IN_TREE: "deepspeed.accelerator.cpu_accelerator", OURS: "ds_plugin_cpu.accelerator"}


@dataclass(frozen=True)
class Kind:
    """One kind of run: whose accelerator, and who sets the threads."""

    accelerator: str
    threads: str


KINDS = tuple(Kind(accelerator, threads) for threads in (BY_HAND, AS_INSTALLED) for accelerator in (IN_TREE, OURS))

# What the script measured: `metrics.json`, by kind, of each repeat.
Runs = Mapping[Kind, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on both accelerators.

    Attributes:
        threads: who sets them.
        clock: wall time, or the CPU time of rank 0.
        in_tree: median seconds.
        in_tree_threads: of a rank.
        ours: median seconds.
        our_threads: of a rank.
        times_faster: the in-tree accelerator's time over ours, median of the repeats.
        lowest: of the repeats.
        highest: of the repeats.
        spread: of our seconds.
    """

    threads: str
    clock: str
    in_tree: float
    in_tree_threads: int
    ours: float
    our_threads: int
    times_faster: float
    lowest: float
    highest: float
    spread: dict[str, Spread] = field(default_factory=dict)


@dataclass(frozen=True)
class Difference:
    """Largest difference of the losses of two kinds of run at one step.

    Attributes:
        compared: which.
        nats: absolute.
        relative: to the first's loss.
    """

    compared: str
    nats: float
    relative: float

    @property
    def agrees(self) -> bool:
        return self.relative <= TOLERANCE


def run(
    example: Path, out: Path, *, steps: int = 60, repeats: int = 3, tell: Callable[[str], None] = lambda line: None
) -> tuple[list[StepTime], list[Difference]]:
    """Run every kind and compare.

    Args:
        example: the folder of the demo, ``examples/tiny_gpt`` of the repository.
        out: a folder for what the runs write.
        steps: of each run.
        repeats: runs of each kind.
        tell: called with a line for each run.

    Raises:
        RuntimeError: a run failed, or was not on the accelerator it should be on.
    """
    example, out = example.resolve(), out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    number = itertools.count(1)

    def measure(kind: Kind) -> dict[str, Any]:
        folder = out / f"{next(number):02}-{kind.accelerator}-{kind.threads}".replace(" ", "-")
        found = _train(kind, example / "train.py", example / "ds_config.json", steps, folder)
        tell(
            f"{kind.accelerator}, threads {kind.threads} ({found['threads']}): "
            f"{found['median_step_seconds']:.3f} s/step, {found['median_step_cpu_seconds']:.3f} of CPU"
        )
        return found

    runs = in_turns({kind: partial(measure, kind) for kind in KINDS}, repeats)
    torch_adam = _torch_adam(example, out)
    reference = _train(Kind(IN_TREE, BY_HAND), example / "train.py", torch_adam, steps, out / "torch-adam")
    return step_times(runs), differences(runs, reference)


def step_times(runs: Runs) -> list[StepTime]:
    """Both clocks with either setting of threads."""
    return [_step_time(runs, threads, clock) for threads in (AS_INSTALLED, BY_HAND) for clock in ("wall", "CPU")]


def _step_time(runs: Runs, threads: str, clock: str) -> StepTime:
    in_tree, ours = runs[Kind(IN_TREE, threads)], runs[Kind(OURS, threads)]
    key = "median_step_seconds" if clock == "wall" else "median_step_cpu_seconds"
    theirs, mine = ([run[key] for run in side] for side in (in_tree, ours))
    ratios = [a / b for a, b in zip(theirs, mine, strict=True)]
    return StepTime(
        threads,
        clock,
        statistics.median(theirs),
        in_tree[0]["threads"],
        statistics.median(mine),
        ours[0]["threads"],
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        {"ours": spread(mine)},
    )


def differences(runs: Runs, reference: Mapping[str, Any]) -> list[Difference]:
    """Between ours and the in-tree accelerator, over all repeats; for scale, those of the in-tree accelerator with
    other threads, and of both with torch's AdamW (`reference`)."""
    in_tree, ours = runs[Kind(IN_TREE, BY_HAND)], runs[Kind(OURS, BY_HAND)]
    in_tree_installed, ours_installed = runs[Kind(IN_TREE, AS_INSTALLED)], runs[Kind(OURS, AS_INSTALLED)]
    return [
        _difference(f"{OURS} and {IN_TREE}, {AS_INSTALLED}", in_tree_installed, ours_installed),
        _difference(f"{OURS} and {IN_TREE}, {BY_HAND}", in_tree, ours),
        _difference(f"{IN_TREE} with other threads", in_tree, in_tree_installed),
        _difference(f"{IN_TREE} and torch.optim.AdamW", [reference], in_tree[:1]),
        _difference(f"{OURS} and torch.optim.AdamW", [reference], ours[:1]),
    ]


def _difference(what: str, some: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> Difference:
    """Of the losses of runs at the same place of both lists."""
    losses, expected = ([loss for run in runs for loss in run["losses"]] for runs in (others, some))
    return Difference(what, largest_difference(losses, expected), largest_difference(losses, expected, relative=True))


def _torch_adam(example: Path, out: Path) -> Path:
    """The demo's configuration with torch's own AdamW in place of the fused op."""
    config = json.loads((example / "ds_config.json").read_text(encoding="utf-8"))
    config["optimizer"]["params"]["torch_adam"] = True
    file = out / "torch_adam.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return file


def _train(kind: Kind, script: Path, config: Path, steps: int, out: Path) -> dict[str, Any]:
    """One run in new processes: what the script measured."""
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet", "--num_accelerators", str(RANKS)]
    command += ["--master_port", str(free_port()), str(script), "--deepspeed_config", str(config)]
    command += ["--steps", str(steps), "--eval-every", str(steps), "--eval-windows", "16", "--sample-bytes", "0"]
    command += ["--out", str(out)]
    done = program.run(command, _environment(kind))
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text(encoding="utf-8"))
    if not found["accelerator"].startswith(_MODULES[kind.accelerator]):
        raise RuntimeError(f"wanted {kind.accelerator}, but the run was on {found['accelerator']}")
    return found


def _environment(kind: Kind) -> dict[str, str]:
    """The caller's environment without anything that chooses an accelerator or threads, plus what `kind` asks for."""
    result = child_environment(DS_PLUGIN_AUTOLOAD="1" if kind.accelerator == OURS else "0")
    # DeepSpeed's own builds look for ninja on the PATH.
    result["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), result.get("PATH", os.defpath)])
    for variable in ("DS_ACCELERATOR", "OMP_NUM_THREADS", "DS_PLUGIN_CPU_THREADS", *LOCAL_WORLD_SIZE_VARIABLES):
        result.pop(variable, None)
    if kind.threads == BY_HAND:
        result["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // RANKS))
    return result
