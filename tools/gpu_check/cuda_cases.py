"""What `cuda_ops.py` measures: each case with the calls of every implementation, ours first."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own convention
from torch import Tensor

from gpu_check import deepspeed_cuda_ops

Call = Callable[[], object]
DEVICE = "cuda"
ROTATION_IN_L2 = 4  # the rotated arguments are so many times the L2 cache


@dataclasses.dataclass
class Case:
    """What is compared: for each implementation the calls to rotate among. The first implementation is ours."""

    name: str
    moved: int  # bytes of one call; 0 where it is not memory that the time goes to
    calls: dict[str, list[Call]]
    in_graph: bool = True
    not_in_graph: tuple[str, ...] = ()  # implementations that wait for the device, and cannot be captured


# ---- optimizers --------------------------------------------------------------------------------------------------
def gpt2_xl() -> list[tuple[int, ...]]:
    """GPT-2 XL: 1.56 G elements in 580 tensors."""
    h = 1600
    layer = [(h,), (h,), (h, 3 * h), (3 * h,), (h, h), (h,), (h,), (h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,)]
    return [(50257, h), (1024, h), *layer * 48, (h,), (h,)]


def llama_7b() -> list[tuple[int, ...]]:
    """LLaMA-7B: 6.74 G elements in 291 tensors."""
    h, m = 4096, 11008
    layer = [(h, h)] * 4 + [(m, h), (m, h), (h, m), (h,), (h,)]
    return [(32000, h), *layer * 32, (h,), (32000, h)]


MODELS = {
    "GPT-2 XL float32": (gpt2_xl, torch.float32),
    "LLaMA-7B bfloat16": (llama_7b, torch.bfloat16),
    "2,000 of 1 k float32": (lambda: [(1024,)] * 2000, torch.float32),
}


def optimizer_cases(own: Path | None) -> Iterator[Case]:
    """FusedAdam and FusedLamb beside torch's and DeepSpeed's own, on the same parameters and gradients."""
    from ds_plugin_sdk.optim import FusedAdam, FusedLamb

    for name, (shapes, dtype) in MODELS.items():
        params = [torch.nn.Parameter(torch.randn(shape, device=DEVICE, dtype=dtype) * 0.02) for shape in shapes()]
        for param in params:
            param.grad = torch.randn_like(param) * 0.01
        elements = sum(param.numel() for param in params)
        size = params[0].element_size()
        adam = {
            "FusedAdam": FusedAdam(params, lr=1e-4, weight_decay=0.01),
            "torch AdamW fused": torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, fused=True),
        }
        if elements < 2e9:
            adam["torch AdamW foreach"] = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.01, foreach=True)
        calls: dict[str, list[Call]] = {n: [o.step] for n, o in adam.items()}
        calls |= _deepspeed("fused_adam", own, _deepspeed_adam, params)
        yield Case(f"Adam {name}", 7 * size * elements, calls, in_graph=False)
        del calls, adam
        lamb: dict[str, list[Call]] = {"FusedLamb": [FusedLamb(params, lr=1e-4).step]}
        if elements < 2e9:
            lamb["torch foreach"] = [_foreach_lamb(params)]
        lamb |= _deepspeed("fused_lamb", own, _deepspeed_lamb, params)
        # p, g, m, v are read and m, v written; then p, m, v are read and p is written
        yield Case(f"LAMB {name}", 10 * size * elements, lamb, in_graph=False)
        del lamb, params


def _deepspeed(
    op: str, own: Path | None, call_of: Callable[..., Call], params: Sequence[Tensor]
) -> dict[str, list[Call]]:
    """DeepSpeed's own op as one more implementation, if it was built."""
    module = deepspeed_cuda_ops.load(op, own) if own else None
    return {"DeepSpeed's own": [call_of(module, params)]} if module else {}


def _deepspeed_adam(module: ModuleType, params: Sequence[Tensor]) -> Call:
    flag = torch.zeros(1, dtype=torch.int, device=DEVICE)
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
    lists = [[p.grad for p in params], [p.data for p in params], first, second]
    return lambda: module.multi_tensor_adam(2048 * 32, flag, lists, 1e-4, 0.9, 0.999, 1e-8, 3, 1, 1, 0.01)


def _deepspeed_lamb(module: ModuleType, params: Sequence[Tensor]) -> Call:
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
    none = torch.empty(0, device=DEVICE)

    def step() -> None:
        for p, m, v in zip(params, first, second, strict=True):
            module.lamb(p.data, none, m, v, p.grad, 1e-4, 0.9, 0.999, 10.0, 0.01, 1e-8, 1.0, 3, 1, 1, 0.0)

    return step


def _foreach_lamb(params: Sequence[Tensor]) -> Call:
    """DeepSpeed's LAMB in torch's foreach functions: how it would be written without a kernel."""
    first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
    grads = [p.grad for p in params]

    @torch.no_grad()
    def step() -> None:
        torch._foreach_lerp_(first, grads, 0.1)
        torch._foreach_mul_(second, 0.999)
        torch._foreach_addcmul_(second, grads, grads, 0.001)
        denominators = torch._foreach_sqrt(second)
        torch._foreach_add_(denominators, 1e-8)
        updates = torch._foreach_div(first, denominators)
        ratios = torch._foreach_div(torch._foreach_norm(list(params)), torch._foreach_norm(updates))
        torch._foreach_clamp_min_(ratios, 0.01)
        torch._foreach_clamp_max_(ratios, 10.0)
        torch._foreach_mul_(updates, ratios)
        torch._foreach_add_(list(params), updates, alpha=-1e-4)

    return step


# ---- a layer -----------------------------------------------------------------------------------------------------
def layer_cases(own: Path | None) -> Iterator[Case]:
    """BERT-large's layer, forward and backward with dropout, beside torch's and DeepSpeed's own."""
    from ds_plugin_sdk.nn import TransformerLayer

    batch, tokens, hidden, heads, p, half = 64, 128, 1024, 16, 0.1, torch.float16
    ours = TransformerLayer(
        hidden, heads, attn_dropout=p, hidden_dropout=p, pre_layer_norm=False, device=DEVICE, dtype=half
    )
    theirs = torch.nn.TransformerEncoderLayer(
        hidden, heads, 4 * hidden, p, F.gelu, batch_first=True, device=DEVICE, dtype=half
    )
    x, grad = (_random(batch, tokens, hidden, dtype=half) for _ in range(2))
    x.requires_grad_()
    calls = {
        "ds_plugin": [_forward_and_backward(ours, x, grad)],
        "torch eager": [_forward_and_backward(theirs, x, grad)],
        "torch compiled": [_forward_and_backward(torch.compile(theirs), x, grad)],
    }
    module = deepspeed_cuda_ops.load("transformer", own) if own else None
    if module:
        layer = _deepspeed_layer(module, batch, hidden, heads, p)
        mask = torch.zeros(batch, 1, 1, tokens, device=DEVICE, dtype=half)
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
    layer: torch.nn.Module = front_end.DeepSpeedTransformerLayer(config).to(DEVICE).half()
    return layer


# ---- ops on activations ------------------------------------------------------------------------------------------
def op_cases(*shapes: tuple[int, int]) -> Iterator[Case]:
    """Ops of inference and training, on tokens of a layer."""
    from ds_plugin_sdk.ops import activation, norm

    half = torch.bfloat16
    for tokens, hidden in shapes:
        shape, weight, bias = (tokens, hidden), _random(hidden, dtype=half), _random(hidden, dtype=half)
        size = tokens * hidden * 2
        yield _case(
            f"layer_norm {list(shape)}",
            [shape],
            2 * size,
            {
                "ds_plugin": lambda x, w=weight, b=bias: norm.layer_norm(x, w, b),
                "torch eager": lambda x, w=weight, b=bias: F.layer_norm(x, (x.shape[-1],), w, b),
                "torch compiled": torch.compile(lambda x, w=weight, b=bias: F.layer_norm(x, (x.shape[-1],), w, b)),
                **_liger(
                    "layer_norm", "LigerLayerNormFunction", lambda f, w=weight, b=bias: lambda x: f.apply(x, w, b, 1e-5)
                ),
            },
        )
        yield _case(
            f"rms_norm {list(shape)}",
            [shape],
            2 * size,
            {
                "ds_plugin": lambda x, w=weight: norm.rms_norm(x, w),
                "torch eager": lambda x, w=weight: F.rms_norm(x, (x.shape[-1],), w, 1e-6),
                "torch compiled": torch.compile(lambda x, w=weight: F.rms_norm(x, (x.shape[-1],), w, 1e-6)),
                **_liger("rms_norm", "LigerRMSNormFunction", lambda f, w=weight: lambda x: f.apply(x, w, 1e-6)),
            },
        )
        yield _case(
            f"bias_gelu {list(shape)}",
            [shape],
            2 * size,
            {
                "ds_plugin": lambda x, b=bias: activation.bias_activation(x, b, "gelu_tanh"),
                "torch eager": lambda x, b=bias: F.gelu(x + b, approximate="tanh"),
                "torch compiled": torch.compile(lambda x, b=bias: F.gelu(x + b, approximate="tanh")),
            },
        )


def head_cases() -> Iterator[Case]:
    """Ops on the heads of an attention: LLaMA's rotary embedding, and softmax of scores."""
    from ds_plugin_sdk.ops import rotary, softmax

    tokens, head_dim = 4096, 128
    cos, sin = (table.to(DEVICE) for table in rotary.angles(torch.arange(tokens), head_dim))
    heads_shape = (1, 32, tokens, head_dim)

    def turned(x: Tensor) -> Tensor:
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    yield _case(
        f"rotary {list(heads_shape)}",
        [heads_shape],
        2 * 2 * math.prod(heads_shape),
        {
            "ds_plugin": lambda x: rotary.rotary(x, cos, sin),
            "torch eager": turned,
            "torch compiled": torch.compile(turned),
        },
    )
    for batch, heads, length in ((8, 16, 2048), (32, 32, 128)):
        shape = (batch, heads, length, length)
        yield _case(
            f"softmax {list(shape)}",
            [shape],
            4 * batch * heads * length * length,
            {
                "ds_plugin": lambda x: softmax.softmax(x, scale=0.125),
                "torch eager": lambda x: torch.softmax(x * 0.125, -1),
                "torch compiled": torch.compile(lambda x: torch.softmax(x * 0.125, -1)),
            },
        )


def training_cases() -> Iterator[Case]:
    """What a transformer layer does between its matrix products, forward and backward."""
    hidden = 4096
    weight, bias = (_random(hidden, dtype=torch.bfloat16) for _ in range(2))
    yield from _layer_norm_cases((8192, hidden), weight, bias)
    yield from _rms_norm_cases((8192, hidden), weight)
    yield from _activation_cases((8192, hidden), bias)
    yield from _attention_softmax_cases()


def _layer_norm_cases(shape: tuple[int, int], weight: Tensor, bias: Tensor) -> Iterator[Case]:
    from ds_plugin_sdk.ops import transformer

    (rows, hidden), size, seed = shape, math.prod(shape) * 2, transformer.new_seed(device=DEVICE)

    def sum_norm(x: Tensor, residual: Tensor) -> Tensor:
        return F.layer_norm(residual + F.dropout(x + bias, 0.1), (hidden,), weight, bias)

    yield _case(
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
    mean, rstd = (torch.rand(rows, device=DEVICE) for _ in range(2))
    backward = torch.ops.ds_plugin.dropout_add_layer_norm_backward
    torch_backward = torch.ops.aten.native_layer_norm_backward
    statistics_of_torch = (mean.unsqueeze(1), rstd.unsqueeze(1))
    yield _case(
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
    rstd = torch.rand(rows, device=DEVICE)

    def sum_rms_norm(x: Tensor, r: Tensor) -> Tensor:
        return F.rms_norm(x + r, (hidden,), weight, 1e-6)

    yield _case(
        f"add_rms_norm {list(shape)}",
        [shape, shape],
        4 * size,
        {
            "ds_plugin": lambda x, r: transformer.add_rms_norm(x, weight, r),
            "torch eager": sum_rms_norm,
            "torch compiled": torch.compile(sum_rms_norm),
            **_liger(
                "fused_add_rms_norm",
                "LigerFusedAddRMSNormFunction",
                lambda f: lambda x, r: f.apply(x, r, weight, 1e-6),
            ),
        },
    )
    yield _case(
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
    yield _case(
        f"activation_and_mul {list(shape)}",
        [shape, shape],
        3 * size,
        {
            "ds_plugin": transformer.activation_and_mul,
            "torch eager": swiglu,
            "torch compiled": torch.compile(swiglu),
            **_liger("swiglu", "LigerSiLUMulFunction", lambda f: f.apply),
        },
    )
    yield _case(
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
    yield _case(
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

    seed = transformer.new_seed(device=DEVICE)
    for length in (128, 1024):
        scores = (8 * (1024 // length) ** 2, 16, length, length)
        size = math.prod(scores) * 2

        def softmax(x: Tensor) -> Tensor:
            return F.dropout(torch.softmax(x * 0.125, -1), 0.1)

        yield _case(
            f"masked_softmax_dropout {list(scores)}",
            [scores],
            3 * size,
            {
                "ds_plugin": lambda x: transformer.masked_softmax_dropout(x, scale=0.125, p=0.1, seed=seed),
                "torch eager": softmax,
                "torch compiled": torch.compile(softmax),
            },
        )


def token_cases(own: Path | None) -> Iterator[Case]:
    """Half of the tokens of a batch, there and back, beside DeepSpeed's own op."""
    from ds_plugin_sdk.ops import random_ltd

    batch, tokens, hidden = 8, 2048, 4096
    everything, part = (batch, tokens, hidden), (batch, tokens // 2, hidden)
    rows = torch.arange(batch, device=DEVICE)[:, None]
    indices = torch.rand(batch, tokens, device=DEVICE).argsort(-1)[:, : tokens // 2].sort(-1).values
    small, moved = indices.int(), 2 * 2 * math.prod(part)

    def put(x: Tensor, chosen: Tensor) -> None:
        x[rows, indices] = chosen

    gathers: dict[str, Callable[..., Any]] = {
        "ds_plugin": lambda x: random_ltd.token_gather(x, small),
        "torch eager": lambda x: x[rows, indices],
        "torch compiled": torch.compile(lambda x: x[rows, indices]),
    }
    scatters: dict[str, Callable[..., Any]] = {
        "ds_plugin": lambda x, chosen: random_ltd.token_scatter_(x, chosen, small),
        "torch eager": put,
    }
    module = own and deepspeed_cuda_ops.load("random_ltd", own)
    if module:
        gathers["DeepSpeed's own"] = lambda x: module.token_gather(x, small, True)
        scatters["DeepSpeed's own"] = lambda x, chosen: module.token_scatter_(x, chosen, small, True)
    yield _case(f"token_gather {list(everything)}, half", [everything], moved, gathers)
    yield _case(f"token_scatter_ {list(everything)}, half", [everything, part], moved, scatters)


def quantizer_cases(own: Path | None) -> Iterator[Case]:
    """Groups of 2,048 float16 values to 8 bits, beside DeepSpeed's own op."""
    from ds_plugin_sdk.ops import quantizer

    shape, groups = (8192, 4096), 16384
    size = 8192 * 4096 * 2

    def formula(x: Tensor) -> tuple[Tensor, Tensor]:
        values = x.view(groups, -1).float()
        scale = 128 / values.abs().amax(1, keepdim=True)
        return (values * scale).round().clamp(-128, 127).to(torch.int8), 1 / scale

    calls: dict[str, Callable[..., Any]] = {
        "ds_plugin": lambda x: quantizer.quantize(x, groups=groups),
        "torch eager": formula,
        "torch compiled": torch.compile(formula),
    }
    module = own and deepspeed_cuda_ops.load("quantizer", own)
    if module:
        calls["DeepSpeed"] = lambda x: module.quantize(x, groups, 8, module.Symmetric)
    yield _case(f"quantize {list(shape)}", [shape], size + size // 2, calls, dtype=torch.float16)


def prompt_cases() -> Iterator[Case]:
    """Attention of prompts of several lengths, padded on the left."""
    from ds_plugin_sdk.ops import attention

    batch, heads, tokens, head_dim = 4, 32, 2048, 128
    shape = (batch, heads, tokens, head_dim)
    q, k, v, keys, values = (_random(*shape, dtype=torch.bfloat16) for _ in range(5))
    first = torch.arange(batch, device=DEVICE).unsqueeze(1) * 100
    mask = torch.arange(tokens, device=DEVICE) >= first
    allowed = mask[:, None, None] & torch.ones(tokens, tokens, dtype=torch.bool, device=DEVICE).tril()
    yield Case(
        f"padded prompt {list(shape)}",
        0,
        {
            "ds_plugin": [lambda: attention.cached_attention(q, k, v, keys, values, 0, mask=mask)],
            "torch SDPA, nothing appended": [lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)],
        },
    )


def decode_cases() -> Iterator[Case]:
    """One token after 4,095 others: attention, to an int8 cache too, and a linear layer with int8 and int4 weights.
    LLaMA's shapes.
    """
    from ds_plugin_sdk.ops import attention, linear

    past, head_dim = 4095, 128
    for batch, heads, kv_heads in ((1, 32, 32), (8, 32, 8), (16, 64, 8)):
        cache = (batch, kv_heads, past + 1, head_dim)
        new = (batch, kv_heads, 1, head_dim)
        yield _case(
            f"decode attention {list(cache)}, {heads} heads",
            [(batch, heads, 1, head_dim), new, cache, cache],
            2 * 2 * math.prod(cache),
            {
                "ds_plugin": lambda q, k, key, value: attention.cached_attention(q, k, k, key, value, past),
                "torch SDPA, nothing appended": lambda q, k, key, value: F.scaled_dot_product_attention(
                    q, key, value, enable_gqa=True
                ),
            },
        )
        yield _int8_cache_case(cache, (batch, heads, 1, head_dim), new, past)
    rows, columns = 11008, 4096
    quantized: tuple[tuple[int, Literal[4, 8]], ...] = (
        (1, 8),
        (4, 8),
        (8, 8),
        (16, 8),
        (64, 8),
        (1, 4),
        (4, 4),
        (16, 4),
    )
    for inputs, bits in quantized:
        floats = [_random(rows, columns, dtype=torch.bfloat16) for _ in range(8)]
        weights = [linear.quantize_weight(matrix, bits=bits) for matrix in floats]
        x = _random(inputs, columns, dtype=torch.bfloat16)
        yield Case(
            f"linear int{bits} [{inputs}, {columns}] x [{rows}]",
            rows * columns * bits // 8,
            {
                f"ds_plugin int{bits}": [lambda x=x, w=w: linear.linear(x, w[0], scales=w[1]) for w in weights],
                "ds_plugin bfloat16": [lambda x=x, w=w: linear.linear(x, w) for w in floats],  # above 4 inputs torch's
                "torch bfloat16": [lambda x=x, w=w: F.linear(x, w) for w in floats],
            },
        )


def _int8_cache_case(cache: tuple[int, ...], query: tuple[int, ...], new: tuple[int, ...], past: int) -> Case:
    from ds_plugin_sdk.ops import attention

    moved = 2 * math.prod(cache) + 2 * 4 * math.prod(cache[:3])
    ours: list[Call] = []
    theirs: list[Call] = []
    for _ in range(_sets(moved)):
        q, k, key, value = (_random(*shape, dtype=torch.bfloat16) for shape in (query, new, cache, cache))
        (keys, key_scales), (values, value_scales) = attention.quantize_rows(key), attention.quantize_rows(value)
        written = keys, values, key_scales, value_scales
        ours.append(functools.partial(attention.cached_attention_int8, q, k, k, *written, past))
        theirs.append(functools.partial(F.scaled_dot_product_attention, q, key, value, enable_gqa=True))
    name = f"decode attention to int8 {list(cache)}, {query[1]} heads"
    return Case(name, moved, {"ds_plugin": ours, "torch SDPA of bfloat16, nothing appended": theirs})


def _liger(module: str, name: str, function: Callable[[Any], Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """A function of Liger's as one more implementation, if it is installed."""
    try:
        return {"Liger": function(getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name))}
    except ImportError:
        return {}


def loss_cases() -> Iterator[Case]:
    """Losses of LLaMA 3's logits, and their gradients in place of the logits."""
    from ds_plugin_sdk.ops import cross_entropy

    rows, columns = 4096, 128256
    target = torch.randint(columns, (rows,), device=DEVICE)

    def torchs(logits: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            return torch.autograd.grad(F.cross_entropy(leaf, target, reduction="sum"), leaf)[0]

    def ligers(logits: Tensor, function: Any) -> object:
        with torch.enable_grad():
            return function.apply(logits.detach().requires_grad_(), target, None, -100, 0.0, 0.0, "sum")

    def compiled(logits: Tensor) -> Tensor:
        loss = torch.logsumexp(logits.float(), -1, keepdim=True)
        ones = torch.arange(columns, device=DEVICE) == target[:, None]
        return (torch.exp(logits.float() - loss) - ones.float()).to(logits.dtype)

    calls: dict[str, Callable[..., Any]] = {
        "ds_plugin": lambda x: cross_entropy.cross_entropy_(x, target),
        "torch eager": torchs,
        "torch compiled": torch.compile(compiled),
        **_liger("cross_entropy", "LigerCrossEntropyFunction", lambda f: lambda x: ligers(x, f)),
    }
    case = _case(f"cross_entropy_ [{rows}, {columns}]", [(rows, columns)], 2 * 2 * rows * columns, calls)
    yield dataclasses.replace(case, not_in_graph=("Liger",))


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def _case(
    name: str,
    shapes: Sequence[tuple[int, ...]],
    moved: int,
    functions: dict[str, Callable[..., Any]],
    dtype: torch.dtype = torch.bfloat16,
) -> Case:
    """A case of functions of tensors, rotating among as many sets of arguments as keep the L2 cache cold."""
    arguments = [[_random(*shape, dtype=dtype) for shape in shapes] for _ in range(_sets(moved))]

    def call(function: Callable[..., Any], tensors: Sequence[Tensor]) -> Call:
        return lambda: function(*tensors)

    return Case(name, moved, {n: [call(f, tensors) for tensors in arguments] for n, f in functions.items()})


def _sets(moved: int) -> int:
    """How many sets of arguments of so many bytes keep the L2 cache cold."""
    l2: int = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    return max(2, min(256, -(-ROTATION_IN_L2 * l2 // moved)))


def groups_of_cases(own: Path | None) -> dict[str, Callable[[], Iterator[Case]]]:
    """All cases in groups, which fail alone; what matters most first."""
    return {
        "optimizers": lambda: optimizer_cases(own),
        "ops": lambda: op_cases((8192, 4096)),
        "layer": lambda: layer_cases(own),
        "decode": decode_cases,
        "losses": loss_cases,
        "prompt": prompt_cases,
        "heads": head_cases,
        "training": training_cases,
        "quantizer": lambda: quantizer_cases(own),
        "tokens": lambda: token_cases(own),
        "ops on other shapes": lambda: op_cases((32, 4096), (4096, 8192), (262144, 128)),
    }
