"""The builders of this plugin's kernels, a class each."""

from __future__ import annotations

from typing import ClassVar, Literal

from ds_plugin_sdk import CppOpBuilder{% if cookiecutter.runtime == "simulated" %}, privateuse1{% endif %}


class {{ cookiecutter.prefix }}OpBuilder(CppOpBuilder):
    """Builds an op of {{ cookiecutter.prefix }} devices.

    For the vendor's own compiler, name its toolchain in TOOLCHAIN: docs/writing-a-plugin.md of the SDK has one whole.
    """

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


class FusedAdamBuilder({{ cookiecutter.prefix }}OpBuilder):
    """Adam: a native kernel of this plugin, in place of the SDK's reference implementation."""

    NAME = "fused_adam"

    def sources(self) -> list[str]:
        return [self.{{ cookiecutter.name }}_kernel_path("csrc/fused_adam.cpp")]
{%- else %}

    def cxx_args(self) -> list[str]:
        return ["-O2"]
{%- endif %}


class HelloBuilder({{ cookiecutter.prefix }}OpBuilder):
    """An op that is a Python module made with pybind11, as ops written for DeepSpeed's own tree are.

    ``HelloBuilder().load().hello()``: load() returns the module itself.
    """

    NAME = "{{ cookiecutter.name }}_hello"
    KIND: ClassVar[Literal["torch_library", "python_module"]] = "python_module"

    def sources(self) -> list[str]:
        return [self.{{ cookiecutter.name }}_kernel_path("csrc/hello.cpp")]  # torch brings pybind11's headers
