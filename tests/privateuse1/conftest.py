"""Fixtures of the PrivateUse1 backend. The device below it is the simulated one, as it is or changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import device_programs
from device_programs import Run, RunChecks
from ds_plugin_sdk import privateuse1, simulator

# The folders of sources that a test may change, by the names that device_checks.py gives them.
SOURCES = {"runtime": simulator.sources_dir(), "torch": Path(privateuse1.include_dir()) / "torch"}


@pytest.fixture(scope="session")
def run(kernel_cache: Path) -> Run:
    """``run("-c", program)`` runs Python; ``fails=True`` expects an error, otherwise none."""
    return device_programs.runner(Path(__file__).resolve().parent, kernel_cache)


@pytest.fixture(scope="session")
def run_checks(run: Run) -> RunChecks:
    """``run_checks(names)`` runs checks in one process; a dict from name to what went wrong, empty if nothing did."""

    def run_checks(names: list[str], *options: str) -> dict[str, str]:
        done = run("device_checks.py", *options, *names)
        outcomes = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return {outcome["check"]: outcome["failure"] for outcome in outcomes}

    return run_checks


@pytest.fixture
def with_change(tmp_path: Path) -> Callable[[str, str, str], None]:
    """``with_change("runtime/memory.cpp", old, new)`` changes a line in a copy of a folder of sources."""

    def change(file: str, old: str, new: str) -> None:
        folder = file.split("/", maxsplit=1)[0]
        if not (tmp_path / folder).exists():
            shutil.copytree(SOURCES[folder], tmp_path / folder)
        source = (tmp_path / file).read_text(encoding="utf-8")
        assert source.count(old) == 1, f"{file} no longer has one line {old!r}: change the test with it"
        (tmp_path / file).write_text(source.replace(old, new), encoding="utf-8")

    return change
