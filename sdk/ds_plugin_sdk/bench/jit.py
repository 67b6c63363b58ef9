"""The JIT on the Adam family: cold build against DeepSpeed's own, warm load, and eight processes at once.

Times begin when torch (or DeepSpeed) is imported and end when the op is loaded, each in a new process. Caches are new
folders; the user's own is not touched.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ds_plugin_sdk.bench.timing import Spread, spread
from ds_plugin_sdk.settings import child_environment

OURS = """\
import os, sys, time
import torch
print("ready", flush=True)
sys.stdin.readline()
start, cpu = time.perf_counter(), sum(os.times()[:4])
from ds_plugin_sdk import jit
from ds_plugin_sdk.op_builder.cpu.kernels import BUILDERS
artifact, _ = jit.obtain(BUILDERS["CPUAdamBuilder"]().build_spec())
print(artifact.origin, time.perf_counter() - start, sum(os.times()[:4]) - cpu)
"""

DEEPSPEED = """\
import os, sys, time
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # DeepSpeed and ninja print
import deepspeed
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
print("ready", file=answer, flush=True)
sys.stdin.readline()
start, cpu = time.perf_counter(), sum(os.times()[:4])
CPUAdamBuilder().load(verbose=False)
print("compiled", time.perf_counter() - start, sum(os.times()[:4]) - cpu, file=answer, flush=True)
"""


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        case: what was done.
        runs: number of times; times are medians.
        seconds: wall time from after the import of torch until the op is loaded; of several processes, the longest.
        cpu_seconds: CPU time meanwhile, compilers included, of all processes: the same on a busy machine.
        compilations: by how many processes, in one run.
        ratio: of `seconds`, against the case named in `against`: how often faster a build, how often slower eight.
        against: the case compared with.
        target: what we aim at.
        spread: of the seconds.
    """

    case: str
    runs: int
    seconds: float
    cpu_seconds: float
    compilations: int
    ratio: float | None = None
    against: str = ""
    target: str = ""
    spread: dict[str, Spread] = field(default_factory=dict)


@dataclass(frozen=True)
class _Load:
    """What a process said: how it came by the op, and its wall and CPU time."""

    origin: str
    seconds: float
    cpu_seconds: float


def run(deepspeed: bool = True, repeats: int = 3, processes: int = 8, warm_repeats: int = 9) -> list[Row]:
    """Measure all cases; with `deepspeed`, which takes a minute, DeepSpeed's build too.

    Raises:
        RuntimeError: a process failed; the text is what it said.
    """
    with tempfile.TemporaryDirectory() as top:
        cold, together = [], []
        for number in range(repeats):  # the cases take turns, so that noise falls on all alike
            cold.append(_start(OURS, _ours(f"{top}/cold{number}")))
            together.append(_start(OURS, _ours(f"{top}/together{number}"), processes))
        warm = [_start(OURS, _ours(f"{top}/cold0")) for _ in range(warm_repeats)]
        theirs = [_row("DeepSpeed's cpu_adam, cold build", [_start(DEEPSPEED, _deepspeeds(top))])] if deepspeed else []
    alone = _row("Adam, cold build", cold)
    eight = _row(f"Adam, {processes} processes at once", together)
    return [
        *theirs,
        *(replace(alone, ratio=row.seconds / alone.seconds, against="DeepSpeed's", target=">= 8") for row in theirs),
        *([] if theirs else [alone]),
        replace(eight, ratio=eight.seconds / alone.seconds, against="one process", target="1 compilation, <= 1.3"),
        replace(_row("Adam, warm load", warm), target="<= 0.030 s"),
    ]


def _row(case: str, runs: Sequence[Sequence[_Load]]) -> Row:
    seconds = [max(load.seconds for load in loads) for loads in runs]
    cpu_seconds = statistics.median(sum(load.cpu_seconds for load in loads) for loads in runs)
    compilations = max(sum(load.origin == "compiled" for load in loads) for loads in runs)
    bounds = {"seconds": spread(seconds)}
    return Row(case, len(runs), statistics.median(seconds), cpu_seconds, compilations, spread=bounds)


def _ours(folder: str) -> dict[str, str]:
    # Installed packages have their bytecode; a checkout shall have it too.
    return child_environment(DS_PLUGIN_CACHE_DIR=folder, DS_PLUGIN_COMPILE="1", PYTHONDONTWRITEBYTECODE="")


def _deepspeeds(folder: str) -> dict[str, str]:
    environment = child_environment(
        TORCH_EXTENSIONS_DIR=f"{folder}/deepspeed", DS_ACCELERATOR="cpu", DS_PLUGIN_AUTOLOAD="0"
    )
    # Its build calls the ninja that pip installed beside this Python.
    return {**environment, "PATH": os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])}


def _start(program: str, environment: Mapping[str, str], count: int = 1) -> list[_Load]:
    """Run `program` in `count` processes, started together once all have done their imports."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    for process in running:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already; its status says why
            process.stdin.write("\n")
            process.stdin.flush()
    said = [process.communicate() for process in running]
    for process, (_, err) in zip(running, said, strict=True):
        if process.returncode:
            raise RuntimeError(f"a process of the benchmark failed:\n{err}")
    return [_load(out) for out, _ in said]


def _load(said: str) -> _Load:
    origin, seconds, cpu_seconds = said.split()
    return _Load(origin, float(seconds), float(cpu_seconds))
