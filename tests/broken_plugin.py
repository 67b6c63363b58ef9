"""The plugin ``zap`` on its vendor's worst day: kernels that do not compile, a builder that raises, a wrong name."""

from __future__ import annotations

import itertools

from plugin_site import Install

_BUILDERS = """
from ds_plugin_sdk import CppOpBuilder

class Fine(CppOpBuilder):
    def sources(self):
        return [self.kernel_path(f"{self.NAME}.cpp")]

class FusedAdagradBuilder(Fine):
    NAME = "fused_adagrad"

class FusedLionBuilder(Fine):
    NAME = "fused_lion"

class ZapToolsBuilder(Fine):
    NAME, KIND = "zap_tools", "python_module"

    def include_paths(self):
        import zap_toolkit
"""

# What a package defines is found once in a process, so each test gets a package of its own.
_numbers = itertools.count()

_ACCELERATOR = """
from ds_plugin_cpu.accelerator import CPU_Accelerator

class ZAP_Accelerator(CPU_Accelerator):
    op_builders = {package!r}
"""


def install_broken(install: Install, *, more: str = "") -> str:
    """Install it: on the CPU, with a package of builders, whose name is returned; `more` is added to the builders."""
    number = next(_numbers)
    name, accelerator = f"zap_builders_{number}", f"zap_accelerator_{number}"
    site = install("zap", accelerator=f"{accelerator}:ZAP_Accelerator", priority=-200)
    (site / f"{accelerator}.py").write_text(_ACCELERATOR.format(package=name), encoding="utf-8")
    package = site / name
    package.mkdir()
    (package / "__init__.py").write_text(_BUILDERS + more, encoding="utf-8")
    (package / "fused_adagrad.cpp").write_text("void nothing() {}\n", encoding="utf-8")
    (package / "fused_lion.cpp").write_text("#error this kernel is not finished\n", encoding="utf-8")
    return name
