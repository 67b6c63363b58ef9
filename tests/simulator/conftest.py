"""Fixtures of the simulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

import device_programs


@pytest.fixture(scope="session")
def run(kernel_cache: Path) -> device_programs.Run:
    """``run("-c", program)`` runs Python; ``fails=True`` expects an error, otherwise none."""
    return device_programs.runner(Path(__file__).resolve().parent, kernel_cache)
