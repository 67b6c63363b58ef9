"""``utils``: what DeepSpeed's FastFileWriter calls, and what its releases up to 0.9 called for flat buffers.

Results and errors are those of `ds_plugin_sdk.ops.utils`.
"""

from __future__ import annotations

from ds_plugin_sdk.ops.utils import cast_to_byte_tensor, flatten, unflatten

__all__ = ["cast_to_byte_tensor", "flatten", "unflatten"]
