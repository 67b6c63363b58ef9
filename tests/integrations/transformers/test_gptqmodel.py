"""The layers of gptqmodel itself, by which transformers and optimum load GPTQ's and AWQ's checkpoints.

`pip install --no-deps gptqmodel`, and what its import asks for: its releases want later ones of torch than the SDK.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch
from int4_layers import AwqLinear, Drawn, GptqLinear, put_into
from test_int4_layers import generate, logits, make, shuffled
from torch import Tensor, nn

from counted_calls import CountedCalls
from ds_plugin_sdk.integrations.transformers import accelerate

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]

GPTQ = {"torch": "TorchLinear", "torch_aten_kernel": "TorchAtenLinear"}
AWQ = {"torch_awq": "AwqTorchLinear", "torch_aten_kernel_awq": "TorchAtenAwqLinear"}
# These lay out their tensors anew when they are called.
REPACKING = ("torch_aten_kernel", "torch_aten_kernel_awq")


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its dependencies warn of each other
        pytest.importorskip("gptqmodel", reason="gptqmodel is no dependency of the tests: it may want a later torch")
        for module in (*GPTQ, *AWQ):
            _module_of(module)
    # Each layer's dequantization would be compiled, which takes minutes and computes the same.
    monkeypatch.setattr(_module_of("torch"), "torch_compile", lambda function, **_: function)


def _module_of(name: str) -> Any:
    return importlib.import_module(f"gptqmodel.nn_modules.qlinear.{name}")


def _layer(module: str, drawn: Drawn, bias: Tensor | None, desc_act: bool = False) -> nn.Module:
    """As gptqmodel loads one: buffers in float16, format 2 of GPTQ's zero points."""
    columns, rows = drawn.levels.shape
    order = shuffled(columns, drawn.group, 0) if desc_act else None
    ours = (
        GptqLinear(drawn, bias, torch.float16, format=2, order=order)
        if module in GPTQ
        else AwqLinear(drawn, bias, torch.float16)
    )
    layer: nn.Module = getattr(_module_of(module), {**GPTQ, **AWQ}[module])(
        bits=4,
        group_size=drawn.group,
        sym=False,
        desc_act=desc_act,
        in_features=columns,
        out_features=rows,
        bias=bias is not None,
        register_buffers=True,
        pack_dtype=torch.int32,
    )
    layer.load_state_dict(ours.state_dict())
    layer.post_init()  # type: ignore[operator]  # to mypy a module has tensors and modules, no methods
    return layer.eval()


def _make(module: str, dtype: torch.dtype, group: int = 64, desc_act: bool = False) -> Any:
    model = make("qwen2", "awq", dtype)
    put_into(model, lambda drawn, bias: _layer(module, drawn, bias, desc_act), group)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(
    ("module", "desc_act"), [*((each, False) for each in (*GPTQ, *AWQ)), *((each, True) for each in GPTQ)]
)
def test_models_of_gptqmodel_run_whole(module: str, desc_act: bool, group: int, dtype: torch.dtype) -> None:
    """No further from the layers' definition in float32 than gptqmodel's own code, which runs unchanged after that."""
    model = _make(module, dtype, group, desc_act)
    exact = make("qwen2", "gptq, format 2" if module in GPTQ else "awq", group=group)
    exact.load_state_dict(model.state_dict())
    reference = logits(exact)
    with accelerate(model) as handle, CountedCalls() as counted:
        assert len(handle.layers) == 2, str(handle)
        ours = logits(model).float()
        assert generate(model).shape == (2, 15)
    assert counted.calls["decoder_layer"] == (0 if desc_act else 2 * 13)
    assert counted.calls["linear"] >= 2 * 13 * 4
    own = logits(model).float()
    error = (ours - reference).abs().mean()
    assert error <= 1.2 * (own - reference).abs().mean() + 1e-3
    assert error < 0.05 * reference.abs().mean()


@pytest.mark.parametrize("module", REPACKING)
def test_layers_that_were_called_before_are_left_alone(module: str) -> None:
    model = _make(module, torch.bfloat16)
    expected = logits(model)
    with accelerate(model) as handle:
        assert handle.layers == []
        assert "accelerate the model before that" in handle.left["model.layers.0.self_attn.q_proj"]
        torch.testing.assert_close(logits(model).float(), expected.float(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("module", [*GPTQ, *AWQ])
def test_weights_in_float16_are_left_alone_in_float32(module: str) -> None:
    """Their products of scales and levels are rounded to float16, which float32 would not be."""
    model = _make(module, torch.float32)
    with accelerate(model) as handle:
        assert handle.layers == []
        assert "does not compute" in handle.left["model.layers.0.self_attn.q_proj"]
        ours = logits(model)
    torch.testing.assert_close(ours, logits(model), rtol=1e-4, atol=1e-4)
