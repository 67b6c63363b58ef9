"""A simulated device: a torch device of any name on host memory that behaves like hardware.

    from ds_plugin_sdk import simulator

    simulator.install("zap", devices=2)
    x = torch.ones(3, device="zap:1")

Its memory is out of the host's reach, its streams run later and side by side, its devices share nothing; so what would
fail on hardware fails here. A vendor replaces the runtime below it (``csrc/runtime.h``) by calls into their driver and
keeps the rest: ``install("zap", runtime=ZapRuntime())``.

Importing this package does not import torch.
"""

from ds_plugin_sdk.simulator.build import RuntimeBuilder, include_dir, runtime_dir
from ds_plugin_sdk.simulator.install import delay, fallback_counts, install, installed_name, reset_fallback_counts

__all__ = [
    "RuntimeBuilder",
    "delay",
    "fallback_counts",
    "include_dir",
    "install",
    "installed_name",
    "reset_fallback_counts",
    "runtime_dir",
]
