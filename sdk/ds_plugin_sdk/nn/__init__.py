"""Layers over the SDK's ops, for people without DeepSpeed."""

from ds_plugin_sdk.nn.activation import geglu, gelu, swiglu
from ds_plugin_sdk.nn.linear import Linear, linear
from ds_plugin_sdk.nn.linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
from ds_plugin_sdk.nn.rms_norm import RMSNorm, rms_norm
from ds_plugin_sdk.nn.rotary import rotary
from ds_plugin_sdk.nn.sparse_attention import SparseSelfAttention
from ds_plugin_sdk.nn.sparsity import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)
from ds_plugin_sdk.nn.transformer_layer import TransformerLayer

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "Linear",
    "LinearCrossEntropyLoss",
    "LocalSlidingWindowSparsityConfig",
    "RMSNorm",
    "SparseSelfAttention",
    "SparsityConfig",
    "TransformerLayer",
    "VariableSparsityConfig",
    "geglu",
    "gelu",
    "linear",
    "linear_cross_entropy",
    "rms_norm",
    "rotary",
    "swiglu",
]
