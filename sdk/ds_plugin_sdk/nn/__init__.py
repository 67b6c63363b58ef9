"""Layers over the SDK's ops, for people without DeepSpeed."""

from ds_plugin_sdk.nn.transformer import TransformerLayer

__all__ = ["TransformerLayer"]
