"""The JIT on the Adam family: cold build against DeepSpeed's own, warm load, and eight processes at once.

Times begin when torch (or DeepSpeed) is imported and end when the op is loaded, each in a new process. Caches are new
folders; the user's own is not touched.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_plugin_sdk.settings import child_environment

OURS = """\
import sys, time
import torch
print("ready", flush=True)
sys.stdin.readline()
start = time.perf_counter()
from ds_plugin_sdk import jit
from ds_plugin_sdk.op_builder.host.cpu_adam import CPUAdamBuilder
artifact, _ = jit.obtain(CPUAdamBuilder().build_spec())
print(artifact.origin, time.perf_counter() - start)
"""

DEEPSPEED = """\
import os, sys, time
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # DeepSpeed and ninja print
import deepspeed
from deepspeed.ops.op_builder.cpu import CPUAdamBuilder
print("ready", file=answer, flush=True)
sys.stdin.readline()
start = time.perf_counter()
CPUAdamBuilder().load(verbose=False)
print("compiled", time.perf_counter() - start, file=answer, flush=True)
"""


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        case: what was done.
        runs: number of times; `seconds` is the median.
        seconds: from after the import of torch until the op is loaded; of several processes, until the last is done.
        compilations: by how many processes, in one run.
        ratio: against the case named in `against`: above 1 is faster for a build, slower for eight processes.
        against: the case compared with.
        target: what DESIGN section 5 asks for.
    """

    case: str
    runs: int
    seconds: float
    compilations: int
    ratio: float | None = None
    against: str = ""
    target: str = ""


def run(deepspeed: bool = True, repeats: int = 3, processes: int = 8, warm_repeats: int = 9) -> list[Row]:
    """Measure all cases; with `deepspeed`, which takes a minute, DeepSpeed's build too.

    Raises:
        RuntimeError: a process failed; the text is what it said.
    """
    cold: list[float] = []
    together: list[float] = []
    compilations = 0
    for _ in range(repeats):  # the cases take turns, so that noise falls on all alike
        with tempfile.TemporaryDirectory() as folder:
            cold += [seconds for _, seconds in _start(OURS, _ours(folder))]
        with tempfile.TemporaryDirectory() as folder:
            finished = _start(OURS, _ours(folder), processes)
            together.append(max(seconds for _, seconds in finished))
            compilations = sum(origin == "compiled" for origin, _ in finished)
    alone = statistics.median(cold)
    rows = [Row("Adam, cold build", repeats, alone, 1)]
    if deepspeed:
        theirs = _deepspeed()
        rows.insert(0, Row("DeepSpeed's cpu_adam, cold build", 1, theirs, 1))
        rows[1] = Row("Adam, cold build", repeats, alone, 1, theirs / alone, "DeepSpeed's", ">= 8")
    ratio = statistics.median(together) / alone
    name = f"Adam, {processes} processes at once"
    rows.append(
        Row(name, repeats, statistics.median(together), compilations, ratio, "one process", "1 compilation, <= 1.3")
    )
    warm = _warm(warm_repeats)
    return [*rows, Row("Adam, warm load", warm_repeats, statistics.median(warm), 0, target="<= 0.030 s")]


def _warm(repeats: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        _start(OURS, _ours(folder))
        return [seconds for _ in range(repeats) for _, seconds in _start(OURS, _ours(folder))]


def _ours(folder: str) -> dict[str, str]:
    return child_environment(DS_PLUGIN_CACHE_DIR=folder, DS_PLUGIN_COMPILE="1")


def _deepspeed() -> float:
    with tempfile.TemporaryDirectory() as folder:
        environment = child_environment(TORCH_EXTENSIONS_DIR=folder, DS_ACCELERATOR="cpu", DS_PLUGIN_AUTOLOAD="0")
        # Its build calls the ninja that pip installed beside this Python.
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
        ((_, seconds),) = _start(DEEPSPEED, environment)
        return seconds


def _start(program: str, environment: Mapping[str, str], count: int = 1) -> list[tuple[str, float]]:
    """Run `program` in `count` processes, started together once all have done their imports: (origin, seconds) each."""
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
        process.stdin.write("\n")
        process.stdin.flush()
    return [_finish(process) for process in running]


def _finish(process: subprocess.Popen[str]) -> tuple[str, float]:
    out, err = process.communicate()
    if process.returncode:
        raise RuntimeError(f"a process of the benchmark failed:\n{err}")
    origin, seconds = out.split()
    return origin, float(seconds)
