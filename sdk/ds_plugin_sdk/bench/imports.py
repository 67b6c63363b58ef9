"""What the SDK adds to ``import torch`` and ``import deepspeed``, with 1 and with 100 plugins installed."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ds_plugin_sdk.bench.timing import Spread, in_turns, spread
from ds_plugin_sdk.settings import child_environment


@dataclass(frozen=True)
class Row:
    """One import, timed in new processes that take turns.

    Attributes:
        statement: what is imported.
        plugins: number of installed plugins; 0 means that the SDK's hook is switched off.
        seconds: median wall time of the process.
        added_percent: against the row without the SDK.
        spread: of the seconds.
    """

    statement: str
    plugins: int
    seconds: float
    added_percent: float | None
    spread: dict[str, Spread] = field(default_factory=dict)


def run(repeats: int = 7) -> list[Row]:
    """Median import times; the processes of the three cases take turns, so that noise falls on all alike."""
    with tempfile.TemporaryDirectory() as folder:
        crowd = fake_plugins(Path(folder), 99)
        cases = {
            0: child_environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0", DS_PLUGIN_AUTOLOAD="0"),
            1: child_environment(),
            100: child_environment(PYTHONPATH=str(crowd)),
        }
        rows: list[Row] = []
        for statement in ("import torch", "import torch, deepspeed"):
            processes = {count: partial(_seconds, statement, environment) for count, environment in cases.items()}
            times = {count: values[1:] for count, values in in_turns(processes, repeats + 1).items()}
            without = statistics.median(times[0])
            for count, values in times.items():
                seconds = statistics.median(values)
                added = 100 * (seconds / without - 1) if count else None
                rows.append(Row(statement, count, seconds, added, {"seconds": spread(values)}))
    return rows


def fake_plugins(folder: Path, count: int) -> Path:
    """A folder for ``PYTHONPATH`` with distributions of plugins whose devices are absent."""
    for number in range(count):
        name = f"bench{number}"
        info = folder / f"ds_plugin_{name}-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ds-plugin-{name}\nVersion: 0\n", encoding="ascii")
        (info / "entry_points.txt").write_text(
            f"[ds_plugin_sdk.plugins]\n{name} = ds_plugin_{name}:plugin\n", encoding="ascii"
        )
        (folder / f"ds_plugin_{name}.py").write_text(
            "from ds_plugin_sdk import Plugin, Probe\n"
            f"plugin = Plugin(name={name!r}, sdk_api=(1, 0), accelerator='none:None', "
            "probe=lambda: Probe.absent('no device'))\n",
            encoding="ascii",
        )
    return folder


def _seconds(statement: str, environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], env=environment, check=True, capture_output=True)
    return time.perf_counter() - start
