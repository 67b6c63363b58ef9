"""``spatial_inference``: what DeepSpeed's `nhwc_bias_add` calls, on the accelerator's tensors.

Formulas, dtypes and errors are those of `ds_plugin_sdk.ops.spatial`.
"""

from __future__ import annotations

from ds_plugin_sdk.ops.spatial import nhwc_bias_add, nhwc_bias_add_add, nhwc_bias_add_bias_add

__all__ = ["nhwc_bias_add", "nhwc_bias_add_add", "nhwc_bias_add_bias_add"]
