"""What a transformer layer does between its matrix products, forward and backward, each in one pass over memory.

``ds_plugin::dropout_add``, ``dropout_add_layer_norm``, ``add_rms_norm``, ``fused_bias_gelu``, ``activation_and_mul``,
``masked_softmax_dropout``, and the derivative of each, ``<name>_backward``. They can be differentiated once.

All arithmetic is in float32 (float64 for float64 tensors) and rounded once, but that a norm is taken of its sum as it
is stored. Dropout is that of `ds_plugin_sdk.ops._philox`: with one seed it drops the same elements on every device and
again in the backward pass, so that no mask is kept.
"""

from ds_plugin_sdk.ops.transformer.dropout import dropout_add, new_seed
from ds_plugin_sdk.ops.transformer.gate import activation_and_mul
from ds_plugin_sdk.ops.transformer.gelu import fused_bias_gelu
from ds_plugin_sdk.ops.transformer.layer_norm import dropout_add_layer_norm
from ds_plugin_sdk.ops.transformer.rms_norm import add_rms_norm
from ds_plugin_sdk.ops.transformer.softmax import masked_softmax_dropout

__all__ = [
    "activation_and_mul",
    "add_rms_norm",
    "dropout_add",
    "dropout_add_layer_norm",
    "fused_bias_gelu",
    "masked_softmax_dropout",
    "new_seed",
]
