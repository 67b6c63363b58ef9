"""Fixtures of the conformance suite's own tests: real workers, on a target that misbehaves in every way."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module", autouse=True)
def targets_on_path() -> Iterator[None]:
    """``misfit:Misfit`` and ``mutants:...`` are targets, in this process and in its children."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in (HERE, HERE.parent):
            patch.syspath_prepend(str(folder))
            patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture(autouse=True)
def kernels(compiled_once: None) -> None:
    """Workers load what is compiled already."""


@pytest.fixture
def sdk() -> list[str]:
    """The command ``sdk``."""
    return [sys.executable, "-m", "ds_plugin_sdk.cli"]
