"""DeepSpeed's inference ops, which are several families each."""

from __future__ import annotations

from typing import ClassVar

from ds_plugin_sdk.op_builder import combined


class InferenceBuilder(combined.CombinedOpBuilder):
    """Loads what DeepSpeed's injected layers call."""

    NAME: ClassVar[str] = "transformer_inference"
    DEVICE_TYPE: ClassVar[str] = "cpu"


class InferenceCoreBuilder(combined.CombinedOpBuilder):
    """Loads what the layers of DeepSpeed's second inference engine call."""

    NAME: ClassVar[str] = "inference_core_ops"
    DEVICE_TYPE: ClassVar[str] = "cpu"
