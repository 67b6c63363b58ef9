"""Loads the example's modules under names of their own: the example is a folder of scripts, not a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TINY_GPT = Path(__file__).parents[2] / "examples" / "tiny_gpt"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tiny_gpt_{name}", TINY_GPT / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_gpt_folder() -> Path:
    return TINY_GPT


@pytest.fixture(scope="session")
def data() -> ModuleType:
    return _load("data")


@pytest.fixture(scope="session")
def model() -> ModuleType:
    return _load("model")
