"""The plugin under test is the current accelerator."""

from __future__ import annotations

import pytest
from ds_plugin_sdk import set_accelerator

{% if cookiecutter.runtime == "torch" -%}
from {{ cookiecutter.package }} import plugin
{% endif -%}
from {{ cookiecutter.package }}.accelerator import {{ cookiecutter.prefix }}_Accelerator


@pytest.fixture(scope="session")
def accelerator() -> {{ cookiecutter.prefix }}_Accelerator:

{%- if cookiecutter.runtime == "torch" %}
    probe = plugin.probe()
    if probe.state != "available":
        pytest.skip(str(probe))
{%- endif %}
    device = {{ cookiecutter.prefix }}_Accelerator()
    set_accelerator(device)
    return device
