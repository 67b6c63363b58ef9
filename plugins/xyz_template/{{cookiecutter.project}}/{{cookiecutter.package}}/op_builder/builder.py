"""What all builders of this plugin have in common."""

from __future__ import annotations

from ds_plugin_sdk import CppOpBuilder{% if cookiecutter.runtime == "simulated" %}, privateuse1{% endif %}


class {{ cookiecutter.prefix }}OpBuilder(CppOpBuilder):
    """Builds an op of {{ cookiecutter.prefix }} devices. For the vendor's own compiler, name its toolchain in TOOLCHAIN."""

    def {{ cookiecutter.name }}_kernel_path(self, path: str) -> str:
        """A source file of this package."""
        return self.kernel_path(path)

    def {{ cookiecutter.name }}_kernel_include(self, path: str) -> str:
        """A folder of headers of this package."""
        return self.kernel_include(path)
{%- if cookiecutter.runtime == "simulated" %}

    def include_paths(self) -> list[str]:
        return [privateuse1.include_dir()]  # launch.h, runtime.h

    def cxx_args(self) -> list[str]:
        return ["-O3", "-fno-math-errno", "-march=native"]
{%- else %}

    def cxx_args(self) -> list[str]:
        return ["-O2"]
{%- endif %}
