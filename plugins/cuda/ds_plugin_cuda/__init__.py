"""ds-plugin-cuda: NVIDIA GPUs as a DeepSpeed device. This module is the plugin's manifest and imports no torch."""

from __future__ import annotations

from ds_plugin_sdk import Plugin, Probe

__version__ = "0.1.0"


def probe() -> Probe:
    """Whether torch can use a GPU here, from NVML and torch's version file: no CUDA context, no import of torch."""
    from ds_plugin_cuda import detect

    return detect.probe()


plugin = Plugin(
    name="cuda",
    sdk_api=(1, 0),
    accelerator="ds_plugin_cuda.accelerator:CUDA_Accelerator",
    probe=probe,
    prebuilt="ds_plugin_cuda",
    report="ds_plugin_cuda.report:lines",
)
