"""LAMB in unmodified DeepSpeed: the function it calls, its front end against float64, and training by config."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch
from deepspeed_support import Python

from ds_plugin_sdk.integrations.deepspeed.modules import fused_lamb

# p_copy ... weight_decay, in DeepSpeed's order
NUMBERS = (0.01, 0.9, 0.999, 10.0, 0.01, 1e-6, 4.0, 3, 1, 1, 0.1)


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    p, g, m = (torch.randn(5, 3, generator=generator) for _ in range(3))
    return [p, g, m, torch.rand(5, 3, generator=generator)]


def test_it_has_deepspeeds_signature() -> None:
    inspect.signature(fused_lamb.lamb).bind(*range(16))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("eps_mode", [0, 1])
@pytest.mark.parametrize("scale", [4.0, torch.tensor(4.0)], ids=["number", "tensor"])
def test_it_agrees_with_the_formula(transposed: bool, eps_mode: int, scale: float | torch.Tensor) -> None:
    p, g, m, v = (t.t() for t in tensors()) if transposed else tensors()
    p0, g0, m0, v0 = (t.double() for t in (p, g, m, v))
    copy = torch.nn.Parameter(torch.zeros_like(p, dtype=torch.float16))
    lr, b1, b2, most, least, eps, _, step, _, correction, decay = NUMBERS
    ratio = fused_lamb.lamb(p, copy, m, v, g, lr, b1, b2, most, least, eps, scale, step, eps_mode, correction, decay)

    m1, v1 = b1 * m0 + (1 - b1) * g0 / 4, b2 * v0 + (1 - b2) * (g0 / 4) ** 2
    u = m1 / ((v1 + eps).sqrt() if eps_mode == 0 else v1.sqrt() + eps) + decay * p0
    expected = (p0.norm() / u.norm()).clamp(least, most)
    p1 = p0 - lr * (1 - b2**step) ** 0.5 / (1 - b1**step) * expected * u
    assert ratio.shape == (1,) and ratio.item() == pytest.approx(expected.item(), rel=1e-6)
    for got, want in ((p, p1), (m, m1), (v, v1)):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)
    assert torch.equal(copy, p.half()) and copy.requires_grad
    assert torch.equal(g.double(), g0)


class Counted(torch.Tensor):
    """A tensor that counts how often the host asks for its value."""

    asked = 0

    def __float__(self) -> float:
        Counted.asked += 1
        return super().__float__()


def test_a_scale_on_the_device_is_read_once_for_all_parameters() -> None:
    """To read it is to wait for the device."""
    scale, before = torch.tensor(4.0).as_subclass(Counted), Counted.asked
    for value in (4.0, 8.0):
        scale.fill_(value)
        found, expected = tensors(), tensors()
        for (p, g, m, v), by in ((found, scale), (expected, value)):
            fused_lamb.lamb(p, torch.tensor([]), m, v, g, *NUMBERS[:6], by, *NUMBERS[7:])
            fused_lamb.lamb(p, torch.tensor([]), m, v, g, *NUMBERS[:6], by, *NUMBERS[7:])
        assert torch.equal(found[0], expected[0])
    assert Counted.asked - before == 2


def test_without_a_copy() -> None:
    p, g, m, v = tensors()
    fused_lamb.lamb(p, torch.tensor([]), m, v, g, *NUMBERS)
    twin = tensors()
    fused_lamb.lamb(twin[0], torch.zeros(5, 3), twin[2], twin[3], twin[1], *NUMBERS)
    assert torch.equal(p, twin[0])


FRONT_END = """
import math, torch, deepspeed
from deepspeed.ops.lamb import FusedLamb

LR, B1, B2, EPS, WD, STEPS = 0.1, 0.9, 0.999, 1e-6, 0.1, 5

def lamb(p, grads, inside=False, scale=1.0):
    m = v = torch.zeros_like(p)
    for t, g in enumerate(grads, 1):
        g = g / scale
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
        u = m / ((v + EPS).sqrt() if inside else v.sqrt() + EPS) + WD * p
        r = (p.norm() / u.norm()).clamp(0.01, 10.0)
        p = p - LR * math.sqrt(1 - B2**t) / (1 - B1**t) * r * u
    return p, r

# Parameters stay about 1, where half a unit in bfloat16's last place is 2**-9; each step rounds once.
for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, STEPS * 2**-9 * 1.5)):
    for shape in ((1003,), (7, 19)):
        for inside in (False, True):
            for largest in (0.0, 0.5):
                torch.manual_seed(0)
                start = (torch.rand(shape) * 2 - 1).to(dtype)
                start = start.t() if start.dim() == 2 else start
                param = torch.nn.Parameter(start.clone(memory_format=torch.preserve_format))
                grads = [torch.randn_like(param).detach() for _ in range(STEPS)]
                optimizer = FusedLamb([param], LR, eps=EPS, weight_decay=WD, eps_inside_sqrt=inside,
                                      max_grad_norm=largest)
                norm, scale = 16.0, 8.0
                clip = (norm / scale + 1e-6) / largest if largest else 1.0
                expected, ratio = lamb(start.double(), [g.double() for g in grads], inside, clip * scale)
                for grad in grads:
                    param.grad = grad.clone()
                    optimizer.step(scale=scale, grad_norms=[torch.tensor(norm)])
                    assert torch.equal(param.grad, grad)
                error = (param.detach().double() - expected).abs().max().item()
                moved = (start.double() - expected).abs().max().item()
                (coefficient,) = optimizer.get_lamb_coeffs()
                print(f'FusedLamb | {dtype} | {shape} | {error:.2e} | {moved:.2e}')
                assert error < tolerance < moved / 3, (dtype, shape, error, moved)
                assert math.isclose(coefficient, ratio, rel_tol=1e-5 if dtype is torch.float32 else 0.02)

# Masters in float32, gradients and a copy of the parameters in half precision, as mixed precision has them.
for low in (torch.float16, torch.bfloat16):
    master = torch.nn.Parameter(torch.randn(501))
    model = torch.nn.Parameter(master.detach().to(low))
    optimizer = FusedLamb([master], LR, eps=EPS)
    optimizer.step(grads=[torch.randn(501).to(low)], output_params=[model])
    assert torch.equal(model, master.to(low)) and model.is_leaf and model.requires_grad

from ds_plugin_sdk import provenance
print('origins', sorted({(record.name, record.origin) for record in provenance.records()}))
"""


@pytest.mark.deepspeed
@pytest.mark.parametrize("origin", [pytest.param("compiled", marks=pytest.mark.compiler), "reference"])
def test_deepspeeds_front_end_agrees_with_float64(origin: str, python: Python, kernel_cache: Path) -> None:
    """Worst error of 5 steps against the formula in float64: 2e-6 in float32, rounding to the type in bfloat16."""
    switch = {"compiled": "1", "reference": "0"}[origin]
    # Not compiling leaves the reference only where the cache has nothing: the test's own.
    cache = {"DS_PLUGIN_CACHE_DIR": str(kernel_cache)} if origin == "compiled" else {}
    done = python(FRONT_END, DS_PLUGIN_COMPILE=switch, **cache)
    *_, origins = done.stdout.splitlines()
    found = dict(re.findall(r"\('(\w+)', '(\w+)'\)", origins))
    assert found["fused_lamb"] in ({"compiled", "cache"} if origin == "compiled" else {"reference"})


TRAIN = """
import sys, torch, deepspeed

def losses(zero, precision):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    config = {
        'train_micro_batch_size_per_gpu': 64,
        'optimizer': {'type': 'Lamb', 'params': {'lr': 0.1, 'weight_decay': 0.01, 'max_coeff': 10, 'min_coeff': 0.01}},
        'zero_optimization': {'stage': zero, 'reduce_bucket_size': 10000, 'allgather_bucket_size': 10000},
        'zero_allow_untested_optimizer': True,
        'gradient_clipping': 1.0,
        'steps_per_print': 1000,
        **precision,
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    x = torch.randn(64, 16)
    y = x.square().sum(dim=1, keepdim=True) / 16
    for _ in range(40):
        loss = torch.nn.functional.mse_loss(engine(x.to(next(model.parameters()).dtype)).float(), y)
        engine.backward(loss)
        engine.step()
        yield loss.item()
    basic = engine.basic_optimizer
    assert type(basic).__module__ == 'deepspeed.ops.lamb.fused_lamb', type(basic)
    coefficients = basic.get_lamb_coeffs()
    assert coefficients and all(0.01 <= c <= 10 for c in coefficients), coefficients

for zero in (0, 1):
    for name, precision in (('fp32', {}), ('bf16', {'bf16': {'enabled': True}})):
        first, *_, last = losses(zero, precision)
        print(f'loss {zero} {name} {first:.4f} {last:.4f}', flush=True)
from ds_plugin_sdk import provenance
print('origins', sorted({(record.name, record.origin) for record in provenance.records()}))
torch.distributed.destroy_process_group()
"""


@pytest.mark.deepspeed
@pytest.mark.compiler
@pytest.mark.slow
def test_training_by_config(python: Python, kernel_cache: Path) -> None:
    """``"type": "Lamb"`` under ZeRO-0 and ZeRO-1, with the float32 and the bfloat16 wrapper."""
    done = python(
        TRAIN,
        DS_PLUGIN_CACHE_DIR=str(kernel_cache),
        RANK="0",
        LOCAL_RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    found = re.findall(r"loss (\d) (\w+) ([\d.]+) ([\d.]+)", done.stdout)
    assert [each[:2] for each in found] == [("0", "fp32"), ("0", "bf16"), ("1", "fp32"), ("1", "bf16")], done.stdout
    assert all(float(last) < 0.5 * float(first) for *_, first, last in found), found
    assert re.search(r"\('fused_lamb', '(compiled|cache)'\)", done.stdout), done.stdout


@pytest.mark.parametrize("source", ["float step_size = lr * std::sqrt(c2) / c1;", "T m_hat = m[j] / c1;", None])
def test_moments_are_corrected_where_the_installed_release_does_it(
    source: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases after 0.19.8 correct the moments, and nothing but the source of their kernel tells."""
    (tmp_path / "deepspeed/ops/csrc/lamb").mkdir(parents=True)
    if source:
        (tmp_path / "deepspeed/ops/csrc/lamb/fused_lamb_cuda_kernel.cu").write_text(source)
    spec = importlib.machinery.ModuleSpec("deepspeed", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "deepspeed")]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(fused_lamb, "_corrects_inside", fused_lamb._corrects_inside.__wrapped__)
    lr, b1, b2, eps, step, decay = 0.1, 0.9, 0.99, 1e-6, 3, 0.1
    p, g, m, v = (torch.rand(50) + 0.5 for _ in range(4))
    p0, g0, m0, v0 = (tensor.double() for tensor in (p, g, m, v))
    ratio = fused_lamb.lamb(p, torch.tensor([]), m, v, g, lr, b1, b2, 10.0, 0.01, eps, 1.0, step, 1, 1, decay)
    m1, v1, c1, c2 = b1 * m0 + (1 - b1) * g0, b2 * v0 + (1 - b2) * g0**2, 1 - b1**step, 1 - b2**step
    folded = bool(source) and "step_size" in source
    update = (m1 / (v1.sqrt() + eps) if folded else m1 / c1 / ((v1 / c2).sqrt() + eps)) + decay * p0
    expected = p0.norm() / update.norm()
    torch.testing.assert_close(ratio.double(), expected.reshape(1), rtol=1e-5, atol=0)
    size = lr * c2**0.5 / c1 if folded else lr
    torch.testing.assert_close(p.double(), p0 - size * expected * update, rtol=1e-5, atol=1e-6)
