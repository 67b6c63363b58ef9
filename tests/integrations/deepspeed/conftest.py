"""Fixtures of the DeepSpeed integration: processes of their own, because the state of imports is what is tested."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed_support import ACCELERATORS, Install, Python


@pytest.fixture
def python(tmp_path: Path) -> Python:
    """``python(program, NAME=value, ...)`` runs a program in a new interpreter and returns what it did.

    ``fails=True`` expects an error, otherwise none; a variable set to None is removed.
    """

    def run(
        program: str, *options: str, fails: bool = False, **variables: str | None
    ) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in {**os.environ, **variables}.items() if value is not None}
        command = [sys.executable, *options, "-c", program]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert (done.returncode != 0) == fails, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


@pytest.fixture
def zap(install: Install) -> Path:
    """The installed plugin ``zap``, which is better than any other; returns the folder of plugins."""
    site = install("zap", priority=50, accelerator="zap_accelerators:Zap")
    (site / "zap_accelerators.py").write_text(ACCELERATORS, encoding="utf-8")
    return site
