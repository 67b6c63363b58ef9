"""DeepSpeed's own builders for what the SDK does not have, so that installing a plugin removes no op.

They work on host memory alone, so they are used for the device cpu only.
"""

from __future__ import annotations

import importlib
from typing import Any

from ds_plugin_sdk.op_builder import op_table


def find(class_name: str, device_type: str) -> type[Any] | None:
    """DeepSpeed's builder class of a name for a device, or None."""
    if device_type not in op_table.by_builder(class_name).deepspeeds_own_on:
        return None
    return getattr(importlib.import_module("deepspeed.ops.op_builder.cpu"), class_name, None)
