"""``random_ltd``: what DeepSpeed's random-LTD calls, on the accelerator's tensors.

Formulas, dtypes and errors are those of `ds_plugin_sdk.ops.random_ltd`. DeepSpeed's own `mask_gather_bert` takes the
indices of the first layer for all; here each layer has its own.
"""

from __future__ import annotations

from ds_plugin_sdk.ops.random_ltd import mask_gather_bert, mask_gather_gpt, token_gather, token_scatter_, token_sort_

__all__ = ["mask_gather_bert", "mask_gather_gpt", "token_gather", "token_scatter_", "token_sort_"]
