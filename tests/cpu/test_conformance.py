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
