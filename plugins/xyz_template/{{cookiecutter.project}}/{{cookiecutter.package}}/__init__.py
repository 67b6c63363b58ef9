"""DeepSpeed on {{ cookiecutter.prefix }} devices. This module is the plugin's manifest and imports no torch."""

from __future__ import annotations

from ds_plugin_sdk import Plugin, Probe

__version__ = "0.1.0"

{% if cookiecutter.runtime == "simulated" %}
def probe() -> Probe:
    """Whether the device can be used by this process.

    The simulated one always can. On hardware: count the devices without touching them (a /dev node, the driver's
    management library), and answer Probe.absent(reason) where there are none, as on a login node.
    """
    from ds_plugin_sdk.settings import settings

    return Probe.available(devices=settings.simulator_devices, detail="simulated")
{% else %}
def probe() -> Probe:
    """Whether the device can be used by this process.

    This imports torch, which takes seconds. Better: count the devices without torch and without touching them (a /dev
    node, the driver's management library).
    """
    import torch

    module = getattr(torch, "{{ cookiecutter.device_type }}", None)
    if module is None:
        return Probe.absent("torch has no device '{{ cookiecutter.device_type }}': install the extension that adds it")
    count = int(module.device_count())
    return Probe.available(devices=count) if count else Probe.absent("torch sees no {{ cookiecutter.device_type }} device")
{% endif %}

plugin = Plugin(
    name="{{ cookiecutter.name }}",
    sdk_api=(1, 0),
    accelerator="{{ cookiecutter.package }}.accelerator:{{ cookiecutter.prefix }}_Accelerator",
    probe=probe,
    prebuilt="{{ cookiecutter.package }}",
)
