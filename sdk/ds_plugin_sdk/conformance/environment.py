"""Where a run took place, and what the target declares of itself: what a report must say to be worth anything later."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from ds_plugin_sdk import registry, report
from ds_plugin_sdk.conformance.target import Target

# What an accelerator says of itself without doing anything.
_DECLARATIONS = (
    "device_count",
    "communication_backend_name",
    "is_synchronized_device",
    "use_host_timers",
    "resolves_data_dependency",
    "handles_memory_backpressure",
    "is_fp16_supported",
    "is_bf16_supported",
    "is_fp64_supported",
    "is_triton_supported",
    "get_compile_backend",
)


def gather(target: Target) -> dict[str, Any]:
    """Versions, machine, device, declarations, and where each op would come from."""
    cls = type(target.accelerator)
    return {
        "versions": _versions(target),
        "machine": {"system": platform.platform(), "processor": processor(), "cores": os.cpu_count()},
        "accelerator": f"{cls.__module__}.{cls.__qualname__}",
        "device": target.device_type,
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in _try(lambda: target.dtypes, [])],
        "declared": {name: _declared(target, name) for name in _DECLARATIONS},
        "ops": [vars(op) for op in _try(lambda: report.ops(target.accelerator), [])],
    }


def _versions(target: Target) -> dict[str, str]:
    plugins = registry.scan().get(target.plugin.name, []) if target.plugin is not None else []
    wanted = ("ds-plugin-sdk", "torch", "deepspeed", *(candidate.distribution for candidate in plugins))
    return {"python": platform.python_version(), **report.versions_of(wanted)}


def processor() -> str:
    """The CPU's model as Linux names it; on x86 with its numbers: in a virtual machine the name has no generation."""
    info = Path("/proc/cpuinfo")
    first = info.read_text(encoding="utf-8").split("\n\n")[0] if info.exists() else ""
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    named = found.get("model name") or platform.processor() or platform.machine()
    numbered = {"cpu family", "model"} <= found.keys()
    return named + (f", family {found['cpu family']}, model {found['model']}" if numbered else "")


def _declared(target: Target, name: str) -> str:
    member = getattr(target.accelerator, name, None)
    return "-" if member is None else str(_try(member, "raises"))


def _try(ask: Any, otherwise: Any) -> Any:
    """An accelerator that cannot answer is for the checks to report; here it must not stop the run."""
    try:
        return ask()
    except Exception:
        return otherwise
