"""The whole of the accelerator: torch answers the rest."""

from __future__ import annotations

{% if cookiecutter.runtime == "simulated" -%}
from ds_plugin_sdk import TorchAccelerator, privateuse1

from {{ cookiecutter.package }}.runtime import DeviceRuntime

privateuse1.install("{{ cookiecutter.device_type }}", runtime=DeviceRuntime())


class {{ cookiecutter.prefix }}_Accelerator(TorchAccelerator):
    device_type = "{{ cookiecutter.device_type }}"
    communication_backend = "{{ cookiecutter.device_type }}ccl"
    op_builders = "{{ cookiecutter.package }}.op_builder"
    compile_backend = "aot_eager"
{%- else -%}
from ds_plugin_sdk import TorchAccelerator

from {{ cookiecutter.package }} import VISIBLE_DEVICES

# Import the torch extension that adds torch.{{ cookiecutter.device_type }} here, unless torch has the device itself or loads the
# extension by its entry point.


class {{ cookiecutter.prefix }}_Accelerator(TorchAccelerator):
    device_type = "{{ cookiecutter.device_type }}"
    op_builders = "{{ cookiecutter.package }}.op_builder"
    visible_devices_env = VISIBLE_DEVICES
{%- endif %}
