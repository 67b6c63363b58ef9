"""ZeRO-Infinity: parameters and optimizer states on NVMe under unmodified DeepSpeed, on two devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launchers import free_port

WORKER = Path(__file__).parent / "nvme_worker.py"

pytestmark = [pytest.mark.deepspeed, pytest.mark.compiler, pytest.mark.usefixtures("compiled_once")]


def train(device: str, offload: str, folder: Path, steps: int, *words: str, ends_by: int = 0) -> dict[str, Any]:
    launcher = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER), device, offload, str(folder), str(steps), *words],
        env={**os.environ, **{name: str(value) for name, value in launcher.items()}},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ends_by, done.stderr
    return {} if ends_by else json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path) -> dict[str, Any]:
    """Four steps on the CPU without NVMe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_PLUGIN_CACHE_DIR", str(kernel_cache))
        found = train("cpu", "cpu", tmp_path_factory.mktemp("memory"), 4)
    assert len(set(found["losses"])) == 4
    assert found["moved"] == {"async_pread": 0, "async_pwrite": 0}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "zap"])
def test_training_on_nvme_is_training_in_memory(device: str, in_memory: dict[str, Any], tmp_path: Path) -> None:
    on_nvme = train(device, "nvme", tmp_path, 4)
    assert on_nvme["losses"] == in_memory["losses"]
    assert on_nvme["origin"] in ("compiled", "cache")
    # Each step moves four weights of a MiB and their states.
    assert all(count > 32 << 20 for count in on_nvme["moved"].values()), on_nvme["moved"]


@pytest.mark.slow
def test_a_killed_run_resumes_from_its_checkpoint(in_memory: dict[str, Any], tmp_path: Path) -> None:
    """What it left of its swap files does no harm, and the checkpoint has all that is needed for the very same losses.

    DeepSpeed does not read all of it: neither Adam's steps and moments nor tensors of less than a MiB.
    """
    train("cpu", "nvme", tmp_path / "swap", 3, "checkpoint", "killed", ends_by=-signal.SIGKILL)
    assert any((tmp_path / "swap").rglob("*.tensor.swp"))
    resumed = train("cpu", "nvme", tmp_path / "swap", 4, "resume", "completed")
    assert resumed["losses"] == in_memory["losses"][2:]
