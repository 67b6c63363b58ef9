"""A torch device for hardware that torch does not know: torch's PrivateUse1 backend over one small device runtime.

    from ds_plugin_sdk import privateuse1

    privateuse1.install("zap", runtime=DeviceRuntime())
    x = torch.ones(3, device="zap:1")

The backend is here: allocators, guard, hooks, generators, the ops that make, view and copy tensors, the CPU fallback
for all other ops, autocast, ``torch.zap``, collectives. What it asks of the device are the functions of
``csrc/runtime.h``. A vendor implements them with their driver; `ds_plugin_sdk.simulator` implements them on host
memory.

Importing this package does not import torch.
"""

from ds_plugin_sdk.privateuse1.build import BackendBuilder, RuntimeBuilder, include_dir
from ds_plugin_sdk.privateuse1.install import (
    fallback_counts,
    install,
    installed_builders,
    installed_name,
    reset_fallback_counts,
    runtime_library,
)

__all__ = [
    "BackendBuilder",
    "RuntimeBuilder",
    "fallback_counts",
    "include_dir",
    "install",
    "installed_builders",
    "installed_name",
    "reset_fallback_counts",
    "runtime_library",
]
