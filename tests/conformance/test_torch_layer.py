"""torch's own tests on a plugin's device: which tests run, on which device, and how they end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mutants.mutant import SIMULATED

pytestmark = [pytest.mark.slow, pytest.mark.compiler]

# A test file as torch's are.
TORCH_TEST = """
import torch
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_utils import TestCase, run_tests

class TestSum(TestCase):
    def test_device(self, device):
        self.assertEqual(torch.ones(3, device=device).sum().item(), {sum})
        print("ran on", torch.device(device).type)

instantiate_device_type_tests(TestSum, globals(), allow_xpu=True)
if __name__ == "__main__":
    run_tests()
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ds_plugin_sdk.conformance.torch_layer", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


@pytest.mark.parametrize(("target", "device"), [("cpu", "cpu"), (SIMULATED, "simulated")])
def test_opinfo_samples_run_on_the_device(target: str, device: str) -> None:
    done = run(target, "-v", "-k", "compare_cpu_add_", "-k", "compare_cpu_sub_")
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.findall(r"^test_compare_cpu_(\w+)_float32 .* \.\.\. ok$", done.stderr, flags=re.MULTILINE)
    assert set(ran) == {f"add_{device}", f"sub_{device}"}


@pytest.mark.parametrize(("target", "device"), [("cpu", "cpu"), (SIMULATED, "simulated")])
def test_a_test_file_of_torch_runs_on_the_device_alone(target: str, device: str, tmp_path: Path) -> None:
    file = tmp_path / "test_sum.py"
    file.write_text(TORCH_TEST.format(sum=3.0), encoding="utf-8")
    done = run(target, str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Ran 1 test" in done.stderr
    assert f"ran on {device}" in done.stdout


def test_what_fails_there_is_a_failure_here(tmp_path: Path) -> None:
    file = tmp_path / "test_sum.py"
    file.write_text(TORCH_TEST.format(sum=4.0), encoding="utf-8")
    done = run("cpu", str(file))
    assert done.returncode == 1
    assert "Expected 4.0 but got 3.0" in done.stderr


def test_torch_s_tests_run_where_ci_is_set(tmp_path: Path) -> None:
    """In anybody's continuous integration: torch would ask there for the reports of its own."""
    file = tmp_path / "test_sum.py"
    file.write_text(TORCH_TEST.format(sum=3.0), encoding="utf-8")
    done = run("cpu", str(file), CI="true")
    assert done.returncode == 0, done.stdout + done.stderr


def test_that_nothing_ran_is_no_success() -> None:
    assert run("cpu", "-k", "no such op").returncode == 3


def test_a_plugin_that_is_not_there_is_said_in_one_line() -> None:
    done = run("nope")
    assert done.returncode == 1
    assert done.stderr.startswith("error: there is no such plugin (plugin 'nope')")
    assert "Traceback" not in done.stderr
