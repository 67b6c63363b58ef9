"""Every op by a direct call of its Python function beside plain torch, on the last of the shapes it is checked on.

Nothing is loaded by hand: the first call of an op loads its kernels, as in a user's program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ds_plugin_sdk.bench.timing import Case, Step
from ds_plugin_sdk.conformance import op_info
from ds_plugin_sdk.conformance.op_info import Make, OpInfo, Sample


def cases(dtype: torch.dtype, compile: bool) -> Iterator[Case]:
    """Every op that takes `dtype`, beside its reference, which is plain torch, and torch's own function, if any."""
    for info in op_info.infos():
        if dtype in info.dtypes:
            sample = chosen(info, dtype)
            yield Case(info.name, sample.label, _call(info.function, sample.arguments), _peers(info, sample.arguments))


def chosen(info: OpInfo, dtype: torch.dtype) -> Sample:
    """The last of an op's samples, for those of real models come last."""
    *_, last = info.samples(Make.seeded(dtype))
    return last


def _peers(info: OpInfo, arguments: Mapping[str, Any]) -> dict[str, Step]:
    reference = getattr(torch.ops.ds_plugin_reference, info.name).default
    positional = tuple(arguments.values() if info.schema_arguments is None else info.schema_arguments(arguments))
    peers: dict[str, Step] = {"reference": lambda: reference(*positional)}
    own = _TORCH.get(info.name)
    return peers | ({"torch": _call(own, arguments)} if own else {})


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Step:
    return lambda: function(**arguments)


# ---- torch's own functions, where a line of them says the same ------------------------------------------------------
def _layer_norm(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return functional.layer_norm(input, weight.shape, weight, bias, eps)


def _rms_norm(input: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    return functional.rms_norm(input, weight.shape, weight + weight_offset if weight_offset else weight, eps)


def _sum(input: Tensor, residual: Tensor, input_bias: Tensor | None = None) -> Tensor:
    return input + residual if input_bias is None else input + residual + input_bias


def _activate(x: Tensor, activation: str) -> Tensor:
    match activation:
        case "gelu" | "gelu_tanh":
            return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
        case "silu":
            return functional.silu(x)
        case "relu":
            return functional.relu(x)
    return x


def _gated(input: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    first, second = (input if bias is None else input + bias).chunk(2, dim=-1)
    return first * _activate(second, activation)


def _attention(query: Tensor, key: Tensor, value: Tensor, past: int, scale: float, **cached: Any) -> Tensor:
    """The new keys and values go into the cache, as models with a static cache have it; no mask, no window."""
    total, causal = past + key.shape[2], cached["causal"] and query.shape[2] > 1
    for cache, new in ((cached["key_cache"], key), (cached["value_cache"], value)):
        cache[:, :, past:total] = new
    keys, values = (cached[name][:, :, :total] for name in ("key_cache", "value_cache"))
    return functional.scaled_dot_product_attention(
        query, keys, values, is_causal=causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def _adam(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor], **o: Any
) -> None:
    # After so many steps there is nothing to correct.
    steps = [torch.tensor(float(o["steps"]) if o["bias_correction"] else 1e9) for _ in params]
    numbers = {"lr": o["lr"], "beta1": o["betas"][0], "beta2": o["betas"][1], "eps": o["eps"]}
    step = torch._fused_adamw_ if o["adamw"] else torch._fused_adam_
    step(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        **numbers,
        weight_decay=o["weight_decay"],
        amsgrad=False,
        maximize=False,
    )


_TORCH: dict[str, Callable[..., object]] = {
    "layer_norm": _layer_norm,
    "pre_layer_norm": lambda weight, bias, eps, **x: (_layer_norm(total := _sum(**x), weight, bias, eps), total),
    "post_layer_norm": lambda weight, bias, eps, **x: _layer_norm(_sum(**x), weight, bias, eps),
    "rms_norm": _rms_norm,
    "pre_rms_norm": lambda weight, eps, **x: (_rms_norm(total := _sum(**x), weight, eps), total),
    "softmax": lambda scores, mask, scale, **_: functional.softmax(scores * scale + mask, dim=-1),
    "bias_activation": lambda input, bias, activation: _activate(input if bias is None else input + bias, activation),
    "gated_activation": _gated,
    "cached_attention": _attention,
    "adam_": _adam,
    "flatten": lambda tensors: torch.cat([each.reshape(-1) for each in tensors]),
}
