"""Run an example on the plugin and on DeepSpeed's own accelerator, and draw what came of both.

    python examples/side_by_side.py out/cifar10 -- deepspeed --num_accelerators 2 examples/cifar10/train.py --out {out}

``{out}`` becomes a folder of each run's own. What the runs write there as metrics.json, ``{"curves": {name: [[step,
value], ...]}}``, is drawn in side_by_side.png, and the largest difference of each curve is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

from matplotlib.figure import Figure

# DeepSpeed as it is without any plugin.
OWN = {"DS_PLUGIN_AUTOLOAD": "0", "DS_ACCELERATOR": "cpu"}
RUNS = {"plugin": {}, "DeepSpeed's own": OWN}

Curves = dict[str, list[list[float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--draw", action="store_true", help="draw what is there; run nothing")
    parser.add_argument("command", nargs="*")
    args = parser.parse_args()
    found: dict[str, Curves] = {}
    for name in RUNS:
        folder = folder_of(args.out, name)
        if not args.draw:
            status, seconds = run(args.command, folder, name)
            print(f"{name}: exit status {status} after {seconds:.0f} s; {folder / 'log.txt'}", flush=True)
            if status:
                sys.exit(status)
        found[name] = curves(folder)
    draw(found, args.out / "side_by_side.png")


def folder_of(out: Path, name: str) -> Path:
    """The folder of one of the `RUNS`."""
    return out / name.replace(" ", "-").replace("'", "")


def run(command: list[str], folder: Path, name: str) -> tuple[int, float]:
    """One of the `RUNS`, whose output goes to the folder's log; gives its exit status and seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    environment = {**os.environ, **RUNS[name]}
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        words = [word.replace("{out}", str(folder)) for word in command]
        done = subprocess.run(words, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    return done.returncode, time.monotonic() - started


def curves(folder: Path) -> Curves:
    """All curves below `folder`, by the folder and name of each."""
    return {
        f"{file.parent.relative_to(folder)} {name}".removeprefix(". "): curve
        for file in sorted(folder.rglob("metrics.json"))
        for name, curve in json.loads(file.read_text(encoding="utf-8")).get("curves", {}).items()
    }


def apart(one: list[list[float]], other: list[list[float]]) -> float:
    """The largest difference of two curves, at the steps that both have."""
    values, others = dict(map(tuple, one)), dict(map(tuple, other))
    differences = [abs(values[step] - others[step]) for step in values.keys() & others.keys()]
    if not all(map(math.isfinite, differences)):  # max alone can miss a NaN
        return math.inf
    return max(differences, default=math.inf)


def draw(found: dict[str, Curves], file: Path) -> None:
    """A panel for each curve, with a line for each run."""
    names = list(dict.fromkeys(name for run in found.values() for name in run))
    figure = Figure(figsize=(4.5 * len(names), 3.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for (run, its), style in zip(found.items(), ("-", "--"), strict=True):
            if name in its:
                axes.plot(*zip(*its[name], strict=True), style, label=run)
        axes.set(title=name, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend()
        one, other = (its.get(name) for its in found.values())
        if one and other:
            (last, value), (_, beside) = one[-1], other[-1]
            values = f"{value:.4f} and {beside:.4f} at step {last:.0f}"
            print(f"{name}: {values}; never further apart than {apart(one, other):.1g}")
    figure.savefig(file, dpi=100)
    print(f"drawn: {file}")


if __name__ == "__main__":
    main()
