"""Which plugins are installed, which one is used, and why.

scan (metadata) -> manifest (version check) -> probe -> decide -> load. Every step leaves a line in the decision, which
`sdk list --explain` and the error messages print.
"""

from __future__ import annotations

from ds_plugin_sdk.registry.current import (
    choose,
    current,
    decision,
    get_accelerator,
    is_loading,
    load,
    on_change,
    preview,
    release,
    set_accelerator,
    use_fallback,
)
from ds_plugin_sdk.registry.kernels import has_kernels, load_kernels
from ds_plugin_sdk.registry.plugin import Plugin, Probe
from ds_plugin_sdk.registry.scan import Candidate, how_to_have, only, scan
from ds_plugin_sdk.registry.select import Decision, Step, allowed

__all__ = [
    "Candidate",
    "Decision",
    "Plugin",
    "Probe",
    "Step",
    "allowed",
    "choose",
    "current",
    "decision",
    "get_accelerator",
    "has_kernels",
    "how_to_have",
    "is_loading",
    "load",
    "load_kernels",
    "on_change",
    "only",
    "preview",
    "release",
    "scan",
    "set_accelerator",
    "use_fallback",
]
