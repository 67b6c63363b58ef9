"""DeepSpeed's second inference engine: its own layers, as far as they exist without ragged batches, on our ops."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from ds_plugin_sdk.errors import OpError
from ds_plugin_sdk.integrations.deepspeed.modules import inference_core_ops as core

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    bound = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=bound, atol=bound)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def layer_norm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt() * gamma + beta


def rms_norm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gamma


def test_linear(dtype: torch.dtype) -> None:
    x, weight, out = torch.randn(3, 16).to(dtype), torch.randn(8, 16).to(dtype) / 4, torch.empty(3, 8, dtype=dtype)
    core.create_handle()
    core.blas_linear(out, x, weight)
    close(out, x.double() @ weight.double().T)


def test_products_of_four_dimensions(dtype: torch.dtype) -> None:
    """DeepSpeed's function takes the right factor before the left one."""
    left, right = torch.randn(2, 3, 5, 16).to(dtype) / 4, torch.randn(2, 3, 16, 7).to(dtype)
    out = torch.empty(2, 3, 5, 7, dtype=dtype)
    core.blas_4d_matmul(out, right, left)
    close(out, left.double() @ right.double())


def test_weights_of_six_bits() -> None:
    weight = torch.tensor([[0.0, -0.0625, 0.1875, 0.25], [28.0, -1.75, 1.9, 24.0]]).half()
    kept = weight.double()
    kept[1, 2] = 1.75  # what six bits do not have is rounded towards zero
    scales, x = torch.tensor([[0.5], [2.0]]).half(), torch.randn(3, 4).half()
    upper, lower = core.preprocess_weight(weight)
    assert (upper.nbytes, lower.nbytes) == (2, 4)
    out, workspace = torch.empty(3, 2).half(), torch.empty(1, 2, 3)
    core.cuda_wf6af16_linear(out, x, upper, lower, scales, workspace, 2, 3, 4, 1)
    close(out, x.double() @ (kept * scales.double()).T)


@pytest.mark.parametrize("value", [0.03, 29.0, float("nan"), float("inf")])
def test_what_six_bits_cannot_hold_is_rejected(value: float) -> None:
    with pytest.raises(ValueError, match="six bits cannot hold"):
        core.preprocess_weight(torch.tensor([[1.0, 1.0, 1.0, value]]).half())


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("inference_core_ops", "inference/v2/kernels/core_ops/core_ops.cpp"),
        ("transformer_inference", "ops/csrc/transformer/inference/csrc/pt_binding.cpp"),
    ],
)
def test_every_function_of_deepspeeds_own_module_is_there(module: str, source: str) -> None:
    """Those that its sources export, which it brings along; a suffix that is pasted on is tried with each dtype."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    text = (Path(spec.origin).parent / source).read_text(encoding="utf-8")
    names = set(re.findall(r'm\.def\(\s*"(\w+)",', text))
    stems = re.findall(r'm\.def\(\s*"(\w+_)" #', text)
    names |= {stem + suffix for stem in stems for suffix in ("fp32", "fp16", "bf16")}
    ours = importlib.import_module(f"ds_plugin_sdk.integrations.deepspeed.modules.{module}")
    assert len(names) > 10
    assert not sorted(name for name in names if not hasattr(ours, name))


def test_norms(dtype: torch.dtype) -> None:
    x, y, gamma, beta = (torch.randn(*shape).to(dtype) for shape in ((4, 32), (4, 32), (32,), (32,)))
    dx, dy, dg, db = (tensor.double() for tensor in (x, y, gamma, beta))
    one, two = torch.empty_like(x), torch.empty_like(x)
    core.layer_norm(one, x, gamma, beta, 1e-5)
    close(one, layer_norm(dx, dg, db))
    core.post_layer_norm(one, x, y, gamma, beta, 1e-5)
    close(one, layer_norm(dx + dy, dg, db))
    core.pre_layer_norm(one, two, x, y, gamma, beta, 1e-5)
    close(one, dx + dy)
    close(two, layer_norm(dx + dy, dg, db))
    core.rms_norm(one, x, gamma, 1e-5)
    close(one, rms_norm(dx, dg))
    core.rms_pre_norm(one, two, y, x, gamma, 1e-5)
    close(one, rms_norm(dx + dy, dg))
    close(two, dx + dy)
    inside = x.clone()
    core.layer_norm(inside, inside, gamma, beta, 1e-5)  # the result may lie where the argument lies
    close(inside, layer_norm(dx, dg, db))


@pytest.mark.parametrize(("number", "formula"), [(0, "gelu"), (1, "relu"), (2, "silu"), (6, "identity")])
def test_activations(number: int, formula: str, dtype: torch.dtype) -> None:
    x, bias = torch.randn(4, 16).to(dtype), torch.randn(16).to(dtype)
    expected = activated(formula, x.double() + bias.double())
    core.bias_activation(x, bias, number)
    close(x, expected)
    expected = activated(formula, x.double())
    core.bias_activation(x, None, number)
    close(x, expected)


@pytest.mark.parametrize(("number", "formula"), [(3, "gelu"), (4, "relu"), (5, "silu")])
def test_gates_lie_beside_their_factors(number: int, formula: str, dtype: torch.dtype) -> None:
    x, bias, out = torch.randn(2, 3, 16).to(dtype), torch.randn(16).to(dtype), torch.empty(2, 3, 8, dtype=dtype)
    core.gated_activation(out, x, bias, number)
    total = x.double() + bias.double()
    close(out, activated(formula, total[..., ::2]) * total[..., 1::2])
    core.gated_activation(out, x, None, number)
    close(out, activated(formula, x.double()[..., ::2]) * x.double()[..., 1::2])


def activated(formula: str, x: torch.Tensor) -> torch.Tensor:
    if formula == "gelu":
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return {"relu": x.clamp(min=0), "silu": x * torch.sigmoid(x), "identity": x}[formula]


def test_unknown_activations_are_rejected() -> None:
    with pytest.raises(OpError, match="activation 3"):
        core.bias_activation(torch.zeros(1, 8), None, 3)
    with pytest.raises(OpError, match="activation 0"):
        core.gated_activation(torch.zeros(1, 4), torch.zeros(1, 8), None, 0)


@pytest.mark.deepspeed
def test_deepspeeds_own_layers(python) -> None:  # type: ignore[no-untyped-def]  # a fixture of conftest.py
    """Built by DeepSpeed's classes, in a process that adopts the CPU plugin."""
    program = """
import torch
from deepspeed.inference.v2.inference_utils import ActivationType, DtypeEnum
from deepspeed.inference.v2.kernels import core_ops
x, w = torch.randn(4, 64).bfloat16(), torch.randn(32, 64).bfloat16() / 8
out = core_ops.BlasLibLinear(torch.bfloat16)(torch.empty(4, 32).bfloat16(), x, w)
assert (out.float() - x.float() @ w.float().T).abs().max() < 0.05
pre_norm = core_ops.CUDARMSPreNorm(64, torch.bfloat16)
residual, hidden = pre_norm(torch.empty_like(x), torch.empty_like(x), x, x, torch.ones(64).bfloat16())
assert torch.equal(residual, x + x)
core_ops.CUDABiasActivation(64, DtypeEnum.bf16, ActivationType.RELU)(x)
assert (x >= 0).all()
gated = torch.empty(4, 32).bfloat16()
core_ops.CUDAGatedActivation(64, torch.bfloat16, ActivationType.SiGLU)(gated, x)
assert gated.isfinite().all()
print("all of them")
"""
    done = python(program, DS_ACCELERATOR="cpu", DS_PLUGIN_FALLBACK="1")
    assert "all of them" in done.stdout


@pytest.mark.deepspeed
def test_what_keeps_the_engine_itself_on_cuda(python) -> None:  # type: ignore[no-untyped-def]  # a fixture of conftest.py
    """Its attention, as docs/ops/inference.md has it; its linear layers are made on the CPU."""
    program = """
import torch
from deepspeed.inference.v2.kernels.ragged_ops.blocked_flash import get_kv_block_size
from deepspeed.inference.v2.modules.configs import DSLinearConfig
from deepspeed.inference.v2.modules.implementations.linear.blas_fp_linear import BlasFPLinear
half = {"input_dtype": torch.bfloat16, "output_dtype": torch.bfloat16}
layer = BlasFPLinear(DSLinearConfig(max_tokens=8, in_channels=64, out_channels=32, activation=6, **half), {})
print("a layer on", layer.output.device)
try:
    get_kv_block_size(64)
except (AssertionError, RuntimeError) as error:  # of torch: no CUDA
    print("the blocks stopped:", error)
"""
    done = python(program, DS_ACCELERATOR="cpu")
    assert "a layer on cpu" in done.stdout
    assert "the blocks stopped" in done.stdout
