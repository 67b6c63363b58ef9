"""Calls at the edges of what ops take. `sdk fuzz` found them: kernel, reference and formula agree, or both reject.

``python edges.py TARGET`` prints what is wrong with any of them on a target, as `Target.find` takes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ds_plugin_sdk.conformance import fuzz, op_info
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.ops.activation import ACTIVATIONS
from ds_plugin_sdk.ops.linear import quantize_weight

INT32_MAX = 2**31 - 1


def _attention(**changes: Any) -> dict[str, Any]:
    names = ("query", "key", "value", "key_cache", "value_cache")
    tensors: dict[str, Any] = {name: torch.ones(1, 2, 3, 4) for name in names}
    options = {"past": 0, "scale": 1.0, "mask": None, "alibi": None, "window": 0, "causal": True}
    return {**tensors, **options, **changes}


def _linear(rows: int, columns: int) -> dict[str, Any]:
    weight, scales = quantize_weight(torch.ones(rows, columns), columns)
    arguments = {"input": torch.ones(2, columns), "weight": weight, "bias": None, "scales": scales}
    return {**arguments, "offsets": None, "residual": None, "activation": "identity", "gated": False}


def _packed(outputs: int, inputs: int) -> dict[str, Any]:
    nothing = torch.zeros(0, dtype=torch.uint8)
    return {
        "input": torch.ones(2, inputs),
        "weight_2bit": nothing,
        "weight_4bit": nothing,
        "scales": torch.ones(outputs),
    }


def _of_no_elements() -> Tensor:
    """What arithmetic gives for an empty tensor has strides of 0."""
    return torch.as_strided(torch.empty(0), (2, 1, 0, 1), (0, 0, 1, 0))


def _spoilt(value: float) -> Tensor:
    scores = torch.ones(1, 1, 4, 40)
    scores[0, 0, 2, 38] = value
    return scores


def _lamb(**limits: float) -> dict[str, Any]:
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs")
    options = {"steps": 1, "lr": 0.01, "betas": (0.9, 0.999), "weight_decay": 0.0, "copies": []}
    return {**{name: [torch.ones(7)] for name in names}, **options, **limits}


def _evoformer_of_nothing() -> dict[str, Any]:
    """Queries that attend to nothing, beside an infinite value."""
    names = ("grad", "query", "key", "value", "output")
    tensors = {name: torch.ones(1, 1, 3, 2, 16) for name in names}
    tensors["value"][0, 0, 1, 0, 2] = torch.inf
    sums = torch.zeros(1, 1, 2, 3)
    sums[0, 0, :, 1] = -torch.inf
    sums[0, 0, 0] = -torch.inf
    biases = {"mask_bias": torch.zeros(1, 1, 3), "pair_bias": torch.zeros(1, 2, 3, 3)}
    return {**tensors, "logsumexp": sums, **biases, "mask_grad": True, "pair_grad": True}


def _gate(activation: str) -> dict[str, Any]:
    """Gates far out, where a slope's factors are 0 and infinite."""
    gate = torch.tensor([[torch.inf, -torch.inf, 3e38, -3e38, 90.0, -90.0]])
    ones = torch.ones(1, 6)
    return {"grad_output": ones, "gate": gate, "up": ones, "activation": ACTIVATIONS.index(activation)}


_SOFTMAX = {"mask": None, "alibi": None, "scale": 1.0, "causal": True, "window": 3}
_SWIZZLE = {"x": torch.ones(64), "groups": 4, "bits": 4, "symmetric": True, "pipeline": 4}

AGREE: dict[str, tuple[str, dict[str, Any]]] = {
    "six bits, no outputs": ("fp6_linear", _packed(0, 8)),
    "six bits, no inputs": ("fp6_linear", _packed(4, 0)),
    "int8, no outputs": ("linear", _linear(0, 16)),
    "a scale of minus zero": (
        "dequantize_range",
        {
            "levels": torch.tensor([[3, 9]], dtype=torch.uint8),
            "scale": torch.tensor([[-0.0]]),
            "minimum": torch.zeros(1, 1),
            "group_size": 2,
            "bits": 8,
        },
    ),
    "tokens of a sequence without end": (
        "token_sort_",
        {"indices": torch.tensor([[INT32_MAX, 5, 0, 5, 1, INT32_MAX - 1]], dtype=torch.int32), "seq_len": 2**63 - 1},
    ),
    "a NaN within the window": ("softmax", {"scores": _spoilt(torch.nan), **_SOFTMAX}),
    "an infinity within the window": ("softmax_", {"scores": _spoilt(torch.inf), **_SOFTMAX}),
    "half of a row, an infinity, causal": (
        "softmax",
        {"scores": _spoilt(torch.inf).half(), "mask": None, "alibi": None, "scale": 0.125, "causal": True, "window": 0},
    ),
    "the largest ratio is NaN": ("lamb_", _lamb(max_coeff=torch.nan)),
    "the least ratio exceeds the largest": ("lamb_", _lamb(min_coeff=20.0)),
    "a gradient that is almost the largest number, far below zero": (
        "fused_bias_gelu_backward",
        {
            "grad_output": torch.full((1, 4), 3e38),
            "input": torch.tensor([[-32.0, -11.0, 32.0, 11.0]]),
            "bias": torch.zeros(4),
            "tanh": True,
        },
    ),
    "gates of silu far out": ("activation_and_mul_backward", _gate("silu")),
    "gates of gelu by tanh far out": ("activation_and_mul_backward", _gate("gelu_tanh")),
    "queries that attend to nothing": ("evoformer_attention_backward", _evoformer_of_nothing()),
    "no elements, strides of 0": (
        "bias_activation_",
        {"input": _of_no_elements(), "bias": None, "activation": "relu"},
    ),
}

REJECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "a row of more bytes than an integer holds": (
        "fp_quantize",
        {"x": torch.zeros(0, 8), "group_size": 2**62, "bits": 12, "mantissa_bits": 7, "noise": None},
    ),
    "more devices than an integer holds": ("swizzle_quantize", {**_SWIZZLE, "nodes": 2**62, "devices_per_node": 4}),
    "more heads than memory holds": (
        "pad_transform",
        {**{name: torch.zeros(3, 1, 0) for name in ("query", "key", "value")}, "heads": 2**63 - 1, "pad": False},
    ),
    "a mask on another device": ("cached_attention", _attention(mask=torch.ones(1, 3, device="meta"))),
    "slopes on another device": ("cached_attention", _attention(alibi=torch.ones(2, device="meta"))),
}


def failures(target: Target) -> Iterator[str]:
    """What is wrong with any call on a target whose kernels are loaded."""
    for calls, kind, expected in ((AGREE, "special", ("", False)), (REJECTED, "wrong", ("", True))):
        for name, (op, arguments) in calls.items():
            found = fuzz.compare(target, op_info.find(op), arguments, {}, {kind})
            if found != expected:
                yield f"{op}, {name}: {found}"


def main(name: str) -> int:
    target = Target.find(name)
    fuzz.start(target)
    found = list(failures(target))
    sys.stdout.write("\n".join([*found, f"{len(AGREE) + len(REJECTED)} calls, {len(found)} failed\n"]))
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
