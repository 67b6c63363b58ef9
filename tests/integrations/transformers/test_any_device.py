"""transformers' models on a device that has no kernels of ours: by reference implementations, then removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.compiler, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).with_name("accelerated_device.py")
LAYERS, STEPS = 2, 12


@pytest.fixture(scope="module")
def report(kernel_cache: Path) -> dict[str, Any]:
    """What `accelerated_device.py` found."""
    variables = {
        "DS_PLUGIN_CACHE_DIR": str(kernel_cache),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(PROGRAM.parents[2]),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(params=["gpt2", "opt", "llama", "qwen3"])
def found(request: pytest.FixtureRequest, report: dict[str, Any]) -> dict[str, Any]:
    model: dict[str, Any] = report[request.param]
    return model


def test_the_hosts_tokens_come_from_the_device(found: dict[str, Any]) -> None:
    assert found["ours"] == found["expected"]
    assert len({token for row in found["ours"] for token in row}) > 20, "a model that says little tests little"
    assert found["devices"] == found["devices_of_calls"] == ["zap"]
    assert found["calls"]["cached_attention"] == LAYERS * STEPS
    assert found["calls"]["linear"] == (4 * LAYERS + 1) * STEPS


def test_off_again(found: dict[str, Any]) -> None:
    assert found["restored"]
    assert found["after"] == found["expected"]
    assert not found["calls_after"]


def test_int8(found: dict[str, Any]) -> None:
    assert 0 < found["int8_error"] < 0.1


def test_int8_cache(found: dict[str, Any]) -> None:
    assert found["int8_cache_calls"]["cached_attention_int8"] == LAYERS * STEPS
    assert 0 < found["int8_cache_error"] < 0.03
