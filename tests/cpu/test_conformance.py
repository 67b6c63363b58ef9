"""The CPU plugin under the suite that vendors run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ds_plugin_sdk.settings import child_environment


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_every_op_that_wants_a_kernel_has_one() -> None:
    command = [sys.executable, "-m", "ds_plugin_sdk.cli", "conformance", "cpu", "-k", "ops.native"]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all that was checked holds" in done.stdout


@pytest.mark.deepspeed
@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.usefixtures("compiled_once")
def test_float16_trains_on_every_cpu_where_the_user_wants_it() -> None:
    """Losses near those of the host, and a loss scale that finds its size."""
    wanted = ["-k", "features.types/float16", "-k", "features.types/loss_scaling"]
    command = [sys.executable, "-m", "ds_plugin_sdk.cli", "conformance", "cpu", *wanted]
    environment = child_environment(DS_PLUGIN_CPU_FLOAT16="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1], done.stdout
