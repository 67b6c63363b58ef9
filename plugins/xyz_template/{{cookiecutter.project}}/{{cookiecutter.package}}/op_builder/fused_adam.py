"""Adam: a native kernel of this plugin, in place of the SDK's reference."""

from __future__ import annotations

from {{ cookiecutter.package }}.op_builder import builder


class FusedAdamBuilder(builder.{{ cookiecutter.prefix }}OpBuilder):
    NAME = "fused_adam"

    def sources(self) -> list[str]:
        return [self.{{ cookiecutter.name }}_kernel_path("csrc/fused_adam.cpp")]
