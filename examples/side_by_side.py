"""Run an example on the plugin and on DeepSpeed's own accelerator, and draw what came of both.

    python examples/side_by_side.py out/cifar10 -- deepspeed --num_accelerators 2 examples/cifar10/train.py --out {out}

``{out}`` becomes a folder of each run's own. What the runs write there as metrics.json, ``{"curves": {name: [[step,
value], ...]}}``, is drawn in side_by_side.png, and the largest difference of each curve is printed.
"""

from __future__ import annotations

import argparse
import json
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
    for name, variables in RUNS.items():
        folder = args.out / name.replace(" ", "-").replace("'", "")
        if not args.draw:
            run(args.command, folder, variables, name)
        found[name] = curves(folder)
    draw(found, args.out / "side_by_side.png")


def run(command: list[str], folder: Path, variables: dict[str, str], name: str) -> None:
    """One run; its output goes to the folder's log."""
    folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        words = [word.replace("{out}", str(folder)) for word in command]
        done = subprocess.run(words, env={**os.environ, **variables}, stdout=log, stderr=subprocess.STDOUT, check=False)
    print(f"{name}: exit status {done.returncode} after {time.monotonic() - started:.0f} s; {log.name}", flush=True)
    if done.returncode:
        sys.exit(done.returncode)


def curves(folder: Path) -> Curves:
    """All curves below `folder`, by the folder and name of each."""
    return {
        f"{file.parent.relative_to(folder)} {name}".removeprefix(". "): curve
        for file in sorted(folder.rglob("metrics.json"))
        for name, curve in json.loads(file.read_text(encoding="utf-8"))["curves"].items()
    }


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
        one, other = (dict(map(tuple, its.get(name, []))) for its in found.values())
        if common := one.keys() & other.keys():
            apart = max(abs(one[step] - other[step]) for step in common)
            last = max(common)
            values = f"{one[last]:.4f} and {other[last]:.4f} at step {last:.0f}"
            print(f"{name}: {values}; never further apart than {apart:.1g}")
    figure.savefig(file, dpi=100)
    print(f"drawn: {file}")


if __name__ == "__main__":
    main()
