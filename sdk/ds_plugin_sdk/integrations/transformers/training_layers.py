"""RMS norm, GELU, gated activations and rotary embedding of models in training, by the functions of `ds_plugin_sdk.nn`.

transformers writes them as several functions of torch's each, all of which keep what their derivatives need.
"""

from __future__ import annotations

import dis
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from transformers import activations
from transformers.models.llama import modeling_llama as llama
from transformers.pytorch_utils import Conv1D

from ds_plugin_sdk.integrations.transformers.replacement import TrainingReplacement, forward_in_place
from ds_plugin_sdk.integrations.transformers.training import TrainedLinear
from ds_plugin_sdk.integrations.transformers.understood import (
    NotUnderstoodError,
    activation_of,
    as_written,
    check_activation,
    check_as_written,
    check_no_other_forward,
    has_hooks,
    has_its_forward,
    has_other_hooks,
    same_code,
)
from ds_plugin_sdk.nn.activation import GATE, GELU
from ds_plugin_sdk.nn.linear import is_autocast
from ds_plugin_sdk.nn.rms_norm import RMS_NORM
from ds_plugin_sdk.nn.rotary import ROTARY

# What modules of activations call, as torch has it.
_FUNCTIONS = {name: getattr(functional, name) for name in ("gelu", "relu", "silu")}
_ROTARY, _HALF = "apply_rotary_pos_emb", "rotate_half"
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
    served = isinstance(eps, float) and RMS_NORM.serves(input, weight)
    return RMS_NORM.call(input, weight, eps=eps) if served else None


class TrainedGelu(TrainingReplacement):
    """GELU by tanh: written as a formula, which torch computes and derives step by step, or torch's own on a CPU, where
    ours takes half as long.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        check_activation(module)
        self._called = vars(module).get("act")

    def in_training(self, input: Any) -> Tensor | None:
        if vars(self.module).get("act") is not self._called:
            return None
        if not GELU.serves(input) or (type(self.module) is activations.GELUTanh and not input.is_cpu):
            return None
        if input.dtype != torch.float32 and is_autocast(input.device.type):  # a power may be float32
            return None
        return GELU.call(input, approximate="tanh")


class TrainedMlp(TrainingReplacement):
    """A feed-forward layer with LLaMA's code. Its modules are called in that one's order, whatever ops do: ZeRO 3 puts
    hooks on all of them, and gathers parameters by it, which must be the same on all ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._act: Any = module._modules.get("act_fn")
        if self._act is None:
            raise NotUnderstoodError("its activation is no module")
        self._activation = activation_of(self._act, hooks=True)
        self._act_forward, self._called = type(self._act).forward, vars(self._act).get("act")

    def in_training(self, input: Any) -> Any:
        mlp: Any = self.module
        if mlp.act_fn is not self._act or not self._acts_alone():
            return None
        gate = self._through_hooks(mlp.gate_proj(input))
        up = mlp.up_proj(input)
        if GATE.serves(gate, up):
            return mlp.down_proj(GATE.call(gate, up, activation=self._activation))
        return mlp.down_proj(self._act.forward(gate) * up)

    def _through_hooks(self, gate: Any) -> Any:
        """What the hooks of the activation make of its input, and of that as its output."""
        act = self._act
        if not has_hooks(act):
            return gate
        with forward_in_place(act, lambda input: input):
            return act(gate)

    def _acts_alone(self) -> bool:
        """Whether a call of the activation would be a call of the code that is known."""
        act = self._act
        return (
            type(act).forward is self._act_forward
            and vars(act).get("act") is self._called
            and has_its_forward(act)
            and not has_other_hooks(act)
            and all(getattr(functional, name) is function for name, function in _FUNCTIONS.items())
        )


class TrainedAttention(TrainingReplacement):
    """An attention whose code turns queries and keys by LLaMA's function. It runs, with ours in that one's place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._code: Any = as_written(self._forward)
        rotary: Any = _rotary_of(self._forward)
        self._own_rotary, self._own_half = rotary, rotary.__globals__[_HALF]
        self._trusted: set[str] = set()  # types of devices on which pairs were seen to have one angle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        code, names = self._code, self._code.__globals__
        renamed = code is not self._forward and "past_key_values" in kwargs
        known = names.get(_ROTARY) is self._own_rotary and self._own_rotary.__globals__.get(_HALF) is self._own_half
        if renamed or not known or not self.trains():
            return self.own(*args, **kwargs)
        # All other names are what they are in its file at this moment.
        forward = types.FunctionType(
            code.__code__, {**names, _ROTARY: self._turn}, code.__name__, code.__defaults__, code.__closure__
        )
        forward.__kwdefaults__ = code.__kwdefaults__
        return forward(self.module, *args, **kwargs)

    def _turn(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        if unsqueeze_dim == 1 and _fit(q, k, cos, sin) and ROTARY.may_serve(q, k, cos, sin):
            halves = _angles.of(cos, sin, q.device.type in self._trusted)
            if halves is not None and ROTARY.fits(q, *halves):
                if not q.is_cpu:  # another device is waited for once, not in each step
                    self._trusted.add(q.device.type)
                return ROTARY.call(q, *halves, interleaved=False), ROTARY(k, *halves, interleaved=False)
        turned: tuple[Tensor, Tensor] = self._own_rotary(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
        return turned


def _rotary_of(forward: Callable[..., Any]) -> types.FunctionType | None:
    """The function by which an attention's code turns queries and keys, if that has the code of LLaMA's."""
    code = as_written(forward)
    if not isinstance(code, types.FunctionType) or hasattr(code, "__wrapped__") or _writes_names(code.__code__):
        return None
    function: Any = code.__globals__.get(_ROTARY) if _ROTARY in code.__code__.co_names else None
    written = _is_written(function, _ROTARY) and _is_written(function.__globals__.get(_HALF), _HALF)
    return function if written and same_code(function, llama.apply_rotary_pos_emb) else None


def _writes_names(code: types.CodeType) -> bool:
    """Whether code, or a function within it, writes names of its file: `TrainedAttention` would keep them from it."""
    writes = any(each.opname in ("STORE_GLOBAL", "DELETE_GLOBAL") for each in dis.get_instructions(code))
    return writes or any(_writes_names(each) for each in code.co_consts if isinstance(each, types.CodeType))


def _is_written(function: Any, name: str) -> bool:
    """Whether it is the function by that name in a file of transformers, and nobody has put another in its place."""
    return (
        isinstance(function, types.FunctionType)
        and not hasattr(function, "__wrapped__")
        and function.__qualname__ == name
        and function.__module__.startswith("transformers.")
        and function.__globals__.get("__name__") == function.__module__
    )


def _fit(q: Any, k: Any, cos: Any, sin: Any) -> bool:
    """Whether LLaMA's function gives queries and keys of their own dtype, and all are ordinary tensors."""
    return (
        all(type(each) is Tensor for each in (q, k, cos, sin))
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and q.dim() == k.dim() == 4
        and cos.dim() == sin.dim() == 3
        and cos.shape == sin.shape == (cos.shape[0], q.shape[2], q.shape[3])
        and cos.shape[0] in (1, q.shape[0])
        and k.shape[0] == q.shape[0]
        and k.shape[2:] == q.shape[2:]
        and cos.shape[-1] % 2 == 0
        and not (cos.requires_grad or sin.requires_grad)
    )


class _Angles(threading.local):
    """Cosines and sines of pairs, of those of all elements of a head, which a model hands to each layer."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor, tuple[int, int], tuple[Tensor, Tensor] | None, bool] | None = None

    def of(self, cos: Tensor, sin: Tensor, trusted: bool) -> tuple[Tensor, Tensor] | None:
        """None if the elements of a pair have other angles, which is not looked at if that is `trusted`."""
        versions, last = (cos._version, sin._version), self._last
        if last is not None and last[0] is cos and last[1] is sin and last[2] == versions and (last[4] or trusted):
            return last[3]
        # What is asked here is no part of what a mode may trace.
        with _disable_current_modes():
            halves = [each.float().chunk(2, dim=-1) for each in (cos, sin)]
            alike = trusted or all(torch.equal(*each) for each in halves)
            found = (halves[0][0].contiguous(), halves[1][0].contiguous()) if alike else None
        self._last = cos, sin, versions, found, not trusted
        return found


_angles = _Angles()

# What `training_replacement` may give, but for linear layers.
TRAINED = (TrainedAttention, TrainedGelu, TrainedMlp, TrainedNorm)

__all__ = ["TRAINED", "is_rms", "norm_in_training", "training_replacement"]
