"""Ops of DeepSpeed that are several families at once: its inference module calls norms, softmax, attention and more."""

from __future__ import annotations

from typing import Any, ClassVar

from ds_plugin_sdk.op_builder import families
from ds_plugin_sdk.op_builder.builder import OpBuilder

# DeepSpeed's op name -> the families that its functions need.
COMBINED = {
    "transformer_inference": ("norm", "softmax", "activation", "rotary", "residual", "attention", "linear"),
    "inference_core_ops": ("norm", "activation", "linear", "fp6"),
}

# Op names of our own, which no host asks for: parts, and what hosts are given in another way.
OWN_NAMES = frozenset({"all_reduce", *(family for parts in COMBINED.values() for family in parts)})


class CombinedOpBuilder(OpBuilder):
    """An op without sources of its own: loading it loads each of its families, native where the device has a kernel.

    Attributes:
        DEVICE_TYPE: torch device type whose kernels to load.
    """

    DEVICE_TYPE: ClassVar[str] = ""

    def families(self) -> tuple[str, ...]:
        """The families this op is made of, modules of `ds_plugin_sdk.ops`."""
        return COMBINED[self.NAME]

    def sources(self) -> list[str]:
        return []

    def _load_library(self) -> Any:
        from ds_plugin_sdk.op_builder.lookup import load_kernels

        for family in self.families():
            families.define(family)
            load_kernels(family, self.DEVICE_TYPE)
        return families.module_for(self.NAME)


__all__ = ["COMBINED", "OWN_NAMES", "CombinedOpBuilder"]
