"""Layers and ops of training, forward and backward, and losses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own convention
from torch import Tensor

from gpu_check import cases, deepspeed_cuda_ops
from gpu_check.cases import Call, Case


def layer_cases(own: Path | None) -> Iterator[Case]:
    """BERT-large's layer, forward and backward with dropout, beside torch's and DeepSpeed's own."""
    from ds_plugin_sdk.nn import TransformerLayer

    batch, tokens, hidden, heads, p, half = 64, 128, 1024, 16, 0.1, torch.float16
    ours = TransformerLayer(
        hidden, heads, attn_dropout=p, hidden_dropout=p, pre_layer_norm=False, device=cases.DEVICE, dtype=half
    )
    theirs = torch.nn.TransformerEncoderLayer(
        hidden, heads, 4 * hidden, p, F.gelu, batch_first=True, device=cases.DEVICE, dtype=half
    )
    x, grad = (cases.random(batch, tokens, hidden, dtype=half) for _ in range(2))
    x.requires_grad_()
    calls = {
        "ds_plugin": [_forward_and_backward(ours, x, grad)],
        "torch eager": [_forward_and_backward(theirs, x, grad)],
        "torch compiled": [_forward_and_backward(torch.compile(theirs), x, grad)],
    }
    module = deepspeed_cuda_ops.load("transformer", own) if own else None
    if module:
        layer = _deepspeed_layer(module, batch, hidden, heads, p)
        mask = torch.zeros(batch, 1, 1, tokens, device=cases.DEVICE, dtype=half)
        calls["DeepSpeed's own"] = [_forward_and_backward(layer, x, grad, mask)]
    yield Case(f"layer, both passes [{batch}, {tokens}, {hidden}]", 0, calls, in_graph=False)


def _forward_and_backward(layer: torch.nn.Module, x: Tensor, grad: Tensor, *more: Tensor) -> Call:
    leaves = [x, *layer.parameters()]

    def run() -> object:
        with torch.enable_grad():
            return torch.autograd.grad(layer(x, *more), leaves, grad)

    return run


def _deepspeed_layer(module: ModuleType, batch: int, hidden: int, heads: int, p: float) -> torch.nn.Module:
    """DeepSpeed's front end on DeepSpeed's own kernels."""
    import deepspeed.ops.transformer.transformer as front_end

    front_end.transformer_cuda_module = module
    config = front_end.DeepSpeedTransformerConfig(
        batch_size=batch,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        heads=heads,
        attn_dropout_ratio=p,
        hidden_dropout_ratio=p,
        num_hidden_layers=1,
        initializer_range=0.02,
        seed=1,
        fp16=True,
        pre_layer_norm=False,
    )
    layer: torch.nn.Module = front_end.DeepSpeedTransformerLayer(config).to(cases.DEVICE).half()
    return layer


def training_cases() -> Iterator[Case]:
    """What a transformer layer does between its matrix products, forward and backward."""
    hidden = 4096
    weight, bias = (cases.random(hidden, dtype=torch.bfloat16) for _ in range(2))
    yield from _layer_norm_cases((8192, hidden), weight, bias)
    yield from _rms_norm_cases((8192, hidden), weight)
    yield from _activation_cases((8192, hidden), bias)
    yield from _attention_softmax_cases()


def _layer_norm_cases(shape: tuple[int, int], weight: Tensor, bias: Tensor) -> Iterator[Case]:
    from ds_plugin_sdk.ops import transformer

    (rows, hidden), size, seed = shape, math.prod(shape) * 2, transformer.new_seed(device=cases.DEVICE)

    def sum_norm(x: Tensor, residual: Tensor) -> Tensor:
        return F.layer_norm(residual + F.dropout(x + bias, 0.1), (hidden,), weight, bias)

    yield cases.case_of(
        f"dropout_add_layer_norm {list(shape)}",
        [shape, shape],
        4 * size,
        {
            "ds_plugin": lambda x, r: transformer.dropout_add_layer_norm(
                x, weight, bias, r, bias=bias, p=0.1, seed=seed
            ),
            "torch eager": sum_norm,
            "torch compiled": torch.compile(sum_norm),
        },
    )
    mean, rstd = (torch.rand(rows, device=cases.DEVICE) for _ in range(2))
    backward = torch.ops.ds_plugin.dropout_add_layer_norm_backward
    torch_backward = torch.ops.aten.native_layer_norm_backward
    statistics_of_torch = (mean.unsqueeze(1), rstd.unsqueeze(1))
    yield cases.case_of(
        f"layer norm backward {list(shape)}",
        [shape, shape],
        3 * size,
        {
            "ds_plugin": lambda g, x: backward(g, None, x, mean, rstd, weight, None, None, 0.0, False),
            "torch eager": lambda g, x: torch_backward(g, x, (hidden,), *statistics_of_torch, weight, bias, [True] * 3),
        },
    )


def _rms_norm_cases(shape: tuple[int, int], weight: Tensor) -> Iterator[Case]:
    from ds_plugin_sdk.ops import transformer

    (rows, hidden), size = shape, math.prod(shape) * 2
    rstd = torch.rand(rows, device=cases.DEVICE)

    def sum_rms_norm(x: Tensor, r: Tensor) -> Tensor:
        return F.rms_norm(x + r, (hidden,), weight, 1e-6)

    yield cases.case_of(
        f"add_rms_norm {list(shape)}",
        [shape, shape],
        4 * size,
        {
            "ds_plugin": lambda x, r: transformer.add_rms_norm(x, weight, r),
            "torch eager": sum_rms_norm,
            "torch compiled": torch.compile(sum_rms_norm),
            **cases.liger(
                "fused_add_rms_norm",
                "LigerFusedAddRMSNormFunction",
                lambda f: lambda x, r: f.apply(x, r, weight, 1e-6),
            ),
        },
    )
    yield cases.case_of(
        f"add_rms_norm backward {list(shape)}",
        [shape, shape],
        3 * size,
        {"ds_plugin": lambda g, x: torch.ops.ds_plugin.add_rms_norm_backward(g, None, x, rstd, weight)},
    )


def _activation_cases(shape: tuple[int, int], bias: Tensor) -> Iterator[Case]:
    from ds_plugin_sdk.ops import transformer
    from ds_plugin_sdk.ops.activation import ACTIVATIONS

    size = math.prod(shape) * 2

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def swiglu_backward(g: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.aten.silu_backward(g * gate, gate), g * F.silu(gate)

    silu = ACTIVATIONS.index("silu")
    yield cases.case_of(
        f"activation_and_mul {list(shape)}",
        [shape, shape],
        3 * size,
        {
            "ds_plugin": transformer.activation_and_mul,
            "torch eager": swiglu,
            "torch compiled": torch.compile(swiglu),
            **cases.liger("swiglu", "LigerSiLUMulFunction", lambda f: f.apply),
        },
    )
    yield cases.case_of(
        f"activation_and_mul backward {list(shape)}",
        [shape, shape],
        4 * size,
        {
            # Gate is up as well: memory is read once for both, on either side.
            "ds_plugin": lambda g, x: torch.ops.ds_plugin.activation_and_mul_backward(g, x, x, silu),
            "torch eager": swiglu_backward,
            "torch compiled": torch.compile(swiglu_backward),
        },
    )
    yield cases.case_of(
        f"gelu backward {list(shape)}",
        [shape, shape],
        3 * size,
        {
            "ds_plugin": lambda g, x: torch.ops.ds_plugin.fused_bias_gelu_backward(g, x, bias, True),
            "torch eager": lambda g, x: torch.ops.aten.gelu_backward(g, x + bias, approximate="tanh").sum(0),
        },
    )


def _attention_softmax_cases() -> Iterator[Case]:
    from ds_plugin_sdk.ops import transformer

    seed = transformer.new_seed(device=cases.DEVICE)
    for length in (128, 1024):
        scores = (8 * (1024 // length) ** 2, 16, length, length)
        size = math.prod(scores) * 2

        def softmax(x: Tensor) -> Tensor:
            return F.dropout(torch.softmax(x * 0.125, -1), 0.1)

        yield cases.case_of(
            f"masked_softmax_dropout {list(scores)}",
            [scores],
            3 * size,
            {
                "ds_plugin": lambda x: transformer.masked_softmax_dropout(x, scale=0.125, p=0.1, seed=seed),
                "torch eager": softmax,
                "torch compiled": torch.compile(softmax),
            },
        )


def loss_cases() -> Iterator[Case]:
    """Losses of LLaMA 3's logits, and their gradients in place of the logits."""
    from ds_plugin_sdk.ops import cross_entropy

    rows, columns = 4096, 128256
    target = torch.randint(columns, (rows,), device=cases.DEVICE)

    def torchs(logits: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            return torch.autograd.grad(F.cross_entropy(leaf, target, reduction="sum"), leaf)[0]

    def ligers(logits: Tensor, function: Any) -> object:
        with torch.enable_grad():
            return function.apply(logits.detach().requires_grad_(), target, None, -100, 0.0, 0.0, "sum")

    def compiled(logits: Tensor) -> Tensor:
        loss = torch.logsumexp(logits.float(), -1, keepdim=True)
        ones = torch.arange(columns, device=cases.DEVICE) == target[:, None]
        return (torch.exp(logits.float() - loss) - ones.float()).to(logits.dtype)

    calls: dict[str, Callable[..., Any]] = {
        "ds_plugin": lambda x: cross_entropy.cross_entropy_(x, target),
        "torch eager": torchs,
        "torch compiled": torch.compile(compiled),
        **cases.liger("cross_entropy", "LigerCrossEntropyFunction", lambda f: lambda x: ligers(x, f)),
    }
    case = cases.case_of(f"cross_entropy_ [{rows}, {columns}]", [(rows, columns)], 2 * 2 * rows * columns, calls)
    yield dataclasses.replace(case, not_in_graph=("Liger",))
