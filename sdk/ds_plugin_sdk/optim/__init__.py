"""Optimizers on the SDK's ops, for use with or without DeepSpeed.

They are drop-in for their namesakes in `torch.optim`: one call of a native kernel updates all parameters of a group.
Kernels are found or compiled at the first step; without any, the reference in plain torch serves every device.
"""

from __future__ import annotations

from ds_plugin_sdk.optim.adagrad import FusedAdagrad
from ds_plugin_sdk.optim.adam import FusedAdam
from ds_plugin_sdk.optim.lamb import FusedLamb
from ds_plugin_sdk.optim.lion import FusedLion

__all__ = ["FusedAdagrad", "FusedAdam", "FusedLamb", "FusedLion"]
