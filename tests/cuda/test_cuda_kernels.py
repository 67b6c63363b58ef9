"""The CUDA kernels and their bindings as torch ops, on the CPU in place of a GPU: what conformance says of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import edges
from ds_plugin_sdk.settings import child_environment

# A few cases of each family: cheap ones, that cover numbers, layouts, errors and repeatability. All of them:
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
    "ops.strided/layer_norm/float16",
    "ops.not_finite/softmax/bfloat16",
    "ops.strided/bias_activation/bfloat16",
    "ops.empty/gated_activation/float16",
    "ops.strided/residual_add_bias_/bfloat16",
    "ops.strided/rotary_/float16",
    "ops.strided/cached_attention/bfloat16",
    "ops.strided/cached_attention_int8/float16",
    "ops.strided/cross_entropy_/bfloat16",
    "ops.strided/linear/float16",
    "ops.strided/quantize/float16",
    "ops.strided/dequantize/bfloat16",
    "ops.strided/nhwc_bias_add_add/float16",
    "ops.strided/token_scatter_/bfloat16",
    "ops.strided/dropout_add_layer_norm/bfloat16",
    "ops.strided/masked_softmax_dropout_backward/float16",
)


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("compiled_once")
@pytest.mark.parametrize("masked", [{}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}], ids=["this CPU", "CPU without float16"])
def test_the_kernels_hold_the_contract_on_the_cpu(masked: dict[str, str]) -> None:
    """In a process of its own: the kernels take the place of the CPU's. Compiling them takes longer than running them,
    hence -O0. The dtypes are a GPU's, so the cases are the same on every CPU.
    """
    patterns = [word for case in CASES for word in ("-k", case)]
    program = [sys.executable, "-m", "ds_plugin_sdk.cli"]
    command = [*program, "conformance", "cuda_on_host:CudaOnHost", "--timeout", "600", *patterns]
    path = ":".join(path for path in sys.path if path)
    done = subprocess.run(
        command,
        env=child_environment(PYTHONPATH=path, COLUMNS="200", CXXFLAGS="-O0", **masked),
        capture_output=True,
        text=True,
        check=False,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CASES)} passed" in done.stdout, done.stdout


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("compiled_once")
def test_calls_at_the_edges_on_the_cpu() -> None:
    """In a process of its own, as above."""
    path = ":".join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, edges.__file__, "cuda_on_host:CudaOnHost"],
        env=child_environment(PYTHONPATH=path, DS_ACCELERATOR="cpu", CXXFLAGS="-O0"),
        capture_output=True,
        text=True,
        check=False,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout + done.stderr
