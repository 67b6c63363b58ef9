"""The CUDA kernels and their bindings as torch ops, on the host in place of a GPU: what conformance says of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ds_plugin_sdk.settings import child_environment

# A few cases of each family: cheap ones, that cover numbers, layouts, refusals and repeatability. All of them:
# PYTHONPATH=plugins/cuda:tests/cuda sdk conformance cuda_on_host:CudaOnHost --level ops
CASES = (
    "ops.accuracy/adam_/bfloat16",
    "ops.strided/adam_/float32",
    "ops.accuracy/adam_rollback_/float32",
    "ops.empty/lion_/float16",
    "ops.accuracy/lion_/bfloat16",
    "ops.strided/adagrad_/float16",
    "ops.accuracy/lamb_/bfloat16",
    "ops.deterministic/lamb_",
)


@pytest.mark.compiler
@pytest.mark.slow
def test_the_kernels_hold_the_contract_on_the_host() -> None:
    """In a process of its own: the kernels take the place of the CPU's."""
    patterns = [word for case in CASES for word in ("-k", case)]
    command = [sys.executable, "-m", "ds_plugin_sdk.cli", "conformance", "cuda_on_host:CudaOnHost", *patterns]
    path = ":".join(path for path in sys.path if path)
    done = subprocess.run(
        command,
        env=child_environment(PYTHONPATH=path, COLUMNS="200"),
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CASES)} passed" in done.stdout, done.stdout
