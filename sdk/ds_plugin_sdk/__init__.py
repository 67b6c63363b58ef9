"""ds-plugin-sdk: bring DeepSpeed to new hardware out of tree.

    from ds_plugin_sdk import Plugin, Probe            # what a vendor's package states
    from ds_plugin_sdk import TorchAccelerator         # what a vendor's accelerator derives from
    from ds_plugin_sdk import get_accelerator          # what a user asks, with or without DeepSpeed

Importing this package imports neither torch nor DeepSpeed nor any plugin; names are resolved at first use. It installs
the hook by which DeepSpeed finds plugins, so that ``import ds_plugin_sdk`` before ``import deepspeed`` serves where
torch's autoload of device backends is switched off.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ds_plugin_sdk.integrations.deepspeed import import_hook as _import_hook

if TYPE_CHECKING:
    from ds_plugin_sdk.accelerator import DeepSpeedAccelerator as DeepSpeedAccelerator
    from ds_plugin_sdk.op_builder import CppOpBuilder as CppOpBuilder
    from ds_plugin_sdk.op_builder import CUDAOpBuilder as CUDAOpBuilder
    from ds_plugin_sdk.op_builder import OpBuilder as OpBuilder
    from ds_plugin_sdk.op_builder import SYCLOpBuilder as SYCLOpBuilder
    from ds_plugin_sdk.ported_accelerator import PortedAccelerator as PortedAccelerator
    from ds_plugin_sdk.registry import Plugin as Plugin
    from ds_plugin_sdk.registry import Probe as Probe
    from ds_plugin_sdk.registry import get_accelerator as get_accelerator
    from ds_plugin_sdk.registry import set_accelerator as set_accelerator
    from ds_plugin_sdk.torch_accelerator import TorchAccelerator as TorchAccelerator

__version__ = "0.1.0"

# The interface that plugins are written against: (major, minor). A plugin states the one it needs.
SDK_API = (1, 0)

_HOMES = {
    "CUDAOpBuilder": "op_builder",
    "CppOpBuilder": "op_builder",
    "DeepSpeedAccelerator": "accelerator",
    "OpBuilder": "op_builder",
    "Plugin": "registry",
    "PortedAccelerator": "ported_accelerator",
    "Probe": "registry",
    "SYCLOpBuilder": "op_builder",
    "TorchAccelerator": "torch_accelerator",
    "get_accelerator": "registry",
    "set_accelerator": "registry",
}

__all__ = [
    "SDK_API",
    "CUDAOpBuilder",
    "CppOpBuilder",
    "DeepSpeedAccelerator",
    "OpBuilder",
    "Plugin",
    "PortedAccelerator",
    "Probe",
    "SYCLOpBuilder",
    "TorchAccelerator",
    "__version__",
    "get_accelerator",
    "set_accelerator",
]


def __getattr__(name: str) -> Any:
    module = _HOMES.get(name)
    if module is None:
        raise AttributeError(f"module 'ds_plugin_sdk' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"ds_plugin_sdk.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


_import_hook.install()
