"""What the tests of transformers' models share."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(scope="module")
def kernels(native: Callable[..., None]) -> None:
    """The native kernels that models run on, and nothing else."""
    native("linear", "attention", "norm", "rotary", "decoder_layer")
