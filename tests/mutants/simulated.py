"""An accelerator on the simulated device: the target of defects that a CPU cannot have."""

from __future__ import annotations

from ds_plugin_sdk import TorchAccelerator, simulator

simulator.install("simulated")


class SimulatedAccelerator(TorchAccelerator):
    """Streams that run later, memory that the host cannot read, two devices."""

    device_type = "simulated"
    communication_backend = "simulatedccl"
    compile_backend = "aot_eager"
