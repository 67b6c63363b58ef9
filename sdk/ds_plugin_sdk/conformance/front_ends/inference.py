"""DeepSpeed's inference ops: every class of its ``op_binding``, on our module's function, not on its own fallback.

And every function of the module that none of those classes calls.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.conformance.front_ends.front_end import FrontEnd, Result

_PACKAGE = "deepspeed.ops.transformer.inference"
_EPS = 1e-5
_TOLERANCE = 1e-4  # sums of some hundred float32 products of size 1
_INT8_TOLERANCE = 1e-2  # sums of size 1, of inputs and weights in float16

GELU, RELU, GATED_GELU, GATED_SILU = 1, 2, 3, 4  # deepspeed.utils.types.ActivationFuncType


def _numbers(device: torch.device, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(device)


def _op(module: str, name: str, **config: Any) -> Any:
    """An op of DeepSpeed, which has found its function in our module."""
    types = importlib.import_module("deepspeed.utils.types")
    norm = types.NormType.RMSNorm if config.pop("rms", False) else types.NormType.LayerNorm
    options = {
        "hidden_size": 32,
        "heads": 4,
        "dtype": torch.float32,
        "layer_norm_eps": _EPS,
        "norm_type": norm,
        **config,
    }
    settings = importlib.import_module(f"{_PACKAGE}.config").DeepSpeedInferenceConfig(**options)
    op = getattr(importlib.import_module(f"{_PACKAGE}.op_binding.{module}"), name)(settings)
    fallbacks = [key for key, value in vars(op).items() if "fallback" in getattr(value, "__name__", "")]
    assert not fallbacks, f"{name} falls back: its module lacks the function for {', '.join(fallbacks)}"
    return op


def _module() -> Any:
    """The module itself, for what DeepSpeed exports and none of its classes calls."""
    return importlib.import_module("deepspeed.ops.op_builder").InferenceBuilder().load()


def _norm(x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], gamma, beta, _EPS)


def _rms(x: Tensor, gamma: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + _EPS) * gamma


def _d(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().double()


# ---- pointwise -------------------------------------------------------------------------------------------------------
def _bias(module: str, name: str, formula: Callable[[Tensor], Tensor], device: torch.device) -> Iterator[Result]:
    x, bias = _numbers(device, 2, 5, 48), _numbers(device, 48, seed=1)
    wanted = formula(_d(x) + _d(bias))
    yield Result("the result", _op(module, name)(x, bias), wanted, _TOLERANCE)


def _gated(device: torch.device) -> Iterator[Result]:
    x, bias = _numbers(device, 2, 5, 48), _numbers(device, 48, seed=1)
    first, gate = (_d(x) + _d(bias)).chunk(2, dim=-1)
    op = _op("gated_activation", "GatedActivationOp")
    yield Result("GEGLU", op(x, bias, GATED_GELU), first * functional.gelu(gate), _TOLERANCE)
    yield Result("SwiGLU", op(x, bias, GATED_SILU), first * functional.silu(gate), _TOLERANCE)


def _bias_residual(device: torch.device) -> Iterator[Result]:
    """DeepSpeed's own kernel launches nothing: what goes in comes out."""
    out, residual, bias = _numbers(device, 2, 5, 16), _numbers(device, 2, 5, 16, seed=1), _numbers(device, 16, seed=2)
    wanted = _d(out)
    yield Result("the result", _op("bias_residual", "BiasResidualOp")(out, residual, bias), wanted, 0.0)


def _residual_add(device: torch.device) -> Iterator[Result]:
    """Written into the residual; the front end ignores what is returned."""
    for after, pre, size in ((True, True, 2), (True, False, 1), (False, True, 2)):
        op = _op("residual_add", "ResidualAddOp", mlp_after_attn=after, pre_layer_norm=pre, mp_size=size)
        hidden, residual, attn = (_numbers(device, 2, 5, 16, seed=s) for s in range(3))
        attn_bias, final_bias = (_numbers(device, 16, seed=s) for s in (3, 4))
        h, r, a, ab, fb = map(_d, (hidden, residual, attn, attn_bias, final_bias))
        after_attention = (r + a + ab + fb) / size + h if pre else r + h + fb
        wanted = after_attention if after else h + a + (r + fb + ab) / size
        op(hidden, residual, True, attention_output=attn, attention_bias=attn_bias, final_bias=final_bias)
        yield Result(f"the residual (mlp_after_attn={after}, pre_layer_norm={pre})", residual, wanted, _TOLERANCE)


def _vector_add(device: torch.device) -> Iterator[Result]:
    a, b = _numbers(device, 2, 5, 16), _numbers(device, 2, 5, 16, seed=1)
    wanted = 0.5 * _d(a) + _d(b)
    returned = _op("vector_add", "VectorAddOp")(a, b, 0.5)
    yield Result("the result", returned, wanted, _TOLERANCE)


def _moe(device: torch.device) -> Iterator[Result]:
    """Written into the output; the caller ignores what is returned."""
    residual, output = (_numbers(device, 2, 5, 16, seed=s) for s in range(2))
    coefficients = _numbers(device, 32, seed=2)
    wanted = _d(residual) * _d(coefficients)[:16] + _d(output) * _d(coefficients)[16:]
    _op("moe_res_matmul", "MoEResMatmulOp")(residual, coefficients, output)
    yield Result("the output", output, wanted, _TOLERANCE)


def _einsum(device: torch.device) -> Iterator[Result]:
    q, w = _numbers(device, 6, 3, 5), _numbers(device, 6, 7, seed=1)
    wanted = torch.einsum("sec,sm->ecm", _d(q), _d(w))
    yield Result("the result", _op("einsum_sec_sm_ecm", "EinsumSecSmEcmOp")(q, w), wanted, _TOLERANCE)


def _pad(device: torch.device) -> Iterator[Result]:
    heads, width = 2, 24
    q, k, v = (_numbers(device, 1, 5, heads * width, seed=s).half() for s in range(3))
    found = _op("pad_transform", "PadTransformOp", dtype=torch.float16)(q, k, v, heads, True)
    split = [_d(each).view(1, 5, heads, width).transpose(1, 2) for each in (q, k, v)]
    yield from _padded(found, split)


def _add_padding(device: torch.device) -> Iterator[Result]:
    """The same of heads that are split already."""
    split = [_numbers(device, 1, 2, 5, 24, seed=s) for s in range(3)]
    yield from _padded(_module().add_padding_fp32(*split), [_d(each) for each in split])


def _padded(found: list[Tensor], split: list[Tensor]) -> Iterator[Result]:
    """Heads of 24 become heads of 32; 5 keys and values become 128."""
    for name, given, got in zip("qkv", split, found, strict=True):
        wanted = torch.zeros(*given.shape[:2], 5 if name == "q" else 128, 32, dtype=torch.float64)
        wanted[:, :, :5, :24] = given
        yield Result(f"{name}, padded", got, wanted, 0.0)


# ---- norms -----------------------------------------------------------------------------------------------------------
def _layer_norm(device: torch.device) -> Iterator[Result]:
    x, gamma, beta = _numbers(device, 2, 5, 48), _numbers(device, 48, seed=1), _numbers(device, 48, seed=2)
    wanted = _norm(_d(x), _d(gamma), _d(beta))
    yield Result("the result", _op("layer_norm", "LayerNormOp")(x, gamma, beta, _EPS), wanted, _TOLERANCE)


def _rms_norm(device: torch.device) -> Iterator[Result]:
    x, residual, gamma = _numbers(device, 2, 5, 48), _numbers(device, 2, 5, 48, seed=1), _numbers(device, 48, seed=2)
    both = _d(x) + _d(residual)
    yield Result("rms_norm", _op("rms_norm", "RMSNormOp")(x, gamma, _EPS), _rms(_d(x), _d(gamma)), _TOLERANCE)
    norm, total = _op("pre_rms_norm", "PreRMSNormOp")(x, residual, gamma, _EPS)
    yield Result("pre_rms_norm", norm, _rms(both, _d(gamma)), _TOLERANCE)
    yield Result("the sum of pre_rms_norm", total, both, _TOLERANCE)


def _residual_norms(device: torch.device) -> Iterator[Result]:
    x, residual = _numbers(device, 2, 5, 48), _numbers(device, 2, 5, 48, seed=1)
    bias, gamma, beta = (_numbers(device, 48, seed=s) for s in (2, 3, 4))
    total = _d(x) + _d(residual) + _d(bias)
    wanted = _norm(total, _d(gamma), _d(beta))
    arguments = (x, bias, residual, gamma, beta, _EPS)
    yield Result("the norm", _module()._layer_norm_residual(*arguments), wanted, _TOLERANCE)
    norm, stored = _module().layer_norm_residual_store_pre_ln_res(*arguments)
    yield Result("the norm with its sum", norm, wanted, _TOLERANCE)
    yield Result("the sum", stored, total, _TOLERANCE)


# ---- products --------------------------------------------------------------------------------------------------------
def _linear(device: torch.device) -> Iterator[Result]:
    x, w, bias = _numbers(device, 2, 5, 32), _numbers(device, 24, 32, seed=1), _numbers(device, 24, seed=2)
    for transposed in (True, False):
        op = _op("linear", "LinearOp", transposed_mode=transposed)
        weight = w if transposed else w.t().contiguous()
        wanted = _d(x) @ _d(w).T + _d(bias)
        yield Result("x W + b", op(x, weight, bias, True, False, 4), wanted, _TOLERANCE)
        for_flash = wanted.view(2, 5, 3, 4, 2).permute(2, 0, 3, 1, 4)  # q, k and v of four heads, padded from 2 to 32
        for_flash = functional.pad(for_flash, (0, 30))
        yield Result("x W + b for flash attention", op(x, weight, bias, True, True, 4), for_flash, _TOLERANCE)


def _vector_matmul(device: torch.device) -> Iterator[Result]:
    x, w = _numbers(device, 2, 5, 32), _numbers(device, 32, 24, seed=1)
    wanted = _d(x) @ _d(w)
    yield Result("x W", _op("vector_matmul", "VectorMatMulOp")(x, w), wanted, _TOLERANCE)
    for transposed in (True, False):
        op = _op("vector_matmul", "VectorMatMulOp", dtype=torch.int8, transposed_mode=transposed)
        weight, matrix = _int8(device, *((24, 32) if transposed else (32, 24)))
        wanted = _d(x.half()) @ (matrix.T if transposed else matrix)
        yield Result(f"x W, int8, transposed={transposed}", op(x.half(), weight), wanted, _INT8_TOLERANCE)


def _int8(device: torch.device, rows: int, columns: int, seed: int = 0) -> tuple[Any, Tensor]:
    """Weights with scales as DeepSpeed attaches them, two to a row, and the float64 matrix that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    scales = (torch.rand(2 * rows, 1, generator=generator) + 0.5) / (64 * columns**0.5)
    matrix = (weight.double().view(2 * rows, -1) * scales.double()).view(rows, columns)
    moved = weight.to(device)
    moved.scale = scales.to(device)  # type: ignore[attr-defined]  # where DeepSpeed looks for them
    return moved, matrix


def _dequantize(device: torch.device) -> Iterator[Result]:
    weight, matrix = _int8(device, 24, 32)
    found = _module().dequantize_fp16(weight, weight.scale, 48)
    yield Result("the weights", found, matrix, 2**-11)


def _qkv(device: torch.device) -> Iterator[Result]:
    x, w, bias = _numbers(device, 2, 5, 32), _numbers(device, 32, 96, seed=1), _numbers(device, 96, seed=2)
    gamma, beta = _numbers(device, 32, seed=3), _numbers(device, 32, seed=4)
    for rms in (False, True):
        normed = _rms(_d(x), _d(gamma)) if rms else _norm(_d(x), _d(gamma), _d(beta))
        out, norm = _op("qkv_gemm", "QKVGemmOp", rms=rms)(x, w, bias, gamma, beta)
        yield Result("the norm", norm, normed, _TOLERANCE)
        yield Result("q, k and v", out, normed @ _d(w) + _d(bias), _TOLERANCE)


def _gelu_gemm(device: torch.device) -> Iterator[Result]:
    x, w, bias = _numbers(device, 2, 5, 32), _numbers(device, 32, 48, seed=1), _numbers(device, 48, seed=2)
    out = _numbers(device, 48, 32, seed=3)
    wanted = functional.gelu(_d(x) @ _d(w) + _d(bias), approximate="tanh") @ _d(out)
    yield Result("the result", _op("gelu_gemm", "GELUGemmOp")(x, w, bias, out), wanted, 10 * _TOLERANCE)
    (w, first), (out, second) = _int8(device, 32, 48), _int8(device, 48, 32, seed=1)
    x, bias = x.half(), bias.half()
    wanted = functional.gelu(_d(x) @ first + _d(bias), approximate="tanh") @ second
    found = _op("gelu_gemm", "GELUGemmOp", dtype=torch.int8)(x, w, bias, out)
    yield Result("the result, int8", found, wanted, 2 * _INT8_TOLERANCE)


def _mlp(device: torch.device) -> Iterator[Result]:
    x, residual = _numbers(device, 2, 5, 32), _numbers(device, 2, 5, 32, seed=1)
    input_bias, gamma, beta = (_numbers(device, 32, seed=s) for s in (2, 3, 4))
    w1, b1, w2 = _numbers(device, 32, 64, seed=5), _numbers(device, 64, seed=6), _numbers(device, 64, 32, seed=7)
    for after in (True, False):
        for act, function in (
            (GELU, functools.partial(functional.gelu, approximate="tanh")),
            (RELU, functional.relu),
        ):
            op = _op("mlp_gemm", "MLPGemmOp", mlp_after_attn=after, mlp_act_func_type=_activation(act))
            total = _d(x) + _d(residual) + _d(input_bias) if after else _d(residual)
            normed = _norm(total, _d(gamma), _d(beta))
            wanted = function(normed @ _d(w1) + _d(b1)) @ _d(w2)
            out, norm = op(x.clone(), residual.clone(), w1, w2, input_bias=input_bias, bias=b1, gamma=gamma, beta=beta)
            yield Result("the norm", norm, normed, _TOLERANCE)
            yield Result("the result", out, wanted, 10 * _TOLERANCE)


def _rms_mlp(device: torch.device) -> Iterator[Result]:
    x, residual, gamma = _numbers(device, 2, 5, 32), _numbers(device, 2, 5, 32, seed=1), _numbers(device, 32, seed=2)
    w1, w2 = _numbers(device, 32, 128, seed=3), _numbers(device, 64, 32, seed=4)
    for act, function in ((GATED_GELU, functional.gelu), (GATED_SILU, functional.silu)):
        total = _d(x) + _d(residual)
        first, gate = (_rms(total, _d(gamma)) @ _d(w1)).chunk(2, dim=-1)
        op = _op("mlp_gemm", "MLPGemmOp", rms=True, mlp_act_func_type=_activation(act))
        out, added = op(x.clone(), residual.clone(), w1, w2, gamma=gamma)
        yield Result("the residual", added, total, _TOLERANCE)
        yield Result("the result", out, first * function(gate) @ _d(w2), 10 * _TOLERANCE)


def _activation(value: int) -> Any:
    return importlib.import_module("deepspeed.utils.types").ActivationFuncType(value)


# ---- attention -------------------------------------------------------------------------------------------------------
def _softmax(device: torch.device) -> Iterator[Result]:
    scores, mask = _numbers(device, 2, 4, 6, 6), torch.zeros(2, 1, 1, 6)
    mask[1, ..., 4:] = -10000.0
    ahead = torch.ones(6, 6).triu(1).bool()
    none = torch.empty(1)
    for triangular in (False, True):
        wanted = _d(scores) * 0.5 + mask.double()
        if triangular:
            wanted = wanted.masked_fill(ahead, -math.inf)
        op = _op("softmax", "SoftmaxOp")
        found = op(scores.clone(), mask.to(device), none, triangular, False, False, 1, False, 0.5, 0)
        yield Result("the weights", found, torch.softmax(wanted, dim=-1), _TOLERANCE)


def _context(device: torch.device) -> Iterator[Result]:
    """A prompt of five tokens, then three more one by one: the cache is all that remembers."""
    for dtype, tolerance in ((torch.float32, _TOLERANCE), (torch.float16, 5e-3)):
        yield from _sequence(device, dtype, tolerance)


def _sequence(device: torch.device, dtype: torch.dtype, tolerance: float) -> Iterator[Result]:
    heads, width, batch, prompt, steps = 4, 8, 2, 5, 3
    workspace = _op("workspace", "WorkspaceOp", dtype=dtype, max_out_tokens=32)
    allocate: Any = workspace.allocate_workspace
    workspace.release_workspace()
    allocate(heads * width, heads, prompt, batch, 1, 1, False, 0, 32, 1)
    op = _op("softmax_context", "SoftmaxContextOp", dtype=dtype, rotary_dim=-1, triangular_masking=True)
    qkv = _numbers(device, batch, prompt + steps, 3 * heads * width).to(dtype)
    q, k, v = _d(qkv).view(batch, prompt + steps, 3, heads, width).permute(2, 0, 3, 1, 4)
    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    wanted = wanted.transpose(1, 2).reshape(batch, prompt + steps, -1)

    def attend(begin: int, length: int, keys: int) -> Tensor:
        piece = qkv[:, begin : begin + length].contiguous()
        mask = torch.zeros(batch, 1, 1, keys, device=device)
        scale = 1 / math.sqrt(math.sqrt(width))  # squared by the op
        token = torch.tensor([begin])
        context: Tensor = op(piece, mask, heads, heads, scale, False, 0, 1, None, begin == 0, token, None)[0]
        return context

    begin = 0
    for length in (prompt, *[1] * steps):
        end = begin + length
        yield Result(f"tokens {begin} to {end - 1}", attend(begin, length, end), wanted[:, begin:end], tolerance)
        begin = end
    repeated: Any = workspace.repeat_kv_cache(batch, 2)
    for name, found, once in zip(("keys", "values"), repeated, (k, v), strict=True):
        yield Result(f"{name} for two continuations of each", found, once.repeat_interleave(2, dim=0), 0.0)
    workspace.release_workspace()
    assert workspace.retake_workspace(), "a workspace that was released cannot be taken again"
    yield Result("all tokens, after a release", attend(0, begin, begin), wanted, tolerance)
    workspace.reset_cache()
    # With as many keys as would be there without the reset.
    yield Result("the first token, after a reset", attend(0, 1, begin + 1), wanted[:, :1], tolerance)
    workspace.release_workspace()


def _rotary(device: torch.device) -> Iterator[Result]:
    """The first 8 of 12 numbers of each head are turned, in halves and in neighbours."""
    heads, width, turned, tokens, offset = 4, 12, 8, 5, 3
    both = [_numbers(device, 2, tokens, heads * width, seed=s) for s in range(2)]
    angle = torch.arange(offset, offset + tokens).double().unsqueeze(1)
    angle = angle * 1e4 ** (-torch.arange(0, turned, 2).double() / turned)
    c, s = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    for half in (True, False):
        pair = (slice(0, 4), slice(4, 8)) if half else (slice(0, turned, 2), slice(1, turned, 2))
        found = _module().apply_rotary_pos_emb(*both, turned, offset, heads, half, 1e4)
        for name, given, got in zip(("query", "key"), both, found, strict=True):
            x = _d(given).view(2, tokens, heads, width)
            wanted = x.clone()
            wanted[..., pair[0]] = x[..., pair[0]] * c - x[..., pair[1]] * s
            wanted[..., pair[1]] = x[..., pair[1]] * c + x[..., pair[0]] * s
            yield Result(f"{name}, rotate_half={half}", got, wanted.flatten(2), _TOLERANCE)


_CLASSES: dict[str, Callable[[torch.device], Iterator[Result]]] = {
    "BiasAddOp": functools.partial(_bias, "bias_add", "BiasAddOp", lambda x: x),
    "BiasGeluOp": functools.partial(
        _bias, "bias_gelu", "BiasGeluOp", functools.partial(functional.gelu, approximate="tanh")
    ),
    "BiasReluOp": functools.partial(_bias, "bias_relu", "BiasReluOp", functional.relu),
    "BiasResidualOp": _bias_residual,
    "EinsumSecSmEcmOp": _einsum,
    "GatedActivationOp": _gated,
    "GELUGemmOp": _gelu_gemm,
    "LayerNormOp": _layer_norm,
    "LinearOp": _linear,
    "MLPGemmOp": _mlp,
    "MLPGemmOp.rms_norm": _rms_mlp,
    "MoEResMatmulOp": _moe,
    "PadTransformOp": _pad,
    "QKVGemmOp": _qkv,
    "ResidualAddOp": _residual_add,
    "RMSNormOp.PreRMSNormOp": _rms_norm,
    "SoftmaxOp": _softmax,
    "SoftmaxContextOp.WorkspaceOp": _context,
    "VectorAddOp": _vector_add,
    "VectorMatMulOp": _vector_matmul,
    # Functions that DeepSpeed's own module exports, too.
    "_layer_norm_residual.layer_norm_residual_store_pre_ln_res": _residual_norms,
    "add_padding": _add_padding,
    "apply_rotary_pos_emb": _rotary,
    "dequantize": _dequantize,
}

INFERENCE = tuple(FrontEnd(name, "InferenceBuilder", run) for name, run in _CLASSES.items())
