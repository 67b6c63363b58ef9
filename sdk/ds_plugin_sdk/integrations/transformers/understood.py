"""What is known for certain about a module: that it runs its class's code, which code that is, and whether that holds.

A module is replaced only if all that its result depends on is known. What is not raises `NotUnderstoodError`, with the
reason, and stays the model's own code.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from transformers import activations
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ds_plugin_sdk.ops.linear import Activation

try:
    from transformers.utils import output_capturing
except ImportError:  # transformers 5.0 replaces forwards to collect outputs, where later releases register hooks
    output_capturing = None

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Classes of activations -> ours.
_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    activations.GELUActivation: "gelu",
    activations.NewGELUActivation: "gelu_tanh",
    activations.FastGELUActivation: "gelu_tanh",
    activations.GELUTanh: "gelu_tanh",
}

# Hooks that apply to all modules; they are called around modules, which a whole layer's forward does not call.
_GLOBAL_HOOKS = (nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks)


@dataclass(frozen=True)
class Norm:
    """Layer norm, or RMS norm: its module's parameters by name, whichever they are at a call."""

    parameters: dict[str, nn.Parameter | None]
    eps: float
    rms: bool

    def serves(self, dtype: torch.dtype) -> bool:
        """Whether the parameters are plain ones of the input's dtype."""
        weight = self.parameters.get("weight")
        if type(weight) is not nn.Parameter or weight.dtype != dtype:
            return False
        bias = weight if self.rms else self.parameters.get("bias")
        return type(bias) is nn.Parameter and bias.dtype == dtype


class NotUnderstoodError(Exception):
    """A module has something that our ops may not have; the message says what."""


def is_plain_inference(input: object) -> bool:
    """Whether ops may be called on a tensor as if nothing else were at work: gradients, autocast, tracing."""
    return (
        type(input) is Tensor
        and not torch.is_grad_enabled()
        and not (torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(input.device.type))
        and not torch.compiler.is_compiling()
        and not torch._C._is_tracing()
    )


# ---------------------------------------------------------------------- modules
def name_of(module: nn.Module) -> str:
    """A class as its users know it: ``peft.tuners.lora.layer.Linear``, but ``Linear`` for torch's."""
    kind = type(module)
    return (
        kind.__name__
        if kind.__module__.startswith(("torch.nn", "transformers"))
        else f"{kind.__module__}.{kind.__name__}"
    )


def check_own_code(module: nn.Module) -> None:
    """Raise `NotUnderstoodError` unless a call of the module is a call of its class's forward, as it was written."""
    check_no_other_forward(module)
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if any(hooks) and not _are_idle(hooks):
        raise NotUnderstoodError(f"{name_of(module)} has hooks")
    kind = type(module)
    code = kind.forward
    written = (code.__module__, code.__qualname__) == (kind.__module__, f"{kind.__qualname__}.forward")
    if not written or hasattr(code, "__wrapped__"):
        raise NotUnderstoodError(f"the forward of {name_of(module)} is not that of its class")


def _are_idle(hooks: Iterable[dict[int, Any]]) -> bool:
    """Whether all hooks are those by which transformers collects outputs, which stay when nobody collects any more."""
    collector = getattr(output_capturing, "_active_collector", None)
    return (
        collector is not None
        and not collector.get()
        and all(
            getattr(hook, "__module__", None) == output_capturing.__name__
            for registered in hooks
            for hook in registered.values()
        )
    )


def check_no_other_forward(module: nn.Module) -> None:
    """Raise `NotUnderstoodError` if an instance has a forward of its own, as hooks of accelerate give it."""
    own = vars(module).get("forward")
    if own is not None and not _is_forward_of(module, own):
        raise NotUnderstoodError(f"{name_of(module)} has another forward")


def _is_forward_of(module: nn.Module, forward: object) -> bool:
    return (
        isinstance(forward, types.MethodType)
        and forward.__self__ is module
        and forward.__func__ is type(module).forward
    )


def check_parameter(parameter: object, name: str) -> None:
    """Raise `NotUnderstoodError` unless it is a plain tensor of numbers with memory of its own."""
    if type(parameter) is not nn.Parameter or parameter.layout != torch.strided or parameter.is_meta:
        raise NotUnderstoodError(f"{name} is {type(parameter).__name__}, no plain parameter")
    if parameter.dtype not in DTYPES:
        raise NotUnderstoodError(f"{name} is {parameter.dtype}")
    if parameter.is_inference():
        raise NotUnderstoodError(f"{name} was made in inference mode, where torch does not count changes")


def norm_of(module: nn.Module) -> Norm:
    """A norm of a module that is torch's layer norm or has the code of LLaMA's RMS norm."""
    if type(module) is nn.LayerNorm:
        if module.weight is None or module.bias is None or len(module.normalized_shape) != 1:
            raise NotUnderstoodError("LayerNorm without weight or bias, or over several dimensions")
        rms, eps = False, module.eps
    elif same_code(type(module).forward, LlamaRMSNorm.forward):
        rms, eps = True, float(module.variance_epsilon)  # type: ignore[arg-type]  # the code reads it
    else:
        raise NotUnderstoodError(f"{name_of(module)} is no norm that is known")
    check_own_code(module)
    for name in ("weight",) if rms else ("weight", "bias"):
        check_parameter(module._parameters.get(name), f"{name_of(module)}.{name}")
    return Norm(module._parameters, eps, rms)


def activation_of(module: nn.Module) -> Activation:
    """An activation of ours that is a module's."""
    activation = _ACTIVATIONS.get(type(module))
    if activation is None:
        raise NotUnderstoodError(f"{name_of(module)} is no activation that is known")
    check_own_code(module)
    return activation


# ---------------------------------------------------------------------- code
@functools.cache
def same_code(function: Callable[..., Any], known: Callable[..., Any]) -> bool:
    """Whether two functions do the same by having the same bytecode, and calling functions that do.

    transformers writes a family's layers anew into its file, so that many families have LLaMA's by other names. Which
    attention is called does not matter: that is what the registry decides.
    """
    if function is known:
        return True
    if not isinstance(function, types.FunctionType) or not isinstance(known, types.FunctionType):
        return False
    one, other = function.__code__, known.__code__
    inner, known_inner = getattr(function, "__wrapped__", None), getattr(known, "__wrapped__", None)
    if one is other and inner is not None and known_inner is not None:
        return same_code(inner, known_inner)  # transformers wraps the forward of all decoder layers alike
    if (
        function.__closure__
        or known.__closure__
        or _shape_of(one) != _shape_of(other)
        or _constants(function) != _constants(known)
        or function.__defaults__ != known.__defaults__
        or function.__kwdefaults__ != known.__kwdefaults__
    ):
        return False
    missing = object()
    return all(
        name == "eager_attention_forward"
        or (a := function.__globals__.get(name, missing)) is (b := known.__globals__.get(name, missing))
        or (isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType) and same_code(a, b))
        for name in one.co_names
    )


def _shape_of(code: types.CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_names, code.co_varnames, code.co_argcount, code.co_kwonlyargcount, code.co_flags & 0xFF


def _constants(function: types.FunctionType) -> tuple[Any, ...]:
    return tuple(c for c in function.__code__.co_consts if c is not None and c != function.__doc__)


def check_code(module: nn.Module, *known: type[nn.Module]) -> None:
    """Raise `NotUnderstoodError` unless the module runs the code of one of these classes."""
    if not any(same_code(type(module).forward, kind.forward) for kind in known):
        raise NotUnderstoodError(f"the code of {name_of(module)} is not known")
    check_own_code(module)


# ---------------------------------------------------------------------- later
@dataclass(frozen=True)
class Watch:
    """Tells cheaply whether modules are still what they were found to be; asked at every call."""

    _hooks: tuple[Any, ...]
    _modules: tuple[tuple[nn.Module, type[nn.Module], dict[str, Any]], ...]
    _children: list[dict[str, Any]]
    _known_children: list[dict[str, Any]]

    @classmethod
    def alone(cls, module: nn.Module) -> Watch:
        """A module whose forward is replaced: its hooks are still called, but may be there to change its parameters."""
        return cls(
            (module._forward_hooks, module._forward_pre_hooks), ((module, type(module), {"training": False}),), [], []
        )

    @classmethod
    def over(cls, layer: nn.Module) -> Watch:
        """A layer whose forward is replaced, and the modules in it, which are not called any more."""
        inner = list(layer.modules())[1:]
        hooks = [d for module in inner for d in (module._forward_hooks, module._forward_pre_hooks)]
        children = [module._modules for module in (layer, *inner) if module._modules]
        return cls(
            (*_GLOBAL_HOOKS, *hooks),
            tuple((module, type(module), vars(module)) for module in inner),
            children,
            [dict(each) for each in children],
        )

    def holds(self) -> bool:
        """No hooks, no other forward, no other class, no other children, no training mode."""
        if any(self._hooks) and not _are_idle(self._hooks):
            return False
        for module, kind, attributes in self._modules:
            if module.__class__ is not kind or attributes["training"]:
                return False
            if "forward" in attributes and not _is_forward_of(module, attributes["forward"]):
                return False
        return self._children == self._known_children
