"""What the SDK itself costs at scale: many plugins, many processes on one cache, and what is downloaded.

Processes are forked from one that has imported torch and the SDK, so that their time is the cache's. A slow file system
is played: what Python opens, makes, renames, lists and removes in the cache waits first, as for an answer over a
network; the compiler and the loader do not.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ds_plugin_sdk import registry
from ds_plugin_sdk.bench import program
from ds_plugin_sdk.bench.imports import fake_plugins
from ds_plugin_sdk.bench.timing import Spread, spread
from ds_plugin_sdk.settings import child_environment

PLUGINS = (1, 10, 100)
PROCESSES = (1, 8, 64)
LATENCY = 0.005  # seconds of a call on the slow file system
LOCAL, SLOW = "local", f"{LATENCY * 1e3:g} ms a call"
CHOICE, COLD, WARM = "choice of a plugin", "cache, cold", "cache, warm"

_CACHE = "cache"
_WAITS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "os.utime", "os.link"}


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        what: the choice among installed plugins; Adam's kernels out of the cache; or a wheel.
        count: plugins, or processes that start at once.
        file_system: that the cache is on.
        seconds: median; of several processes, the last one's.
        compilations: by how many processes.
        mib: size.
        spread: of the seconds.
    """

    what: str
    count: int
    file_system: str
    seconds: float | None = None
    compilations: int | None = None
    mib: float | None = None
    spread: dict[str, Spread] = field(default_factory=dict)


def run(
    wheels: Path | None = None,
    plugins: Sequence[int] = PLUGINS,
    processes: Sequence[int] = PROCESSES,
    cold: int = 3,
    warm: int = 7,
) -> Iterator[Row]:
    """Measure.

    Args:
        wheels: a folder with wheels, whose sizes are rows too.
        plugins: how many are installed; all but one have an absent device.
        processes: how many start at once.
        cold: repeats with an empty cache.
        warm: repeats of everything else.

    Raises:
        RuntimeError: a process failed; the text is what it said.
    """
    for latency, name in ((0.0, LOCAL), (LATENCY, SLOW)):
        with tempfile.TemporaryDirectory() as folder:
            task = {"folder": folder, "latency": latency, "cold": cold, "warm": warm, "processes": list(processes)}
            for found in _all({**task, "plugins": [] if latency else list(plugins)}):
                seconds = found.pop("seconds")
                row = {"file_system": name, **found, "seconds": statistics.median(seconds)}
                yield Row(**row, spread={"seconds": spread(seconds)})
    for file in sorted(wheels.glob("*.whl")) if wheels is not None else ():
        yield Row(f"wheel of {file.name.partition('-')[0]}", 1, "", mib=file.stat().st_size / 2**20)


def _all(task: dict[str, Any]) -> list[dict[str, Any]]:
    """What `main` gives in a new process."""
    command = [sys.executable, "-m", __name__, json.dumps(task)]
    environment = child_environment(DS_PLUGIN_CACHE_DIR=str(Path(task["folder"], _CACHE)), DS_PLUGIN_COMPILE="1")
    done = program.run(command, environment)
    if done.returncode:
        raise RuntimeError(f"a process of the benchmark failed:\n{done.stderr[-4000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def main(
    folder: str, latency: float, cold: int, warm: int, processes: Sequence[int], plugins: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """What the process does that has imported all: the rows, with the seconds of all repeats."""
    from ds_plugin_sdk import jit
    from ds_plugin_sdk.op_builder.cpu.kernels import BUILDERS

    top = Path(folder)
    for count in plugins:
        crowd = top / f"plugins{count}"
        crowd.mkdir()
        fake_plugins(crowd, count - 1)
        seconds = [_at_once(1, partial(_choose, str(crowd)))[0][0] for _ in range(warm)]
        yield {"what": CHOICE, "count": count, "file_system": "", "seconds": seconds}
    spec = BUILDERS["CPUAdamBuilder"]().build_spec()
    if latency:
        sys.addaudithook(partial(_wait, folder, latency))

    def repeat(count: int, times: int, empty: bool) -> tuple[list[float], int]:
        seconds, compiled = [], 0
        for _ in range(times):
            if empty:
                shutil.rmtree(top / _CACHE, ignore_errors=True)
            found = _at_once(count, lambda: str(jit.obtain(spec)[0].origin))
            seconds.append(max(taken for taken, _ in found))
            compiled = max(compiled, sum(origin == "compiled" for _, origin in found))
        return seconds, compiled

    for count in processes:
        for what, times, empty in ((COLD, cold, True), (WARM, warm, False)):
            seconds, compilations = repeat(count, times, empty)
            yield {"what": what, "count": count, "seconds": seconds, "compilations": compilations}


def _choose(folder: str) -> str:
    sys.path.insert(0, folder)
    registry.preview()
    return "chosen"


def _wait(top: str, latency: float, event: str, arguments: tuple[Any, ...]) -> None:
    if event in _WAITS and str(arguments[0]).startswith(top):
        time.sleep(latency)


def _at_once(count: int, load: Callable[[], str]) -> list[tuple[float, str]]:
    """Seconds and origin of `load` in each of some forks, which wait until all are there."""
    gate, answers = os.pipe(), os.pipe()
    try:
        children = [_forked(gate, answers, load) for _ in range(count)]
        os.write(gate[1], b"." * count)
    finally:
        os.close(gate[1])  # where one cannot be forked, the others end
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    for end in (gate[0], answers[1]):
        os.close(end)
    with os.fdopen(answers[0]) as said:
        lines = said.read().splitlines()
    if failed:
        raise RuntimeError(f"{len(failed)} of {count} processes failed")
    return [(float(line.split()[0]), line.split()[1]) for line in lines]


def _forked(gate: tuple[int, int], answers: tuple[int, int], load: Callable[[], str]) -> int:
    """A fork that loads once it can read from the gate, and answers."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.close(gate[1])
        if os.read(gate[0], 1):
            start = time.perf_counter()
            origin = load()
            os.write(answers[1], f"{time.perf_counter() - start} {origin}\n".encode())
            status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(list(main(**json.loads(sys.argv[1])))))
