"""``stochastic_transformer``: `transformer`, for layers whose streams need not wait for each other on a GPU.

On a CPU there is nothing to leave out, so the results of both are equal.
"""

from ds_plugin_sdk.integrations.deepspeed.modules.transformer import (
    backward_fp16,
    backward_fp32,
    create_transformer_layer_fp16,
    create_transformer_layer_fp32,
    forward_fp16,
    forward_fp32,
)

__all__ = [
    "backward_fp16",
    "backward_fp32",
    "create_transformer_layer_fp16",
    "create_transformer_layer_fp32",
    "forward_fp16",
    "forward_fp32",
]
