"""The plugin as its users meet it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ds_plugin_sdk import op_builder

from {{ cookiecutter.package }} import plugin
from {{ cookiecutter.package }}.accelerator import {{ cookiecutter.prefix }}_Accelerator
from {{ cookiecutter.package }}.op_builder.kernels import HelloBuilder

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "train.py"


def test_the_probe_says_what_there_is() -> None:
    assert plugin.probe().state in ("available", "absent")


def test_tensors_go_to_the_device_and_back(accelerator: {{ cookiecutter.prefix }}_Accelerator) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    y = x.to(accelerator.current_device_name())
    assert accelerator.on_accelerator(y)
    assert torch.equal((2 * y).cpu(), 2 * x)


def test_every_device_has_its_own_random_numbers(accelerator: {{ cookiecutter.prefix }}_Accelerator) -> None:
    accelerator.manual_seed(1)
    state = accelerator.get_rng_state()
    first = torch.rand(4, device=accelerator.device())
    accelerator.set_rng_state(state)
    assert torch.equal(first, torch.rand(4, device=accelerator.device()))


def test_memory_is_counted(accelerator: {{ cookiecutter.prefix }}_Accelerator) -> None:
    before = accelerator.memory_allocated()
    x = torch.ones(1024, 1024, device=accelerator.device())
    assert accelerator.memory_allocated() - before >= x.nbytes
    del x
    assert accelerator.memory_allocated() == before


def test_a_pybind11_op_is_its_own_module() -> None:
    assert HelloBuilder().load().hello() == "hello from {{ cookiecutter.name }}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adam_agrees_with_float64(accelerator: {{ cookiecutter.prefix }}_Accelerator, dtype: torch.dtype) -> None:
    """Against the formula in float64, on a size that no vector width divides; tolerance: 2 units in the last place."""
    op_builder.load_family("adam", accelerator.device_name())
    torch.manual_seed(0)
    host = [torch.randn(1003).to(dtype) for _ in range(2)] + [torch.zeros(1003) for _ in range(2)]
    device = [tensor.to(accelerator.device()) for tensor in host]
    p, g, m, v = (tensor.double() for tensor in host)
    for step in range(1, 4):
        torch.ops.ds_plugin.adam_(*[[tensor] for tensor in device], [step], 0.01, 0.9, 0.999, 1e-8, 0.1, True, True)
        p -= 0.01 * 0.1 * p
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g * g
        p -= 0.01 / (1 - 0.9**step) * m / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        p = p.to(dtype).double()
    torch.testing.assert_close(device[0].cpu().double(), p, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
{%- if cookiecutter.runtime == "simulated" %}


def test_the_native_kernel_is_used(accelerator: {{ cookiecutter.prefix }}_Accelerator) -> None:
    builder = accelerator.get_op_builder("FusedAdamBuilder")
    assert builder.__module__ == "{{ cookiecutter.package }}.op_builder.kernels"
    op_builder.load_family("adam", accelerator.device_name())
    assert torch._C._dispatch_has_kernel_for_dispatch_key("ds_plugin::adam_", "PrivateUse1")
{%- endif %}


def test_unmodified_deepspeed_trains(accelerator: {{ cookiecutter.prefix }}_Accelerator, tmp_path: Path) -> None:
    """Without DS_ACCELERATOR it would train on whatever there is."""
    losses = tmp_path / "losses.json"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--steps", "40", "--losses", str(losses)],
        env={**os.environ, "DS_ACCELERATOR": plugin.name},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=600,
    )
    assert f"training on {accelerator.device_name()}:0, 1 rank(s), {type(accelerator).__name__}" in done.stdout
    values = json.loads(losses.read_text(encoding="utf-8"))
    assert values[-1] < 0.5 * values[0]
