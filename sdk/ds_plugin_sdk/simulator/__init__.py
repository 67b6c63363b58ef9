"""A simulated device: the functions of ``runtime.h`` on host memory and threads, behaving like hardware.

    from ds_plugin_sdk import simulator

    simulator.install("zap", devices=2)
    x = torch.ones(3, device="zap:1")

The host cannot access its memory, its streams run later and side by side, its devices share nothing; so what would
fail on hardware fails here. The torch backend over it is `ds_plugin_sdk.privateuse1`; a vendor keeps that and replaces
the files of this runtime by their own.

Importing this package does not import torch.
"""

from ds_plugin_sdk.simulator.runtime import SimulatedRuntime, configure, delay, install, sources_dir

__all__ = ["SimulatedRuntime", "configure", "delay", "install", "sources_dir"]
