"""A generated plugin's example on its simulated device against the CPU: every ZeRO stage, data type and launcher.

    python benchmarks/simulated_training.py PROJECT

PROJECT is the folder of a plugin that `sdk new-plugin` made and that is installed here. For each run the table gives
the largest difference of its losses from those of the same stage and data type on one rank of the CPU, and at last that
of a run which was stopped and resumed from its checkpoint, from one that was not.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ds_plugin_sdk.settings import child_environment

# Losses are about 1. In float32 only the order of sums differs; bfloat16 has 8 bits, and gradients are summed in it.
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
STEPS = 20


def launcher(name: str) -> list[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    module = {
        "one rank": [],
        "deepspeed, 2 ranks": ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", port],
        "torchrun, 2 ranks": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port],
    }[name]
    return [sys.executable, *module]


def losses(project: Path, plugin: str, how: str, stage: int, dtype: str, *more: str, steps: int = STEPS) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "losses.json"
        options = ["--steps", str(steps), "--zero", str(stage), "--losses", str(file), *more]
        options += ["--bf16"] if dtype == "bf16" else []
        command = [*launcher(how), str(project / "examples" / "train.py"), *options]
        environment = child_environment(DS_ACCELERATOR=plugin)
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        values: list[float] = json.loads(file.read_text(encoding="utf-8"))
        return values


def largest_difference(first: list[float], second: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", type=Path)
    project: Path = parser.parse_args().project.resolve()
    plugin = project.name.removeprefix("ds-plugin-").replace("-", "_")
    table = Table("type", "ZeRO", "launcher", "largest difference", "tolerance", title=f"{plugin} against cpu")
    worst: list[bool] = []
    for dtype, tolerance in TOLERANCE.items():
        for stage in range(4):
            reference = losses(project, "cpu", "one rank", stage, dtype)
            for how in ("one rank", "deepspeed, 2 ranks", "torchrun, 2 ranks"):
                difference = largest_difference(losses(project, plugin, how, stage, dtype), reference)
                worst.append(difference <= tolerance)
                table.add_row(dtype, str(stage), how, f"{difference:.1e}", f"{tolerance:.0e}")
    for stage in (1, 3):
        how = "deepspeed, 2 ranks"
        whole = losses(project, plugin, how, stage, "fp32")
        with tempfile.TemporaryDirectory() as checkpoint:
            parts = losses(project, plugin, how, stage, "fp32", "--save", checkpoint, steps=STEPS // 2)
            parts += losses(project, plugin, how, stage, "fp32", "--resume", checkpoint, steps=STEPS // 2)
        worst.append(parts == whole)
        table.add_row("fp32", str(stage), "resumed", f"{largest_difference(parts, whole):.1e}", "0")
    Console(width=100).print(table)
    return 0 if all(worst) else 1


if __name__ == "__main__":
    sys.exit(main())
