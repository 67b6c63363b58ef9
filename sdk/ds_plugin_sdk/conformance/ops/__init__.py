"""The level ``ops``: every op of the SDK on the target's device, and DeepSpeed's front ends over them."""

from __future__ import annotations

from ds_plugin_sdk.conformance.ops import every_op, front_ends, surroundings

__all__ = ["every_op", "front_ends", "surroundings"]
