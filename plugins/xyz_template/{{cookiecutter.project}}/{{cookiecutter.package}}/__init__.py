"""DeepSpeed on {{ cookiecutter.prefix }} devices. This module is the plugin's manifest and imports no torch."""

from __future__ import annotations
{% if cookiecutter.runtime == "torch" %}
import glob
{% endif %}
from ds_plugin_sdk import Plugin, Probe

__version__ = "0.1.0"

{% if cookiecutter.runtime == "simulated" %}
def probe() -> Probe:
    """Whether the device can be used by this process.

    The simulated one always can. On hardware: count the devices without touching them (a /dev node, the driver's
    management library), but for those that a variable hides, and answer Probe.absent(reason) where there are none, as
    on a login node.
    """
    from ds_plugin_sdk.settings import settings, visible_devices

    count = visible_devices("{{ cookiecutter.device_type|upper }}_VISIBLE_DEVICES", settings.simulator_devices)
    return Probe.available(devices=count, detail="simulated") if count else Probe.absent("all devices are hidden")
{% else %}
# The driver's files, one for each device. Replace it by what your driver makes, or by its management library.
DEVICE_FILES = "{{ {'hpu': '/dev/accel/accel[0-9]*', 'npu': '/dev/davinci[0-9]*', 'xpu': '/dev/dri/renderD[0-9]*'}.get(cookiecutter.name, '/dev/' ~ cookiecutter.name ~ '[0-9]*') }}"

# The variable by which the driver hides devices, and a launcher those of other ranks.{{ '' if cookiecutter.name in ('npu', 'xpu') else ' A guess: write your driver\'s.' }}
VISIBLE_DEVICES = "{{ {'npu': 'ASCEND_RT_VISIBLE_DEVICES', 'xpu': 'ZE_AFFINITY_MASK'}.get(cookiecutter.name, cookiecutter.device_type|upper ~ '_VISIBLE_DEVICES') }}"


def probe() -> Probe:
    """Whether the device can be used by this process: without torch, whose import takes seconds.

    Devices that the variable hides do not count.
    """
    from ds_plugin_sdk.settings import visible_devices

    devices = len(glob.glob(DEVICE_FILES))
    if not devices:
        return Probe.absent(f"no {DEVICE_FILES}: is the driver loaded?")
    count = visible_devices(VISIBLE_DEVICES, devices)
    return Probe.available(devices=count) if count else Probe.absent("all devices are hidden")
{% endif %}

plugin = Plugin(
    name="{{ cookiecutter.name }}",
    sdk_api=(1, 0),
    accelerator="{{ cookiecutter.package }}.accelerator:{{ cookiecutter.prefix }}_Accelerator",
    probe=probe,
    prebuilt="{{ cookiecutter.package }}",
)
