"""Fixtures of the conformance suite's own tests: real workers, on a target that misbehaves in every way."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def misfit_on_path(compiled_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``misfit:Misfit`` is a target, in this process and in its children."""
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)


@pytest.fixture
def sdk() -> list[str]:
    """The command ``sdk``."""
    return [sys.executable, "-m", "ds_plugin_sdk.cli"]
