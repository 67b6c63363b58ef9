"""Installing plugins for tests: real distributions, found by their metadata."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Install = Callable[..., Path]

MANIFEST = """\
from ds_plugin_sdk import Plugin, Probe
plugin = Plugin({name!r}, {sdk_api}, {accelerator!r}, probe=lambda: {probe}, priority={priority})
"""


def write_plugin(
    site: Path,
    name: str,
    *,
    probe: str = "Probe.available(devices=1)",
    priority: int = 10,
    sdk_api: tuple[int, int] = (1, 0),
    accelerator: str = "ds_plugin_cpu.accelerator:CPU_Accelerator",
    distribution: str | None = None,
    body: str | None = None,
) -> Path:
    """Put a plugin into the folder `site`; `body` is its module's text where an ordinary manifest will not do."""
    title = distribution or f"ds-plugin-{name}"
    module = title.replace("-", "_")
    info = site / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: 1.0\n", encoding="utf-8")
    entry_points = f"[ds_plugin_sdk.plugins]\n{name} = {module}:plugin\n"
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    text = MANIFEST.format(name=name, sdk_api=sdk_api, accelerator=accelerator, probe=probe, priority=priority)
    (site / f"{module}.py").write_text(text if body is None else body, encoding="utf-8")
    return site
