"""Whether torch calls the SDK at the end of its import: by that DeepSpeed finds plugins, whatever a script imports."""

from __future__ import annotations

from importlib.metadata import entry_points

import torch

WHERE_NOT = "`import ds_plugin_sdk` before `import deepspeed` there"


def why_not_called() -> str:
    """Why torch does not call it; empty if it does."""
    if not torch._is_device_backend_autoload_enabled():  # type: ignore[no-untyped-call, unused-ignore]  # typed in later releases
        return "TORCH_DEVICE_BACKEND_AUTOLOAD is not 1: torch calls no entry points"
    if not any(entry.value.startswith("ds_plugin_sdk.") for entry in entry_points(group="torch.backends")):
        return "ds-plugin-sdk is on the path, and not installed: torch finds no entry point of it"
    return ""
