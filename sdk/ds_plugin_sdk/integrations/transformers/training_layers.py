"""RMS norm, GELU, gated activations and rotary embedding of models in training, by the functions of `ds_plugin_sdk.nn`.

transformers writes them as several functions of torch's each, all of which keep what their derivatives need: of a LLaMA
in bfloat16 they are a third of all that a step keeps between the products.
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations
from transformers.models.llama import modeling_llama as llama
from transformers.pytorch_utils import Conv1D

from ds_plugin_sdk.integrations.transformers.replacement import TrainingReplacement
from ds_plugin_sdk.integrations.transformers.training import TrainedLinear
from ds_plugin_sdk.integrations.transformers.understood import (
    NotUnderstoodError,
    activation_of,
    as_written,
    check_as_written,
    check_no_other_forward,
    has_its_forward,
    has_other_hooks,
    same_code,
)
from ds_plugin_sdk.nn.activation import GATE, GELU
from ds_plugin_sdk.nn.linear import is_autocast
from ds_plugin_sdk.nn.rms_norm import RMS_NORM
from ds_plugin_sdk.nn.rotary import ROTARY

_ROTARY = "apply_rotary_pos_emb"
_GELUS = (activations.NewGELUActivation, activations.FastGELUActivation, activations.GELUTanh)


def training_replacement(module: nn.Module) -> TrainingReplacement | None:
    """What a module is replaced by in training; None for one that is not known here."""
    kind = type(module)
    try:
        check_no_other_forward(module)
        if kind in (nn.Linear, Conv1D):
            return TrainedLinear(module)
        check_as_written(module)
        if kind in _GELUS:
            return TrainedGelu(module)
        if is_rms(module):
            return TrainedNorm(module)
        if same_code(kind.forward, llama.LlamaMLP.forward):
            return TrainedMlp(module)
        return TrainedAttention(module) if _rotary_of(kind.forward) is not None else None
    except NotUnderstoodError:
        return None


def is_rms(module: nn.Module) -> bool:
    """Whether a module has the code of LLaMA's RMS norm."""
    return same_code(type(module).forward, llama.LlamaRMSNorm.forward)


class TrainedNorm(TrainingReplacement):
    """An RMS norm with LLaMA's code."""

    def in_training(self, input: Any) -> Tensor | None:
        return norm_in_training(self.module, input)


def norm_in_training(module: nn.Module, input: Any) -> Tensor | None:
    """What a module with the code of LLaMA's RMS norm gives; None if its own code is to run."""
    weight: Any = module._parameters.get("weight")
    eps: Any = getattr(module, "variance_epsilon", None)
    if torch.compiler.is_compiling() or not isinstance(eps, float):
        return None
    if not isinstance(weight, Tensor) or not isinstance(input, Tensor):
        return None
    return RMS_NORM.call(input, weight, eps=eps) if RMS_NORM.serves(input, weight) else None


class TrainedGelu(TrainingReplacement):
    """GELU by tanh: written as a formula, which torch computes and derives step by step, or torch's own on a CPU, where
    ours takes half as long.
    """

    def in_training(self, input: Any) -> Tensor | None:
        if not isinstance(input, Tensor) or (type(self.module) is activations.GELUTanh and not input.is_cpu):
            return None
        if input.dtype != torch.float32 and is_autocast(input.device.type):  # a power may be float32
            return None
        return GELU.call(input, approximate="tanh") if GELU.serves(input) else None


class TrainedMlp(TrainingReplacement):
    """A feed-forward layer with LLaMA's code. Its linear layers are called as it calls them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._act: Any = module.get_submodule("act_fn")
        self._activation = activation_of(self._act)
        self._act_forward = type(self._act).forward

    def in_training(self, input: Any) -> Any:
        mlp: Any = self.module
        if mlp.act_fn is not self._act or not self._acts_alone():
            return None
        gate, up = mlp.gate_proj(input), mlp.up_proj(input)
        served = isinstance(gate, Tensor) and isinstance(up, Tensor) and GATE.serves(gate, up)
        return mlp.down_proj(GATE.call(gate, up, activation=self._activation) if served else mlp.act_fn(gate) * up)

    def _acts_alone(self) -> bool:
        """Whether a call of the activation would be a call of the code that is known."""
        act = self._act
        return type(act).forward is self._act_forward and has_its_forward(act) and not has_other_hooks(act)


class TrainedAttention(TrainingReplacement):
    """An attention whose code turns queries and keys by LLaMA's function. It runs, with ours in that one's place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._code: types.FunctionType = as_written(self._forward)  # type: ignore[assignment]  # `_rotary_of` found it
        self._own_rotary = _rotary_of(self._forward)
        self._halves = _Halves()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = self._code.__globals__
        renamed = self._code is not self._forward and "past_key_values" in kwargs
        if renamed or not self.trains() or names.get(_ROTARY) is not self._own_rotary:
            return self.own(*args, **kwargs)
        code = self._code
        # All other names are what they are in its file at this moment.
        forward = types.FunctionType(
            code.__code__, {**names, _ROTARY: self._turn}, code.__name__, code.__defaults__, code.__closure__
        )
        forward.__kwdefaults__ = code.__kwdefaults__
        return forward(self.module, *args, **kwargs)

    def _turn(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        halves = self._halves.of(cos, sin) if unsqueeze_dim == 1 and _fit(q, k, cos, sin) else None
        if halves is None or not ROTARY.serves(q, *halves):
            return self._own_rotary(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)  # type: ignore[misc,no-any-return]  # found
        return ROTARY.call(q, *halves, interleaved=False), ROTARY(k, *halves, interleaved=False)


def _rotary_of(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function by which an attention's code turns queries and keys, if that has the code of LLaMA's."""
    code = as_written(forward)
    if not isinstance(code, types.FunctionType) or hasattr(code, "__wrapped__"):
        return None
    function = code.__globals__.get(_ROTARY) if _ROTARY in code.__code__.co_names else None
    return function if function is not None and same_code(function, llama.apply_rotary_pos_emb) else None


def _fit(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Whether LLaMA's function gives queries and keys of their own dtype, and all are ordinary tensors."""
    return (
        all(type(each) is Tensor for each in (q, k, cos, sin))
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and q.dim() == k.dim() == 4
        and cos.dim() == sin.dim() == 3
        and cos.shape == sin.shape
        and cos.shape[-1] == q.shape[-1] == k.shape[-1]
        and cos.shape[-1] % 2 == 0
        and not (cos.requires_grad or sin.requires_grad or cos.is_inference() or sin.is_inference())
    )


class _Halves(threading.local):
    """Cosines and sines of pairs, of those that a model has computed for all elements of a head."""

    def __init__(self) -> None:
        self._last: tuple[tuple[Tensor, Tensor], tuple[int, int], tuple[Tensor, Tensor] | None] | None = None
        self._asked: set[str] = set()

    def of(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
        """None if the elements of a pair have other angles."""
        versions, last = (cos._version, sin._version), self._last
        if last is not None and last[0][0] is cos and last[0][1] is sin and last[1] == versions:
            return last[2]
        halves = [each.float().chunk(2, dim=-1) for each in (cos, sin)]
        # A device other than the host is waited for once, not in each step.
        known = cos.device.type != "cpu" and cos.device.type in self._asked
        alike = known or all(torch.equal(*each) for each in halves)
        if alike:
            self._asked.add(cos.device.type)
        self._last = (cos, sin), versions, (halves[0][0].contiguous(), halves[1][0].contiguous()) if alike else None
        return self._last[2]


# What `training_replacement` may give, but for linear layers.
TRAINED = (TrainedAttention, TrainedGelu, TrainedMlp, TrainedNorm)

__all__ = ["TRAINED", "is_rms", "norm_in_training", "training_replacement"]
