"""An op that is a Python module made with pybind11, as ops written for DeepSpeed's own tree are."""

from __future__ import annotations

from typing import ClassVar, Literal

from {{ cookiecutter.package }}.op_builder import builder


class HelloBuilder(builder.{{ cookiecutter.prefix }}OpBuilder):
    """``HelloBuilder().load().hello()``: load() returns the module itself."""

    NAME = "{{ cookiecutter.name }}_hello"
    KIND: ClassVar[Literal["torch_library", "python_module"]] = "python_module"

    def sources(self) -> list[str]:
        return [self.{{ cookiecutter.name }}_kernel_path("csrc/hello.cpp")]

    def include_paths(self) -> list[str]:
        import pybind11

        return [*super().include_paths(), pybind11.get_include()]
