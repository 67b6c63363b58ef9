"""The native kernels of this process, compiled once into a cache of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session", autouse=True)
def kernels(native: Callable[..., None]) -> None:
    native("adam", "adagrad", "lion")
