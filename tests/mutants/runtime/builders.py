"""Defects of the op builders."""

from __future__ import annotations

from typing import Any

from ds_plugin_sdk.conformance.runtime.builders import NAMES
from mutants.runtime.support import always, member, nothing, original


class _EmptyBuilder:
    NAME = BUILD_VAR = name = "empty"

    def is_compatible(self, verbose: bool = False) -> bool:
        return True

    def load(self, verbose: bool = True) -> None:
        return None


def _known_only(self: Any, name: str) -> Any:
    if name not in NAMES:
        raise KeyError(name)
    return original(self).get_op_builder(name)


member("builders.nameless", "R12.1", "Builders have no NAME.", get_op_builder=always(type("Builder", (), {})))
member("builders.missing", "R12.2", "`create_op_builder` gives None.", create_op_builder=nothing)
member("builders.empty", "R12.3", "`load()` gives None.", create_op_builder=always(_EmptyBuilder()))
member("builders.known_only", "R12.4", "An unknown name raises.", get_op_builder=_known_only)
member("builders.no_folder", "R12.5", "`op_builder_dir()` is no package.", op_builder_dir=always("ds_plugin_sdk.paths"))
member(
    "builders.new_class",
    "R12.6",
    "Each call of `get_op_builder` gives a new class.",
    get_op_builder=lambda self, name: type(name, (original(self).get_op_builder(name),), {}),
)
member("builders.no_extension", "R12.7", "`build_extension()` is None.", build_extension=nothing)
