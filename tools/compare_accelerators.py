"""The same training run on DeepSpeed's in-tree CPU accelerator and on ds-plugin-cpu, side by side.

    python benchmarks/compare_accelerators.py

Each run is ``deepspeed --num_accelerators 2 examples/tiny_gpt/train.py`` with one seed, so weights and batches are the
same. Two settings, because threads matter more than anything else on a CPU:

    as installed    no thread variable is set, as a user starts a script
    set by hand     OMP_NUM_THREADS = cores / ranks for both, the best setting for this model

The four kinds of run are interleaved and repeated; times are medians, a ratio is the median of the ratios of runs
that followed each other. CPU time is given beside wall time: on a busy machine it says more. Losses must agree step by
step within `TOLERANCE`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_plugin_sdk.settings import LOCAL_WORLD_SIZE_VARIABLES, child_environment

ROOT = Path(__file__).resolve().parent.parent
TINY_GPT = ROOT / "examples" / "tiny_gpt"
RANKS = 2

# Largest relative difference of two losses at the same step. Both sides compute in float32 with the same formulas, but
# round at other places, and training amplifies that; the table's last lines show by how much: the in-tree accelerator
# against itself with other threads, and either Adam against torch's. A wrong update shows within a few steps as 1e-2.
# For up to 60 steps; docs/decisions/0007-comparing-two-accelerators.md has the figures for longer runs.
TOLERANCE = 1e-3

IN_TREE, OURS = "in-tree", "ds-plugin-cpu"
ACCELERATOR_MODULES = {IN_TREE: "deepspeed.accelerator.cpu_accelerator", OURS: "ds_plugin_cpu.accelerator"}
AS_INSTALLED, BY_HAND = "as installed", "set by hand"


@dataclass(frozen=True)
class Kind:
    """One kind of run: whose accelerator, and who sets the threads."""

    accelerator: str
    threads: str


KINDS = tuple(Kind(accelerator, threads) for threads in (BY_HAND, AS_INSTALLED) for accelerator in (IN_TREE, OURS))


def main() -> int:
    args = parse_arguments()
    console = Console(soft_wrap=True)
    runs: dict[Kind, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for repeat in range(1, args.repeats + 1):
        for kind in KINDS:
            run = train(kind, args.steps, args.out / f"{kind.accelerator}-{kind.threads}-{repeat}".replace(" ", "-"))
            runs[kind].append(run)
            console.print(
                f"repeat {repeat}/{args.repeats}  {kind.accelerator:14} threads {kind.threads} ({run['threads']}): "
                f"{run['median_step_seconds']:.3f} s/step, {run['median_step_cpu_seconds']:.3f} of CPU"
            )
    reference = train(Kind(IN_TREE, BY_HAND), args.steps, args.out / "torch-adam", config=torch_adam_config(args.out))
    results = {
        "machine": machine(),
        "steps": args.steps,
        "repeats": args.repeats,
        "step_time": {threads: step_time(runs, threads) for threads in (AS_INSTALLED, BY_HAND)},
        "losses": losses(runs, reference),
        "tolerance": TOLERANCE,
    }
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    agree = all(row["max_relative"] <= TOLERANCE for row in results["losses"].values())
    show(console, results)
    console.print(f"losses {'agree' if agree else 'DIFFER'}; figures in {args.out / 'results.json'}")
    return 0 if agree else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of each run (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind (%(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "compare", help="folder for the results")
    return parser.parse_args()


def torch_adam_config(folder: Path) -> Path:
    """The demo's configuration with torch's own AdamW in place of the fused op."""
    config = json.loads((TINY_GPT / "ds_config.json").read_text(encoding="utf-8"))
    config["optimizer"]["params"]["torch_adam"] = True
    file = folder / "torch_adam.json"
    file.write_text(json.dumps(config), encoding="utf-8")
    return file


def train(kind: Kind, steps: int, folder: Path, config: Path = TINY_GPT / "ds_config.json") -> dict[str, Any]:
    """One run in fresh processes; returns what the script measured.

    Raises:
        RuntimeError: the run failed, or was not on the accelerator it should be on.
    """
    command = [str(Path(sys.executable).with_name("deepspeed")), "--quiet", "--num_accelerators", str(RANKS)]
    command += ["--master_port", str(free_port()), str(TINY_GPT / "train.py")]
    command += ["--deepspeed_config", str(config)]
    command += ["--steps", str(steps), "--eval-every", str(steps), "--eval-windows", "16", "--sample-bytes", "0"]
    done = subprocess.run(
        [*command, "--out", str(folder)], env=environment(kind), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    run: dict[str, Any] = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    if not run["accelerator"].startswith(ACCELERATOR_MODULES[kind.accelerator]):
        raise RuntimeError(f"wanted {kind.accelerator}, but the run was on {run['accelerator']}")
    return run


def environment(kind: Kind) -> dict[str, str]:
    """The caller's environment without anything that chooses an accelerator or threads, plus what `kind` asks for."""
    result = child_environment(DS_PLUGIN_AUTOLOAD="1" if kind.accelerator == OURS else "0")
    # DeepSpeed's own builds look for ninja on the PATH.
    result["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), result.get("PATH", os.defpath)])
    for variable in ("DS_ACCELERATOR", "OMP_NUM_THREADS", "DS_PLUGIN_CPU_THREADS", *LOCAL_WORLD_SIZE_VARIABLES):
        result.pop(variable, None)
    if kind.threads == BY_HAND:
        result["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // RANKS))
    return result


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def step_time(runs: dict[Kind, list[dict[str, Any]]], threads: str) -> dict[str, Any]:
    """Seconds and rank 0's CPU seconds a step of both accelerators, and how many times faster ours is."""
    in_tree, ours = runs[Kind(IN_TREE, threads)], runs[Kind(OURS, threads)]
    result: dict[str, Any] = {"threads": {IN_TREE: in_tree[0]["threads"], OURS: ours[0]["threads"]}}
    for clock in ("seconds", "cpu_seconds"):
        theirs, mine = ([run[f"median_step_{clock}"] for run in side] for side in (in_tree, ours))
        ratios = [a / b for a, b in zip(theirs, mine, strict=True)]
        result[clock] = {
            IN_TREE: statistics.median(theirs),
            OURS: statistics.median(mine),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
        }
    return result


def losses(runs: dict[Kind, list[dict[str, Any]]], reference: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Largest differences of the losses, step by step: between ours and the in-tree accelerator's, over all repeats.
    For scale, those of the in-tree accelerator with other threads, and of both with torch's AdamW (`reference`)."""
    in_tree, ours = runs[Kind(IN_TREE, BY_HAND)], runs[Kind(OURS, BY_HAND)]
    return {
        f"{OURS} and {IN_TREE}, {AS_INSTALLED}": worst(
            runs[Kind(IN_TREE, AS_INSTALLED)], runs[Kind(OURS, AS_INSTALLED)]
        ),
        f"{OURS} and {IN_TREE}, {BY_HAND}": worst(in_tree, ours),
        f"{IN_TREE} with other threads": worst(in_tree, runs[Kind(IN_TREE, AS_INSTALLED)]),
        f"{IN_TREE} and torch.optim.AdamW": worst([reference], in_tree[:1]),
        f"{OURS} and torch.optim.AdamW": worst([reference], ours[:1]),
    }


def worst(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, float]:
    """Largest absolute and relative difference between the losses of runs at the same place of both lists."""
    pairs = [
        pair
        for one, other in zip(some, others, strict=True)
        for pair in zip(one["losses"], other["losses"], strict=True)
    ]
    return {
        "max_absolute": max(abs(a - b) for a, b in pairs),
        "max_relative": max(abs(a - b) / abs(a) for a, b in pairs),
    }


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the two tables."""
    cpu = results["machine"]
    times = Table(
        title=f"Step time, {RANKS} ranks, {cpu['cores']} cores of {cpu['cpu']}: s (threads a rank); CPU: rank 0"
    )
    for column in ("threads", IN_TREE, OURS, "times faster", "of the repeats"):
        times.add_column(column, justify="left" if column == "threads" else "right")
    for threads, row in results["step_time"].items():
        for clock, name in (("seconds", threads), ("cpu_seconds", f"{threads}, CPU")):
            times.add_row(
                name,
                *(f"{row[clock][side]:.3f} ({row['threads'][side]})" for side in (IN_TREE, OURS)),
                f"{row[clock]['ratio']:.2f}",
                f"{min(row[clock]['ratios']):.2f} - {max(row[clock]['ratios']):.2f}",
            )
    differences = Table(
        title=f"Losses of {results['steps']} steps: largest difference (tolerance {TOLERANCE:g} relative)"
    )
    for column in ("compared", "absolute, nats", "relative"):
        differences.add_column(column, justify="left" if column == "compared" else "right")
    for name, row in results["losses"].items():
        differences.add_row(name, f"{row['max_absolute']:.1e}", f"{row['max_relative']:.1e}")
    console.print(times, differences)


if __name__ == "__main__":
    sys.exit(main())
