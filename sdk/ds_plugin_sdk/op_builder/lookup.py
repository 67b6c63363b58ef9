"""From DeepSpeed's builder name to the builder class: the plugin's own, the SDK's host builder, a reference, a stub."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ds_plugin_sdk.op_builder import families
from ds_plugin_sdk.op_builder.builder import NotImplementedBuilder, OpBuilder, ReferenceOpBuilder
from ds_plugin_sdk.op_builder.combined import COMBINED, CombinedOpBuilder

# The package of builders that work on host tensors whatever the accelerator is.
HOST_BUILDERS = "ds_plugin_sdk.op_builder.cpu"

# Collectives that DeepSpeed builds inside init_distributed if they are offered; absent is an answer.
OPTIONAL_BUILDERS = frozenset({"ShareMemCommBuilder", "CCLCommBuilder"})

# Names whose op name does not follow from the class name.
_OP_NAMES = {
    "AsyncIOBuilder": "async_io",
    "CCLCommBuilder": "deepspeed_ccl_comm",
    "FlashAttentionBuilder": "flash_attn",
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

Lender = Callable[[str, str], "type[Any] | None"]
_lenders: list[Lender] = []


def use_package(device_type: str, package: str | None) -> None:
    """Say which package builds ops for a device: that of its accelerator."""
    _packages[device_type] = package


def borrow_from(lender: Lender) -> None:
    """Let a host lend builders, ``lender(class_name, device_type)``, for what neither plugin nor SDK has."""
    if lender not in _lenders:
        _lenders.append(lender)


def find(class_name: str, package: str | None, device_type: str) -> type[Any]:
    """The builder class of a name such as ``FusedAdamBuilder``.

    A plugin's own builder comes first, then the SDK's for host tensors, then an op that is made of several families,
    then the reference, then what a host lends; the last is a class whose ``load()`` raises `OpNotImplementedError`.
    """
    own = None if package is None else _builders_of(package).get(class_name)
    if own is not None:
        return own
    host = _builders_of(HOST_BUILDERS).get(class_name)
    if host is not None and (device_type == "cpu" or class_name.startswith("CPU")):
        return host
    name = op_name(class_name)
    if name in COMBINED:
        return _derived(CombinedOpBuilder, class_name, name, device_type)
    if families.of(name) is not None:
        return _derived(ReferenceOpBuilder, class_name, name)
    lent = (lender(class_name, device_type) for lender in _lenders)
    return next(filter(None, lent), None) or _derived(NotImplementedBuilder, class_name, name)


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
    for class_name, builder in builders(_packages.get(device_type), device_type).items():
        on_host = class_name.startswith("CPU")  # DeepSpeed's name for an op on host tensors beside a device's own
        if families.of(builder.NAME) == family and (device_type == "cpu" or not on_host):
            builder().load(verbose=False)
            return


def is_base(class_name: str, package: str | None) -> bool:
    """Whether a name is that of a class which builders derive from, rather than of an op's builder."""
    classes = [_classes_of(folder).get(class_name) for folder in (package, HOST_BUILDERS) if folder is not None]
    return any(cls is not None and not cls.NAME for cls in classes)


def _builders_of(package: str) -> dict[str, type[Any]]:
    """The builder classes that the modules of a package define, by name."""
    return {name: cls for name, cls in _classes_of(package).items() if cls.NAME}


@functools.cache
def _classes_of(package: str) -> dict[str, type[Any]]:
    """The builder classes in the modules of a package, with those that they derive from."""
    return {
        name: value
        for module in _modules_of(package)
        for name, value in vars(module).items()
        if name.endswith("Builder") and isinstance(value, type) and hasattr(value, "NAME")
    }


def _modules_of(package: str) -> Iterator[ModuleType]:
    """A package and its modules. One that cannot be imported costs its own ops and no others."""
    for name in _names_of(package):
        try:
            yield importlib.import_module(name)
        except Exception as error:
            warnings.warn(
                f"ds-plugin-sdk: the builders in {name} are skipped (plugin '{package.partition('.')[0]}'): "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )


def _names_of(package: str) -> Iterator[str]:
    yield package
    module = sys.modules.get(package)
    for info in pkgutil.iter_modules(getattr(module, "__path__", [])):
        yield f"{package}.{info.name}"


@functools.cache
def _derived(base: type[OpBuilder], class_name: str, name: str, device_type: str = "") -> type[OpBuilder]:
    members = {"NAME": name, "DEVICE_TYPE": device_type, "__module__": base.__module__, "__doc__": base.__doc__}
    return type(class_name, (base,), members)
