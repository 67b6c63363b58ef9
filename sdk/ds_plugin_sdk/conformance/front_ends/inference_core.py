"""DeepSpeed's ``core_ops``, the kernels of its second inference engine that take no ragged batch: each of its classes.

They take 16-bit types alone, or all; here they are run in float16. Each fills a tensor that it is given.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.conformance.front_ends.front_end import FrontEnd, Result

_EPS = 1e-5
_TOLERANCE = 5e-3  # two roundings to float16 of values up to 4


def _class(name: str) -> Any:
    return getattr(importlib.import_module("deepspeed.inference.v2.kernels.core_ops"), name)


def _activation(name: str) -> Any:
    return importlib.import_module("deepspeed.inference.v2.inference_utils").ActivationType[name]


def _numbers(device: torch.device, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().to(device)


def _d(tensor: Tensor) -> Tensor:
    return tensor.cpu().double()


def _linear(device: torch.device) -> Iterator[Result]:
    x, weight = _numbers(device, 5, 64), _numbers(device, 32, 64, seed=1) / 8
    found = _class("BlasLibLinear")(torch.float16)(x.new_empty(5, 32), x, weight)
    yield Result("x W^T", found, _d(x) @ _d(weight).T, _TOLERANCE)


def _products(device: torch.device) -> Iterator[Result]:
    """No class of DeepSpeed calls it; the right factor comes first."""
    left, right = _numbers(device, 2, 3, 5, 16) / 4, _numbers(device, 2, 3, 16, 7, seed=1)
    output = left.new_empty(2, 3, 5, 7)
    module = importlib.import_module("deepspeed.ops.op_builder").InferenceCoreBuilder().load()
    module.blas_4d_matmul(output, right, left)
    yield Result("left right", output, _d(left) @ _d(right), 2 * _TOLERANCE)


def _fp6(device: torch.device) -> Iterator[Result]:
    """As DeepSpeed's module does it, but for qtorch, which rounds to FP6 there."""
    outputs, inputs, tokens = 256, 64, 5
    codes = torch.randint(0, 64, (outputs, inputs), generator=torch.Generator().manual_seed(2))
    exponent, mantissa = codes >> 2 & 7, codes & 3
    size = torch.where(exponent == 0, mantissa / 16, (1 + mantissa / 4) * 2.0 ** (exponent - 3.0))
    weight = torch.where(codes < 32, size, -size).half()
    x, scales = _numbers(device, tokens, inputs), (_numbers(device, outputs, 1, seed=1).abs() + 0.5) / 64
    kernel = _class("CUDAWf6Af16Linear")()
    upper, lower = (each.to(device) for each in kernel.inf_module.preprocess_weight(weight))
    output = x.new_empty(tokens, outputs)
    kernel(output, x, upper, lower, scales, outputs, tokens, inputs)
    yield Result("x (scale W)^T", output, _d(x) @ (_d(weight) * _d(scales)).T, 2 * _TOLERANCE)


def _layer_norms(device: torch.device) -> Iterator[Result]:
    x, y, gamma, beta = (
        _numbers(device, *shape, seed=seed) for seed, shape in enumerate(((5, 64), (5, 64), (64,), (64,)))
    )
    affine = (_d(gamma), _d(beta), _EPS)
    both = _d(x) + _d(y)
    found = _class("CUDAFPLN")(64, torch.float16)(torch.empty_like(x), x, gamma, beta)
    yield Result("LN", found, functional.layer_norm(_d(x), (64,), *affine), _TOLERANCE)
    found = _class("CUDAFPPostLN")(64, torch.float16)(torch.empty_like(x), x, y, gamma, beta)
    yield Result("post-LN", found, functional.layer_norm(both, (64,), *affine), _TOLERANCE)
    total, normed = _class("CUDAFPPreLN")(64, torch.float16)(
        torch.empty_like(x), torch.empty_like(x), x, y, gamma, beta
    )
    yield Result("the sum of pre-LN", total, both, _TOLERANCE)
    yield Result("pre-LN", normed, functional.layer_norm(both, (64,), *affine), _TOLERANCE)


def _rms_norms(device: torch.device) -> Iterator[Result]:
    x, y, gamma = (_numbers(device, *shape, seed=seed) for seed, shape in enumerate(((5, 64), (5, 64), (64,))))
    both = _d(x) + _d(y)
    found = _class("CUDARMSNorm")(64, torch.float16)(torch.empty_like(x), x, gamma)
    yield Result("RMS", found, functional.rms_norm(_d(x), (64,), _d(gamma), _EPS), _TOLERANCE)
    total, normed = _class("CUDARMSPreNorm")(64, torch.float16)(torch.empty_like(x), torch.empty_like(x), x, y, gamma)
    yield Result("the sum", total, both, _TOLERANCE)
    yield Result("RMS of the sum", normed, functional.rms_norm(both, (64,), _d(gamma), _EPS), _TOLERANCE)


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _activations(device: torch.device) -> Iterator[Result]:
    formulas: dict[str, Callable[[Tensor], Tensor]] = {
        "GELU": _gelu,
        "RELU": functional.relu,
        "SILU": functional.silu,
        "IDENTITY": lambda x: x,
    }
    bias = _numbers(device, 64, seed=1)
    for name, formula in formulas.items():
        x = _numbers(device, 5, 64)
        wanted = formula(_d(x) + _d(bias))
        _class("CUDABiasActivation")(64, torch.float16, _activation(name))(x, bias)
        yield Result(name, x, wanted, _TOLERANCE)


def _gates(device: torch.device) -> Iterator[Result]:
    formulas: dict[str, Callable[[Tensor], Tensor]] = {
        "GEGLU": _gelu,
        "ReGLU": functional.relu,
        "SiGLU": functional.silu,
    }
    x, bias = _numbers(device, 5, 128), _numbers(device, 128, seed=1)
    gate, factor = (_d(x) + _d(bias)).view(5, 64, 2).unbind(-1)
    for name, formula in formulas.items():
        output = x.new_empty(5, 64)
        _class("CUDAGatedActivation")(64, torch.float16, _activation(name))(output, x, bias)
        yield Result(name, output, formula(gate) * factor, 4 * _TOLERANCE)


_CLASSES: dict[str, Callable[[torch.device], Iterator[Result]]] = {
    "BlasLibLinear": _linear,
    "CUDAWf6Af16Linear": _fp6,
    "CUDAFPLN.CUDAFPPreLN.CUDAFPPostLN": _layer_norms,
    "CUDARMSNorm.CUDARMSPreNorm": _rms_norms,
    "CUDABiasActivation": _activations,
    "CUDAGatedActivation": _gates,
    "blas_4d_matmul": _products,
}

INFERENCE_CORE = tuple(FrontEnd(name, "InferenceCoreBuilder", run) for name, run in _CLASSES.items())
