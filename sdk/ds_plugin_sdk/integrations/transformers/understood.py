"""What is known for certain about a module: that it runs its class's code, and which code that is.

A module is replaced only if all that its result depends on is known. What is not raises `NotUnderstoodError`, with the
reason, and stays the model's own code.
"""

from __future__ import annotations

import dis
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as nn_module
from transformers import activations
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.utils.deprecation import deprecate_kwarg

from ds_plugin_sdk.integrations.deepspeed.hooks import is_linear_of_zero, moves_parameters_alone
from ds_plugin_sdk.integrations.transformers.as_found import Place
from ds_plugin_sdk.integrations.transformers.replacement import is_own
from ds_plugin_sdk.ops._watched import is_watched
from ds_plugin_sdk.ops.linear import Activation

try:
    from transformers.utils import output_capturing
except ImportError:  # transformers 5.0 replaces forwards to collect outputs, where later releases register hooks
    output_capturing = None

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# Classes of activations -> ours.
ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    activations.SiLUActivation: "silu",
    activations.GELUActivation: "gelu",
    activations.NewGELUActivation: "gelu_tanh",
    activations.FastGELUActivation: "gelu_tanh",
    activations.GELUTanh: "gelu_tanh",
}


class _Checkpointed(GradientCheckpointingLayer):  # type: ignore[misc]  # transformers is not typed where types are checked
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


# What functions that transformers 5.24 decorates run first: past_key_values became cache, and layers are checkpointed.
_WRAPPERS = [
    deprecate_kwarg("past_key_values", "999", new_name="cache")(lambda cache: cache).__code__,
    *([_Checkpointed.forward.__code__] if hasattr(_Checkpointed.forward, "__wrapped__") else []),
]

# Whose functions files of models import.
_LIBRARIES = {"transformers", "torch", *sys.stdlib_module_names}

# What modules call of torch's: others may stand in these places, those of a profiler or of another attention.
_FUNCTIONS = ("linear", "scaled_dot_product_attention", "layer_norm", "gelu", "relu", "silu", "dropout")

# An attribute of modes that see every operator, TorchDispatchMode: True where ours mean something to them.
KNOWS_OURS = "knows_ds_plugin"

# OLMo 2's rounds to 16 bits once, after the weight, as our op does.
RMS_NORMS = (LlamaRMSNorm, Olmo2RMSNorm)

# Hooks that apply to all modules; they are called around modules, which a whole layer's forward does not call.
GLOBAL_HOOKS = (nn_module._global_forward_hooks, nn_module._global_forward_pre_hooks)


@dataclass(frozen=True)
class Norm:
    """Layer norm, or RMS norm: its module's parameters by name, whichever they are at a call.

    Attributes:
        columns: how many elements are normed as one.
    """

    parameters: dict[str, nn.Parameter | None]
    columns: int
    eps: float
    rms: bool
    weight_offset: float = 0.0  # of an RMS norm

    def places(self) -> list[Place]:
        return [Place(self.parameters, name, moved=False) for name in _names(self.rms)]

    def arguments(self) -> tuple[Tensor | None, Tensor | None, float, float]:
        """Weight, bias (None for RMS norm), eps and what is added to the weight."""
        return self.parameters["weight"], None if self.rms else self.parameters["bias"], self.eps, self.weight_offset

    def serves(self, dtype: torch.dtype) -> bool:
        """Whether the parameters are plain ones of the input's dtype, with a number for each column."""
        return all(
            type(parameter) is nn.Parameter and parameter.dtype == dtype and parameter.shape == (self.columns,)
            for parameter in map(self.parameters.get, _names(self.rms))
        )


def _names(rms: bool) -> tuple[str, ...]:
    """Of a norm's parameters."""
    return ("weight",) if rms else ("weight", "bias")


class NotUnderstoodError(Exception):
    """A module has something that our ops may not have; the message says what."""


def is_plain_inference(input: object) -> bool:
    """Whether ops may be called on a tensor as if nothing else were at work: gradients, autocast, tracing, vmap, modes
    that may put something else into the place of torch's functions.
    """
    return (
        type(input) is Tensor
        and not torch.is_grad_enabled()
        and not (torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(input.device.type))
        and not is_watched(operators=False)
        and not (torch._C._len_torch_dispatch_stack() and _has_modes_without_ours())
    )


def _has_modes_without_ours() -> bool:
    """Whether a mode of operators is at work, as torch's counter of FLOPs, that does not say that it knows our ops: it
    would miss those of torch's in whose place they are.
    """
    modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    return not all(getattr(mode, KNOWS_OURS, False) for mode in modes)


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
    check_only_its_class(module)
    check_as_written(module)


def check_as_written(module: nn.Module) -> None:
    """Raise `NotUnderstoodError` unless a call of its class runs the forward that stands in it, or in a class that it
    derives from, and this the functions that stand in its file and torch's own.
    """
    kind = type(module)
    code = as_written(kind.forward)
    if not any(_is_as_written(code, each.__module__, f"{each.__qualname__}.forward") for each in kind.__mro__):
        raise NotUnderstoodError(f"the forward of {name_of(module)} is not that of its class")
    if not any(kind.__call__ is each and _is_as_written(each, *written) for each, *written in _CALLS):
        raise NotUnderstoodError(f"{name_of(module)} has another __call__")
    if "_call_impl" in vars(module) or not _is_as_written(kind._call_impl, nn.Module.__module__, "Module._call_impl"):
        raise NotUnderstoodError(f"{name_of(module)} has another _call_impl")
    _check_reads(kind, code)
    check_called(kind.forward, name_of(module))
    if not torch_has_its_functions():
        found = zip(_FUNCTIONS, _functions_of(functional), _TORCHS, strict=True)
        others = ", ".join(name for name, function, torchs in found if function is not torchs)
        raise NotUnderstoodError(f"torch.nn.functional has another {others} than torch's own")


def check_class_forward(kind: type[nn.Module]) -> None:
    """Raise `NotUnderstoodError` unless a class's forward stands in its file, and transformers alone wraps it."""
    forward: Any = kind.forward
    while hasattr(forward, "__wrapped__") and _is_transformers(forward.__globals__):
        forward = forward.__wrapped__
    if not any(_is_as_written(forward, each.__module__, f"{each.__qualname__}.forward") for each in kind.__mro__):
        raise NotUnderstoodError(f"the forward of {kind.__qualname__} is not that of its class")


def _is_transformers(names: Mapping[str, Any]) -> bool:
    """Whether they are those of a file of transformers."""
    return str(names.get("__name__")).startswith("transformers.")


def check_called(function: Callable[..., Any], name: str) -> None:
    """Raise `NotUnderstoodError` unless the functions that one calls stand in its file; `name` is for messages."""
    for called in called_functions(function):
        if not _is_of_its_file(called):
            raise NotUnderstoodError(f"{called.name} is not that of the file of {name}")


def _check_reads(kind: type[nn.Module], forward: Any) -> None:
    """Raise `NotUnderstoodError` if what a forward reads of its module may be computed there, and is neither a plain
    value nor a method that stands in its class.
    """
    if kind.__getattr__ is not nn.Module.__getattr__ or kind.__getattribute__ is not nn.Module.__getattribute__:
        raise NotUnderstoodError(f"{kind.__qualname__} has another __getattr__ than torch's modules")
    names = {*forward.__code__.co_names}
    for each in kind.__mro__[: kind.__mro__.index(nn.Module)]:
        for name in names & vars(each).keys():
            value = vars(each)[name]
            if isinstance(value, property):
                raise NotUnderstoodError(f"{name} of {kind.__qualname__} is a property")
            method = f"{each.__qualname__}.{name}"
            if isinstance(value, types.FunctionType) and not _is_as_written(as_written(value), each.__module__, method):
                raise NotUnderstoodError(f"{name} of {kind.__qualname__} is not that of its class")


def _is_as_written(function: Any, module: str | None, name: str) -> bool:
    """Whether a function is defined by a name, in a module if that is known, and is nobody's wrapper."""
    return (
        getattr(function, "__qualname__", None) == name
        and (module is None or function.__module__ == module)
        and not hasattr(function, "__wrapped__")
    )


# What calls a module's forward, and where it is defined.
_CALLS = (
    (nn.Module.__call__, "torch.nn.modules.module", "Module._wrapped_call_impl"),
    (GradientCheckpointingLayer.__call__, "transformers.modeling_layers", "GradientCheckpointingLayer.__call__"),
)


class Called(NamedTuple):
    """A function that another one calls: by which name of which file or class."""

    names: Mapping[str, Any]
    name: str
    value: Any


def called_functions(function: Callable[..., Any]) -> list[Called]:
    """Those by the names of its file that a function calls, and that these call, but for the attention, which the
    registry chooses.
    """
    found: dict[tuple[int, str], Called] = {}
    first: Any = as_written(function)
    left = [first]
    while left:
        each = left.pop()
        if not isinstance(each, types.FunctionType):
            continue
        if each.__globals__ is not first.__globals__ and not each.__module__.startswith("transformers.models."):
            continue
        for name in _names_of_its_file(each.__code__):
            value, key = each.__globals__.get(name), (id(each.__globals__), name)
            is_called = callable(value) and not isinstance(value, type) and name != "eager_attention_forward"
            if is_called and key not in found:
                found[key] = Called(each.__globals__, name, value)
                left.append(value)
    return list(found.values())


@functools.cache
def _names_of_its_file(code: types.CodeType) -> tuple[str, ...]:
    """Those that code looks up there, and not as attributes of something."""
    found = (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    return tuple(dict.fromkeys(found))


def _is_of_its_file(called: Called) -> bool:
    """Whether a function stands in the file by whose name it was called, or was imported there from a library that no
    user writes in: one of the same name, or another object that can be called, may have been put in its place.
    """
    function = as_written(called.value)
    if isinstance(function, functools._lru_cache_wrapper):
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType | types.BuiltinFunctionType):
        return False
    module = function.__module__ or ""
    known = module == called.names.get("__name__") or module.partition(".")[0] in _LIBRARIES
    return known and _is_as_written(function, None, called.name)


def torch_has_its_functions() -> bool:
    """Whether the functions that modules call are torch's, or that of ZeRO, which computes the same."""
    found: Any = _functions_of(functional)
    return found == _TORCHS or (found[1:] == _TORCHS[1:] and is_linear_of_zero(found[0]))


def _torchs(name: str) -> object:
    """A function as torch has it, whatever stands in its place; an object that is none if that cannot be told."""
    native, found = getattr(torch._C._nn, name, None), getattr(functional, name)
    if _is_as_written(found, functional.__name__, name):
        return found
    return object() if native is None else native


_functions_of = operator.attrgetter(*_FUNCTIONS)
_TORCHS = tuple(map(_torchs, _FUNCTIONS))
TORCHS_CROSS_ENTROPY = _torchs("cross_entropy")


def check_only_its_class(module: nn.Module) -> None:
    """Raise `NotUnderstoodError` unless a call of the module is a call of its class's forward and nothing else."""
    check_no_other_forward(module)
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if not are_idle(hooks):
        raise NotUnderstoodError(f"{name_of(module)} has hooks")


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """What is called around its forward, by number."""
    return module._forward_hooks, module._forward_pre_hooks


def are_idle(hooks: Sequence[dict[int, Any]]) -> bool:
    """Whether there are no hooks, or those alone by which transformers collects outputs, and none collects now: they
    stay when nobody asks any more, and those of attentions are there too if hidden states are asked for.
    """
    if not any(hooks):
        return True
    collector = getattr(output_capturing, "_active_collector", None)
    if collector is None:
        return False
    collected = collector.get()
    return all(
        getattr(hook, "__module__", None) == output_capturing.__name__
        and not (collected and _collects(hook, collected))
        for registered in hooks
        for hook in registered.values()
    )


def _collects(hook: Any, collected: Mapping[str, Any]) -> bool:
    """Whether a hook of transformers collects what is asked for, if that can be told."""
    found = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
    return "key" not in found or found["key"].cell_contents in collected


def has_other_hooks(module: nn.Module) -> bool:
    """Whether a call of a module calls hooks, but for those that gather and free its parameters."""
    return any(not moves_parameters_alone(hook) for hooks in _called(module) for hook in hooks.values())


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of a module calls any hooks."""
    return any(_called(module))


def _called(module: nn.Module) -> Iterable[dict[int, Any]]:
    """The hooks that a call of a module calls, by number: its own, and those of all modules."""
    backward = (module._backward_hooks, module._backward_pre_hooks)
    everywhere = (*GLOBAL_HOOKS, nn_module._global_backward_hooks, nn_module._global_backward_pre_hooks)
    return (*hooks_of(module), *backward, *everywhere)


def has_its_forward(module: nn.Module) -> bool:
    """Whether an instance has no forward of its own, as hooks of accelerate give it."""
    own = vars(module).get("forward")
    return own is None or is_own(module, own)


def check_no_other_forward(module: nn.Module) -> None:
    """Raise `NotUnderstoodError` unless an instance `has_its_forward`."""
    if not has_its_forward(module):
        raise NotUnderstoodError(f"{name_of(module)} has another forward")


def check_parameter(parameter: object, name: str) -> None:
    """Raise `NotUnderstoodError` unless it is a plain tensor of numbers with memory of its own."""
    if type(parameter) is not nn.Parameter or parameter.layout != torch.strided or parameter.is_meta:
        raise NotUnderstoodError(f"{name} is {type(parameter).__name__}, no plain parameter")
    if parameter.dtype not in DTYPES:
        raise NotUnderstoodError(f"{name} is {parameter.dtype}")
    if parameter.is_inference():
        raise NotUnderstoodError(f"{name} was made in inference mode, where torch does not count changes")


def norm_of(module: Any) -> Norm:
    """A norm of a module that is torch's layer norm or has the code of an RMS norm that is known."""
    if type(module) is nn.LayerNorm:
        if module.weight is None or module.bias is None or len(module.normalized_shape) != 1:
            raise NotUnderstoodError("LayerNorm without weight or bias, or over several dimensions")
        rms, eps, offset = False, module.eps, 0.0
    elif has_code(module, *RMS_NORMS):
        rms, eps, offset = True, float(module.variance_epsilon), 0.0
    elif _is_gemmas(module):
        rms, eps, offset = True, float(module.eps), 1.0
    else:
        raise NotUnderstoodError(f"{name_of(module)} is no norm that is known")
    check_own_code(module)
    for name in _names(rms):
        check_parameter(module._parameters.get(name), f"{name_of(module)}.{name}")
    return Norm(module._parameters, module.weight.numel(), eps, rms, offset)


def _is_gemmas(module: Any) -> bool:
    """Whether it has the code of Gemma's RMS norm, which calls a method of its own."""
    kind = type(module)
    return (
        same_code(kind.forward, GemmaRMSNorm.forward)
        and same_code(kind._norm, GemmaRMSNorm._norm)
        and "_norm" not in vars(module)
    )


def activation_of(module: nn.Module, *, hooks: bool = False) -> Activation:
    """An activation of ours that is a module's; with `hooks`, it may have some."""
    activation = ACTIVATIONS.get(type(module))
    if activation is None:
        raise NotUnderstoodError(f"{name_of(module)} is no activation that is known")
    (check_no_other_forward if hooks else check_only_its_class)(module)
    check_as_written(module)
    check_activation(module)
    return activation


def check_activation(module: nn.Module) -> None:
    """Raise `NotUnderstoodError` if an activation calls another function than its class gives its instances."""
    kind = type(module)
    act: Any = vars(module).get("act")
    gelu = _TORCHS[_FUNCTIONS.index("gelu")]
    if kind is activations.GELUTanh:
        partial = isinstance(act, functools.partial) and act.func is gelu and not act.args
        known = act.keywords == {"approximate": "tanh"} if partial else _is_method(act, module, "_gelu_tanh_python")
    elif kind is activations.GELUActivation:
        known = act is gelu or _is_method(act, module, "_gelu_python")
    else:
        return
    if not known:
        raise NotUnderstoodError(f"{name_of(module)} calls another function than its class gives it")


def _is_method(function: Any, module: nn.Module, name: str) -> bool:
    """Whether a function is a method of the module's, as its class has it."""
    kind = type(module)
    return (
        isinstance(function, types.MethodType)
        and function.__self__ is module
        and _is_as_written(function.__func__, kind.__module__, f"{kind.__qualname__}.{name}")
    )


# ---------------------------------------------------------------------- code
@functools.cache
def same_code(function: Callable[..., Any] | None, known: Callable[..., Any]) -> bool:
    """Whether two functions do the same by having the same bytecode, and calling functions that do.

    transformers writes a family's layers anew into its file, so that many families have LLaMA's by other names. Which
    attention is called does not matter: that is what the registry decides.
    """
    if function is None:
        return False
    function, known = as_written(function), as_written(known)
    if function is known:
        return True
    if not isinstance(function, types.FunctionType) or not isinstance(known, types.FunctionType):
        return False
    one, other = function.__code__, known.__code__
    inner, known_inner = getattr(function, "__wrapped__", None), getattr(known, "__wrapped__", None)
    if one is other and inner is not None and known_inner is not None:
        return same_code(inner, known_inner)  # transformers wraps the forward of all models alike
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


def as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function without transformers' own wrappers."""
    while any(getattr(function, "__code__", None) is each for each in _WRAPPERS):
        function = function.__wrapped__  # type: ignore[attr-defined]  # functools.wraps has set it
    return function


def _shape_of(code: types.CodeType) -> tuple[Any, ...]:
    return code.co_code, code.co_names, code.co_varnames, code.co_argcount, code.co_kwonlyargcount, code.co_flags & 0xFF


def _constants(function: types.FunctionType) -> tuple[Any, ...]:
    """Those that the code uses: a docstring, which transformers' decorators also change, is none of them."""
    return tuple(each.argval for each in dis.get_instructions(function) if each.opcode in dis.hasconst)


def has_code(module: nn.Module, *known: type[nn.Module]) -> bool:
    """Whether the class of a module has the code of one of these."""
    own = getattr(type(module), "forward", None)  # a module of TorchScript has none
    return any(same_code(own, kind.forward) for kind in known)


def check_code(module: nn.Module, *known: type[nn.Module]) -> None:
    """Raise `NotUnderstoodError` unless the module runs the code of one of these classes."""
    if not has_code(module, *known):
        raise NotUnderstoodError(f"the code of {name_of(module)} is not known")
    check_own_code(module)
