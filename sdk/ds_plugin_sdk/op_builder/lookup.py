"""From DeepSpeed's builder name to the builder class: the plugin's own, the SDK's host builder, a reference, a stub."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from types import ModuleType
from typing import Any

from ds_plugin_sdk.op_builder import families
from ds_plugin_sdk.op_builder.builder import NotImplementedBuilder, OpBuilder, ReferenceOpBuilder

# The package of builders that work on host tensors whatever the accelerator is.
HOST_BUILDERS = "ds_plugin_sdk.op_builder.host"

# Collectives that DeepSpeed builds inside init_distributed if they are offered; absent is an answer.
OPTIONAL_BUILDERS = frozenset({"ShareMemCommBuilder", "CCLCommBuilder"})

# Names whose op name does not follow from the class name.
_OP_NAMES = {
    "AsyncIOBuilder": "async_io",
    "CCLCommBuilder": "deepspeed_ccl_comm",
    "GDSBuilder": "gds",
    "InferenceBuilder": "transformer_inference",
    "InferenceCoreBuilder": "inference_core_ops",
    "InferenceCutlassBuilder": "cutlass_ops",
    "RaggedOpsBuilder": "ragged_device_ops",
    "RaggedUtilsBuilder": "ragged_ops",
    "RandomLTDBuilder": "random_ltd",
    "ShareMemCommBuilder": "deepspeed_shm_comm",
    "DeepCompileBuilder": "dc",
    "NotImplementedBuilder": "deepspeed_not_implemented",
}

_packages: dict[str, str | None] = {}


def use_package(device_type: str, package: str | None) -> None:
    """Say which package builds ops for a device: that of its accelerator."""
    _packages[device_type] = package


def find(class_name: str, package: str | None, device_type: str) -> type[Any]:
    """The builder class of a name such as ``FusedAdamBuilder``.

    A plugin's own builder comes first, then the SDK's for host tensors, then the reference; the last is a class whose
    ``load()`` raises `OpNotImplementedError`.
    """
    own = None if package is None else _builders_of(package).get(class_name)
    if own is not None:
        return own
    host = _builders_of(HOST_BUILDERS).get(class_name)
    if host is not None and (device_type == "cpu" or class_name.startswith("CPU")):
        return host
    name = op_name(class_name)
    base = ReferenceOpBuilder if families.of(name) is not None else NotImplementedBuilder
    return _derived(base, class_name, name)


def op_name(class_name: str) -> str:
    """DeepSpeed's op name for a builder's class name: ``FusedAdamBuilder`` -> ``fused_adam``."""
    stem = class_name.removesuffix("Builder")
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", stem).lower()
    return _OP_NAMES.get(class_name, words)


def builders(package: str | None, device_type: str) -> dict[str, type[Any]]:
    """All builders a device has, by class name: the plugin's own and the SDK's."""
    names = {*_builders_of(HOST_BUILDERS), *(_builders_of(package) if package is not None else ())}
    return {name: find(name, package, device_type) for name in sorted(names)}


def load_kernels(family: str, device_type: str) -> None:
    """Have the native kernels of an op family for a device, or its reference with one warning.

    Args:
        family: module of `ds_plugin_sdk.ops`, such as ``adam``.
        device_type: torch device type of the tensors.
    """
    package = _packages.get(device_type)
    for builder in builders(package, device_type).values():
        if families.of(builder.NAME) == family:
            builder().load(verbose=False)
            return


@functools.cache
def _builders_of(package: str) -> dict[str, type[Any]]:
    """The builder classes that the modules of a package define."""
    found: dict[str, type[Any]] = {}
    for module in _modules_of(importlib.import_module(package)):
        for name, value in vars(module).items():
            if name.endswith("Builder") and isinstance(value, type) and vars(value).get("NAME"):
                found[name] = value
    return found


def _modules_of(package: ModuleType) -> list[ModuleType]:
    names = [info.name for info in pkgutil.iter_modules(getattr(package, "__path__", []))]
    return [package, *(importlib.import_module(f"{package.__name__}.{name}") for name in names)]


@functools.cache
def _derived(base: type[OpBuilder], class_name: str, name: str) -> type[OpBuilder]:
    return type(class_name, (base,), {"NAME": name, "__module__": base.__module__, "__doc__": base.__doc__})
