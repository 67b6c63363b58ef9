"""DeepSpeed's front ends as test subjects, each with the results that it must give, computed in float64.

A front end is a Python class or function of DeepSpeed that calls an op: ``FusedAdam``, ``DeepSpeedTransformerLayer``,
``SoftmaxOp``. It is how DeepSpeed's users reach the op: it passes arguments by position, keeps what the op writes in
place, and falls back to code of its own where the op raises. The check ``ops.front_end`` runs each of them unmodified
on the device. Nothing but conformance and tests imports this package.
"""

from __future__ import annotations

from ds_plugin_sdk.conformance.front_ends.files import FILES
from ds_plugin_sdk.conformance.front_ends.front_end import FrontEnd, Result
from ds_plugin_sdk.conformance.front_ends.inference import INFERENCE
from ds_plugin_sdk.conformance.front_ends.inference_core import INFERENCE_CORE
from ds_plugin_sdk.conformance.front_ends.optimizers import OPTIMIZERS
from ds_plugin_sdk.conformance.front_ends.training import TRAINING

FRONT_ENDS: tuple[FrontEnd, ...] = (*OPTIMIZERS, *TRAINING, *FILES, *INFERENCE, *INFERENCE_CORE)

__all__ = ["FRONT_ENDS", "FrontEnd", "Result"]
