"""An accelerator on the simulated device: the target of defects that a CPU cannot have."""

from __future__ import annotations

from ds_plugin_sdk import Plugin, Probe, TorchAccelerator, simulator
from ds_plugin_sdk.conformance.target import Target

simulator.install("simulated")


class SimulatedAccelerator(TorchAccelerator):
    """Streams that run later, memory that the host cannot read, two devices."""

    device_type = "simulated"
    communication_backend = "simulatedccl"
    compile_backend = "aot_eager"


def installed_plugin() -> Target:
    """The accelerator of an installed plugin, whose probe counts what is visible."""
    from mutants.runtime.manifest import installed

    accelerator = f"{__name__}:SimulatedAccelerator"
    visible = "len(os.environ.get('SIMULATED_VISIBLE_DEVICES', '0,1').split(','))"
    installed("visible", "import os", accelerator, visible)
    plugin = Plugin("visible", (1, 0), accelerator, probe=lambda: Probe.available(2))
    return Target("", SimulatedAccelerator(), plugin)
