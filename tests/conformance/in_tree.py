"""DeepSpeed's own accelerators as targets: ``sdk conformance in_tree:CPU``, with this folder on PYTHONPATH.

NPU, MLU, SDAA and SUPA run as they are on the simulated device, which takes the name of theirs: their code then meets
a torch device module as the vendors' extensions have it. MPS and XPU are constructed without their hardware, and can
tell only what they know without it.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from ds_plugin_sdk import simulator

# DeepSpeed is to be itself: no plugin is chosen when it is imported.
os.environ.update(DS_ACCELERATOR="cpu", DS_PLUGIN_AUTOLOAD="0")

# What the vendors' modules have of torch.cuda's older names, beyond what the simulated device has.
_OLDER = {
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
    "reset_max_memory_cached": "reset_peak_memory_stats",
    "reset_max_memory_reserved": "reset_peak_memory_stats",
}


def _class(name: str) -> Any:
    module = importlib.import_module(f"deepspeed.accelerator.{name.lower()}_accelerator")
    return getattr(module, f"{name}_Accelerator")


def _simulated(name: str, collectives: str) -> Any:
    """The accelerator on a simulated device of its name."""
    module = simulator.install(name.lower(), devices=2, memory_mb=4096, collectives=collectives)
    for old, new in _OLDER.items():
        setattr(module, old, getattr(module, new))
    module.random = importlib.import_module("torch.random")
    # As `import torch_npu` does: the accelerators import torch.npu.
    sys.modules[f"torch.{name.lower()}"] = module
    return _class(name)()


def CPU() -> Any:
    return _class("CPU")()


def MPS() -> Any:
    return _class("MPS")()


def XPU() -> Any:
    return _class("XPU")()


def NPU() -> Any:
    return _simulated("NPU", "hccl")


def MLU() -> Any:
    return _simulated("MLU", "cncl")


def SDAA() -> Any:
    return _simulated("SDAA", "tccl")


def SUPA() -> Any:
    return _simulated("SUPA", "bccl")
