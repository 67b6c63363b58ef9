"""A package of builders whose one builder has a name that is no op's."""

from __future__ import annotations

from ds_plugin_sdk import CppOpBuilder


class NormBuilder(CppOpBuilder):
    """The kernels of the norms, under a name that nobody asks for."""

    NAME = "norms"

    def sources(self) -> list[str]:
        return []
