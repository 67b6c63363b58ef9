"""Fixtures of the simulated device: each use of it needs a process of its own, because torch takes one name in each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from running import Run, RunChecks

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "sdk" / "ds_plugin_sdk" / "simulator" / "csrc"


@pytest.fixture(scope="session")
def simulator_environment(kernel_cache: Path) -> dict[str, str]:
    dropped = ("DS_ACCELERATOR", "DS_PLUGINS", "ZAP_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "DS_PLUGIN_CACHE_DIR": str(kernel_cache), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}


@pytest.fixture(scope="session")
def run(simulator_environment: dict[str, str]) -> Run:
    """``run("-c", program)`` runs Python; ``fails=True`` expects an error, otherwise none."""

    def run(*arguments: str, fails: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**simulator_environment, **variables},
            cwd=HERE,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert (done.returncode != 0) == fails, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture(scope="session")
def run_checks(run: Run) -> RunChecks:
    """``run_checks(names)`` runs checks in one process; a dict from name to what went wrong, empty if nothing did."""

    def run_checks(names: list[str], *options: str) -> dict[str, str]:
        done = run("simulator_checks.py", *options, *names)
        outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return {outcome["check"]: outcome["failure"] for outcome in outcomes}

    return run_checks


@pytest.fixture
def with_mistake(tmp_path: Path) -> Callable[[str, str, str], None]:
    """``with_mistake("runtime/memory.cpp", right, wrong)`` makes a mistake in a copy of a folder of sources."""

    def make(file: str, right: str, wrong: str) -> None:
        folder = file.split("/", maxsplit=1)[0]
        if not (tmp_path / folder).exists():
            shutil.copytree(CSRC / folder, tmp_path / folder)
        source = (tmp_path / file).read_text(encoding="utf-8")
        assert source.count(right) == 1, f"{file} no longer has one line {right!r}: change the mistake with it"
        (tmp_path / file).write_text(source.replace(right, wrong), encoding="utf-8")

    return make
