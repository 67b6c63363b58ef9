"""The plugin under test is the current accelerator."""

from __future__ import annotations

import pytest
from ds_plugin_sdk import set_accelerator

from {{ cookiecutter.package }}.accelerator import {{ cookiecutter.prefix }}_Accelerator


@pytest.fixture(scope="session")
def accelerator() -> {{ cookiecutter.prefix }}_Accelerator:
    device = {{ cookiecutter.prefix }}_Accelerator()
{%- if cookiecutter.runtime == "torch" %}
    if not device.is_available():
        pytest.skip("there is no {{ cookiecutter.device_type }} device on this machine")
{%- endif %}
    set_accelerator(device)
    return device
