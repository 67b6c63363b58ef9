"""Lets DeepSpeed's table of ops have every op that DeepSpeed has a builder's name for.

DeepSpeed fills `ALL_OPS`, and from it `__compatible_ops__`, by walking the modules of one folder, and so misses what no
module defines: an op with a reference implementation alone, one made of several families, one that nobody offers.
Programs look all of them up there: ``deepspeed.ops.__compatible_ops__[InferenceBuilder.NAME]``.
"""

from __future__ import annotations

from typing import Any

from ds_plugin_sdk.accelerator import DeepSpeedAccelerator
from ds_plugin_sdk.integrations.deepspeed import rebind


def complete(all_ops: Any) -> None:
    """Add what the walk missed. Does nothing for DeepSpeed's own accelerators.

    Args:
        all_ops: ``deepspeed.ops.op_builder.all_ops``, just executed.
    """
    accelerator = all_ops.get_accelerator()
    if not isinstance(accelerator, DeepSpeedAccelerator):
        return
    for class_name in rebind.builder_names():
        cls = accelerator.get_op_builder(class_name)
        if cls is not None:  # as accelerators written against DeepSpeed's own class say that they have no such op
            builder = cls()
            all_ops.ALL_OPS.setdefault(builder.NAME, builder)
