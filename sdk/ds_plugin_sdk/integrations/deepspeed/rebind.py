"""Lets everything that DeepSpeed froze when it was imported follow a change of the accelerator.

DeepSpeed asks for the accelerator at every use, with these exceptions, all made while its modules execute:

    builder classes     `deepspeed.ops.op_builder` holds the class of every op, and modules hold copies of those names
    bound methods       globals such as ``torch_memory_reserved = get_accelerator().memory_reserved``
    default arguments   ``def compile(self, backend=get_accelerator().get_compile_backend(), ...)``
    loaded ops          globals and class attributes that keep what ``SomeBuilder().load()`` gave
    op tables           `all_ops.ALL_OPS` and `ops.__compatible_ops__`

The first, second and last are found by walking DeepSpeed's loaded modules, so new ones are found too. Default arguments
and loaded ops do not show where they came from; they are listed here, and a test compares the lists with the source of
the installed DeepSpeed. Modules that are imported later read the new values by themselves.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import MethodType, ModuleType
from typing import Any

_BUILDERS = "deepspeed.ops.op_builder"

# Base classes among the builder names, which build no op.
_BASES = frozenset({"OpBuilder", "CUDAOpBuilder"})

# DeepSpeed takes these two from its own tree whatever the accelerator is, and so they stay.
_NEVER_THE_ACCELERATORS = frozenset(
    {("deepspeed.ops.pin_memory", "PinMemoryBuilder"), ("deepspeed.compile.util", "DeepCompileBuilder")}
)

# (module, function, parameter, method of the accelerator that gives the default)
DEFAULTS = (
    ("deepspeed.inference.engine", "InferenceEngine.compile", "backend", "get_compile_backend"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine.compile", "backend", "get_compile_backend"),
    ("deepspeed.runtime.utils", "PartitionedTensor.from_meta", "device", "device_name"),
)

# (module, name): None there means "not loaded yet".
LOADED_OPS = (
    ("deepspeed.inference.quantization.utils", "quantizer_module"),
    ("deepspeed.ops.deepspeed4science.evoformer_attn", "kernel_"),
    ("deepspeed.ops.fp_quantizer.quantize", "fp_quant_module"),
    ("deepspeed.ops.random_ltd.dropping_utils", "random_ltd_module"),
    ("deepspeed.ops.transformer.inference.bias_add", "spatial_cuda_module"),
    ("deepspeed.ops.transformer.inference.op_binding.base", "BaseOp.inference_module"),
    ("deepspeed.ops.transformer.transformer", "stochastic_transformer_cuda_module"),
    ("deepspeed.ops.transformer.transformer", "transformer_cuda_module"),
    ("deepspeed.runtime.comm.coalesced_collectives", "quantizer_module"),
    ("deepspeed.runtime.zero.partition_parameters", "CUDAQuantizer.quantizer_cuda_module"),
)


def rebind(old: Any, new: Any) -> None:
    """Point whatever DeepSpeed froze from `old` to `new`, which DeepSpeed's ``get_accelerator()`` gives already.

    Args:
        old: the accelerator until now, or None.
        new: the accelerator from now on; a plugin's or one of DeepSpeed's own.
    """
    _builder_classes(new)
    _bound_methods(old, new)
    _default_arguments(new)
    _forget_loaded_ops()
    _op_tables()


def replace(before: object, after: object) -> None:
    """Replace a value wherever a loaded module of DeepSpeed holds it as a global."""
    for module in _loaded():
        for name, value in list(vars(module).items()):
            if value is before:
                setattr(module, name, after)


def builder_names() -> list[str]:
    """Names of the builders that the installed DeepSpeed knows; empty until it is imported."""
    package = sys.modules.get(_BUILDERS)
    names = () if package is None else vars(package)
    return [name for name in names if name.endswith("Builder") and name not in _BASES]


def _loaded() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "deepspeed" and isinstance(module, ModuleType):
            yield module


def _builder_classes(new: Any) -> None:
    frozen = {name: getattr(sys.modules[_BUILDERS], name) for name in builder_names()}
    for module in _loaded():
        if module.__name__.startswith(_BUILDERS + "."):
            continue  # these define DeepSpeed's own builders
        for name in frozen.keys() & vars(module).keys():
            if vars(module)[name] is frozen[name] and (module.__name__, name) not in _NEVER_THE_ACCELERATORS:
                setattr(module, name, new.get_op_builder(name))


def _bound_methods(old: Any, new: Any) -> None:
    for module in _loaded():
        for name, value in list(vars(module).items()):
            if isinstance(value, MethodType) and old is not None and value.__self__ is old:
                setattr(module, name, getattr(new, value.__name__))


def _default_arguments(new: Any) -> None:
    for module, path, parameter, method in DEFAULTS:
        function = _reach(module, path)
        if function is not None:
            _set_default(inspect.unwrap(function), parameter, getattr(new, method)())


def _set_default(function: Any, parameter: str, value: object) -> None:
    function = getattr(function, "__func__", function)
    names = [
        name
        for name, given in inspect.signature(function).parameters.items()
        if given.default is not given.empty and given.kind is given.POSITIONAL_OR_KEYWORD
    ]
    function.__defaults__ = tuple(
        value if name == parameter else default for name, default in zip(names, function.__defaults__, strict=True)
    )


def _forget_loaded_ops() -> None:
    for module, path in LOADED_OPS:
        if _reach(module, path) is not None:
            owner, _, name = path.rpartition(".")
            setattr(_reach(module, owner), name, None)


def _op_tables() -> None:
    ops, all_ops = sys.modules.get("deepspeed.ops"), sys.modules.get(_BUILDERS + ".all_ops")
    if all_ops is not None:
        before = all_ops.ALL_OPS
        importlib.reload(all_ops)
        replace(before, all_ops.ALL_OPS)
    if ops is not None and "__compatible_ops__" in vars(ops):
        if "__getattr__" in vars(ops):
            del ops.__compatible_ops__  # computed again at its next use
        elif all_ops is not None:  # before 0.19: computed once, at import
            compatible = {name: builder.is_compatible() for name, builder in all_ops.ALL_OPS.items()}
            replace(ops.__compatible_ops__, {**compatible, "deepspeed_not_implemented": False})


def _reach(module: str, path: str) -> Any:
    """A dotted name in a loaded module; None where this DeepSpeed has no such name or has not loaded the module."""
    value: Any = sys.modules.get(module)
    for name in filter(None, path.split(".")):
        value = inspect.getattr_static(value, name, None)
    return value
