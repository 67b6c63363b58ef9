"""Tensors as one run of memory."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder.builder import ReferenceOpBuilder


class UtilsBuilder(ReferenceOpBuilder):
    """Tensors as one run of memory: views, and torch's own copy. There is nothing that native code would do better."""

    NAME: ClassVar[str] = "utils"
