"""From DeepSpeed's builder name to the builder class: the plugin's own, the SDK's for CPU tensors, the reference
implementation, DeepSpeed's own where that is better, or a class whose ``load()`` raises.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import warnings
from collections.abc import Callable, Container, Iterator
from types import ModuleType
from typing import Any, cast

from ds_plugin_sdk.op_builder import op_table
from ds_plugin_sdk.op_builder.builder import OpBuilder, derived, made, without_kernels
from ds_plugin_sdk.op_builder.op_table import Op
from ds_plugin_sdk.op_builder.sourceless import (
    CombinedOpBuilder,
    LentOpBuilder,
    NotImplementedBuilder,
    ReferenceOpBuilder,
)

# The package of builders that work on CPU tensors whatever the accelerator is.
CPU_BUILDERS = "ds_plugin_sdk.op_builder.cpu"

_packages: dict[str, str | None] = {}
_skipped: dict[str, str] = {}  # modules of builders that could not be imported, and why

BuilderSource = Callable[[str, str], "type[Any] | None"]
_sources: list[BuilderSource] = []


def use_package(device_type: str, package: str | None) -> None:
    """Say which package builds ops for a device: that of its accelerator."""
    from ds_plugin_sdk.ops import _first_call  # imports torch

    if _packages.get(device_type) != package:
        _packages[device_type] = package
        _first_call.ask_again(device_type)


def add_builder_source(source: BuilderSource) -> None:
    """Add builders of ops that neither plugin nor SDK has native code for.

    Args:
        source: ``source(class_name, device_type)``, a builder class or None. It must not ask the device for anything.
    """
    if source not in _sources:
        _sources.append(source)


def find(class_name: str, package: str | None, device_type: str) -> type[Any]:
    """The builder class of a name such as ``FusedAdamBuilder``.

    A plugin's own builder comes first, then the SDK's for CPU tensors. What yields, what the SDK has as a reference
    implementation alone, and what it does not have, comes from `add_builder_source` where that is compatible with the
    machine. The last is a class whose ``load()`` raises `OpNotImplementedError`.
    """
    op = op_table.by_builder(class_name)
    ours = _ours(op, package, device_type)
    if ours is not None and is_native(ours) and not getattr(ours, "YIELDS", False):
        return ours
    lent: Any = next(filter(None, (source(class_name, device_type) for source in _sources)), None)
    if lent is None:
        return ours or _derived(NotImplementedBuilder, op)
    return _lent(op, lent, cast(Any, ours)) if ours is not None else cast("type[Any]", lent)


def _ours(op: Op, package: str | None, device_type: str) -> type[Any] | None:
    """The plugin's own builder, the SDK's for CPU tensors, or the reference implementation; None without any."""
    own = None if package is None else builders_in(package).get(op.builder)
    if own is not None:
        return own
    if op.host or (op.kernels and (device_type == "cpu" or op.cpu_only)):
        own = builders_in(CPU_BUILDERS).get(op.builder)
        if own is not None:  # a program that is frozen may lack it
            return own
    if not op.families:
        return None
    return _combined(op, package, device_type) if op.family is None else _derived(ReferenceOpBuilder, op)


def builders(package: str | None, device_type: str) -> dict[str, type[Any]]:
    """The builders of all ops that a device has, by class name: the plugin's own and the SDK's."""
    implemented = (op.builder for op in op_table.OPS if op.families)
    names = {*implemented, *(builders_in(package) if package is not None else ())}
    return {name: find(name, package, device_type) for name in sorted(names)}


def load_family(family: str, device_type: str) -> None:
    """Have the native kernels of an op family for a device, or its reference implementation with one warning.

    Args:
        family: module of `ds_plugin_sdk.ops`, such as ``adam``.
        device_type: torch device type of the tensors.

    Raises:
        BuildError: the builder cannot be made, or `DS_PLUGIN_FALLBACK=0` and there are no native kernels.
    """
    from ds_plugin_sdk.ops import _first_call  # imports torch

    builder = made(_builder_of(family, _packages.get(device_type), device_type))
    builder.load(verbose=False)
    native = isinstance(builder, OpBuilder) and is_native(type(builder))
    if native and _first_call.has_kernels(family, device_type) is False:
        without_kernels(builder, device_type)


def has_native_family(family: str, device_type: str) -> bool:
    """Whether `load_family` would load native kernels; as far as one can tell without loading them."""
    return is_native(_builder_of(family, _packages.get(device_type), device_type))


def _name_problem(builder: type[Any], beside: Container[str]) -> str | None:
    """Why nobody will find a builder's kernels, or None: its ``NAME`` is no op's, or another op's than the class's; or
    the class has an op's name without one, or no op's with one, and none of the classes `beside` it has.
    """
    sdks = builder.__module__.startswith("ds_plugin_sdk.")
    if getattr(builder, "KIND", "python_module") != "torch_library" or sdks or getattr(builder, "OWN", False):
        return None
    asked = op_table.by_builder(builder.__name__)
    is_ops = op_table.by_name(asked.name) is not None
    if not builder.NAME:
        return f"it has no NAME, so it is taken for a base class; the op's is {asked.name!r}" if is_ops else None
    named = op_table.by_name(builder.NAME)
    if named is None:
        known = ", ".join(sorted(op.name for op in op_table.OPS if op.families))
        return (
            f"NAME is {builder.NAME!r}, which is no op's, so nobody asks for its kernels: one of the plugin's own says "
            f"OWN = True; ops are {known}"
        )
    if asked.name == builder.NAME or (not is_ops and (named.builder in beside or not named.deepspeed)):
        return None
    if is_ops:
        return f"NAME is {builder.NAME!r}, and the op of {builder.__name__} is {asked.name!r}"
    return f"NAME is {builder.NAME!r}, and DeepSpeed asks for that op by the class name {named.builder}"


def is_base(class_name: str, package: str | None) -> bool:
    """Whether a name is that of a class which builders derive from, rather than of an op's builder."""
    classes = [_classes_in(folder).get(class_name) for folder in (package, CPU_BUILDERS) if folder is not None]
    return any(cls is not None and not cls.NAME for cls in classes)


def is_native(builder: type[Any]) -> bool:
    """Whether there is native code for the whole of an op: the device's own, or torch's."""
    if issubclass(builder, LentOpBuilder):
        builder = builder.OURS
    parts = builder.PARTS if issubclass(builder, CombinedOpBuilder) else (builder,)
    op = op_table.by_name(builder.NAME)
    return (op is not None and op.torch) or not any(issubclass(part, ReferenceOpBuilder) for part in parts)


def _builder_of(family: str, package: str | None, device_type: str) -> type[Any]:
    """The builder whose library has a family's kernels for a device."""
    if package is not None:
        for name, builder in sorted(builders_in(package).items()):
            for_cpu = name.startswith("CPU")  # an op on CPU tensors beside a device's own
            if op_table.family_of(builder.NAME) == family and (device_type == "cpu" or not for_cpu):
                return builder
    ops = [op for op in op_table.OPS if op.family == family and (device_type == "cpu" or not op.cpu_only)]
    return _ours(ops[0], package, device_type) or _derived(NotImplementedBuilder, ops[0])


def problems_in(package: str) -> dict[str, str | None]:
    """What is wrong with the names of the builder classes of a package, by class, or None; and why modules of it cannot
    be imported, by module.
    """
    classes = _classes_in(package)
    problems = {name: _name_problem(cls, classes) for name, cls in classes.items()}
    named = {name: problem for name, problem in problems.items() if problem or classes[name].NAME}
    return named | {name: why for name, why in _skipped.items() if f"{name}.".startswith(f"{package}.")}


def builders_in(package: str) -> dict[str, type[Any]]:
    """The builder classes of ops that the modules of a package define, by name."""
    return {name: cls for name, cls in _classes_in(package).items() if cls.NAME}


@functools.cache
def _classes_in(package: str) -> dict[str, type[Any]]:
    """The builder classes in the modules of a package, with those that they derive from. A wrong name is warned of."""
    classes = _found_in(package)
    for cls in classes.values():
        problem = _name_problem(cls, classes)
        if problem is not None:
            text = f"ds-plugin-sdk: builder {cls.__module__}.{cls.__name__}: {problem}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
    return classes


def _found_in(package: str) -> dict[str, type[Any]]:
    return {
        name: value
        for module in _modules_of(package)
        for name, value in vars(module).items()
        if name.endswith("Builder") and isinstance(value, type) and hasattr(value, "NAME")
    }


def _modules_of(package: str) -> Iterator[ModuleType]:
    """A package and all modules below it. Of one that cannot be imported only its own ops are missing."""
    try:
        module = importlib.import_module(package)
    except Exception as error:
        _skipped[package] = f"{type(error).__name__}: {error}"
        warnings.warn(
            f"ds-plugin-sdk: the builders in {package} are skipped (package '{package.partition('.')[0]}'): "
            f"{_skipped[package]}\n  -> `python -c 'import {package}'` shows where; see op_builders of the accelerator",
            RuntimeWarning,
            stacklevel=2,
        )
        return
    yield module
    for info in pkgutil.iter_modules(getattr(module, "__path__", [])):
        yield from _modules_of(f"{package}.{info.name}")


@functools.cache
def _derived(base: type[OpBuilder], op: Op) -> type[OpBuilder]:
    return derived(base, op)


@functools.cache
def _combined(op: Op, package: str | None, device_type: str) -> type[OpBuilder]:
    parts = tuple(_builder_of(family, package, device_type) for family in op.families)
    members = {"NAME": op.name, "PARTS": parts, "__module__": __name__, "__doc__": CombinedOpBuilder.__doc__}
    return type(op.builder, (CombinedOpBuilder,), members)


@functools.cache
def _lent(op: Op, lent: Any, ours: Any) -> type[OpBuilder]:
    members = {"NAME": op.name, "LENT": lent, "OURS": ours, "__module__": __name__, "__doc__": LentOpBuilder.__doc__}
    return type(op.builder, (LentOpBuilder,), members)
