"""Hooks that several plugins may answer at once; pluggy calls them all.

Which accelerator is current is not such a question: it has exactly one answer, and the registry gives it.
"""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

hookspec = pluggy.HookspecMarker("ds_plugin_sdk")
hookimpl = pluggy.HookimplMarker("ds_plugin_sdk")


@hookspec
def ds_plugin_report_lines() -> Iterable[tuple[str, str]]:  # type: ignore[empty-body]  # pluggy reads the signature
    """Lines (what, value) that `sdk report` shows for the plugin: drivers, threads, memory policy."""
