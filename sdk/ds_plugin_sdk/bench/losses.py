"""A generated plugin's example on its device against the CPU: the losses at every ZeRO stage, dtype and launcher."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_plugin_sdk.bench import program
from ds_plugin_sdk.conformance.programs import free_port
from ds_plugin_sdk.losses import largest_difference
from ds_plugin_sdk.settings import child_environment

# Losses are about 1. In float32 only the order of sums differs; bfloat16 has 8 bits, and gradients are summed in it.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
STEPS = 20

ONE_RANK, DEEPSPEED, TORCHRUN = "one rank", "deepspeed, 2 ranks", "torchrun, 2 ranks"


@dataclass(frozen=True)
class Row:
    """One run, compared.

    Attributes:
        dtype: of the training.
        zero_stage: DeepSpeed's.
        run: by which launcher; or resumed from a checkpoint, which is compared with a run that was not stopped.
        largest_difference: of the losses at one step, from those of the same training on one rank of the CPU.
        tolerance: that is allowed.
    """

    dtype: str
    zero_stage: int
    run: str
    largest_difference: float
    tolerance: float

    @property
    def agrees(self) -> bool:
        return self.largest_difference <= self.tolerance


def run(project: Path) -> Iterator[Row]:
    """Train on a plugin's device and on the CPU, and compare.

    Args:
        project: the folder of a plugin that ``sdk new-plugin`` made and that is installed here.

    Raises:
        RuntimeError: a run failed; the text is what it printed.
    """
    project = project.resolve()
    plugin = project.name.removeprefix("ds-plugin-").replace("-", "_")
    for dtype, tolerance in TOLERANCE.items():
        for stage in range(4):
            reference = _losses(project, "cpu", ONE_RANK, stage, dtype)
            for how in (ONE_RANK, DEEPSPEED, TORCHRUN):
                difference = largest_difference(_losses(project, plugin, how, stage, dtype), reference)
                yield Row(dtype, stage, how, difference, tolerance)
    for stage in (1, 3):
        whole = _losses(project, plugin, DEEPSPEED, stage, "float32")
        with tempfile.TemporaryDirectory() as checkpoint:
            parts = [
                loss
                for option in ("--save", "--resume")
                for loss in _losses(project, plugin, DEEPSPEED, stage, "float32", option, checkpoint, steps=STEPS // 2)
            ]
        yield Row("float32", stage, "resumed", largest_difference(parts, whole), 0.0)


def _losses(
    project: Path, plugin: str, how: str, stage: int, dtype: str, *more: str, steps: int = STEPS
) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "losses.json"
        options = ["--steps", str(steps), "--zero", str(stage), "--losses", str(file), *more]
        options += ["--bf16"] if dtype == "bfloat16" else []
        done = program.run(
            [sys.executable, *_launcher(how), str(project / "examples" / "train.py"), *options],
            child_environment(DS_ACCELERATOR=plugin),
        )
        if done.returncode:
            raise RuntimeError(f"training on {plugin}, {how}, ZeRO {stage}, {dtype} failed:\n{done.stderr[-4000:]}")
        values: list[float] = json.loads(file.read_text(encoding="utf-8"))
        return values


def _launcher(how: str) -> list[str]:
    port = str(free_port())
    return {
        ONE_RANK: [],
        DEEPSPEED: ["-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", port],
        TORCHRUN: ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port],
    }[how]
