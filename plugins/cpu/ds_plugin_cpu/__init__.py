"""ds-plugin-cpu: the CPU as a DeepSpeed device. This module is the plugin's manifest and imports no torch."""

from __future__ import annotations

from ds_plugin_sdk import Plugin, Probe

__version__ = "0.1.0"


def probe() -> Probe:
    """A CPU is always there; it counts as one device for each NUMA node."""
    from ds_plugin_cpu import topology

    return Probe.available(devices=topology.device_count(), detail=f"{len(topology.usable_cores())} cores")


plugin = Plugin(
    name="cpu",
    sdk_api=(1, 0),
    accelerator="ds_plugin_cpu.accelerator:CPU_Accelerator",
    probe=probe,
    priority=-100,  # any hardware is better than none
    prebuilt="ds_plugin_cpu",
    report="ds_plugin_cpu.report:lines",
)
