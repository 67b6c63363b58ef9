"""DeepSpeed's own Python classes over the ops, run on a device, with what they should give in float64.

They are how DeepSpeed's users meet an op: they call its functions positionally, keep what it writes in place, and fill
in what a wrong answer leaves out. Conformance runs every one of them.
"""

from __future__ import annotations

from ds_plugin_sdk.conformance.front_ends.front_end import FrontEnd, Result
from ds_plugin_sdk.conformance.front_ends.inference import INFERENCE
from ds_plugin_sdk.conformance.front_ends.inference_core import INFERENCE_CORE
from ds_plugin_sdk.conformance.front_ends.optimizers import OPTIMIZERS
from ds_plugin_sdk.conformance.front_ends.training import TRAINING

FRONT_ENDS: tuple[FrontEnd, ...] = (*OPTIMIZERS, *TRAINING, *INFERENCE, *INFERENCE_CORE)

__all__ = ["FRONT_ENDS", "FrontEnd", "Result"]
