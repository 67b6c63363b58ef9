"""What DeepSpeed calls on each op: one module for each op name, with exactly the functions of DeepSpeed's own.

DeepSpeed's front ends (`DeepSpeedCPUAdam`, `FusedAdam` ...) load an op by its builder and call these functions
positionally. Each hands over to the torch op of its family, native or reference, and keeps nothing but what the
contract keeps between calls.
"""

from __future__ import annotations

from types import ModuleType

_NAMES = (
    "cpu_adagrad",
    "cpu_adam",
    "cpu_lion",
    "fused_adam",
    "fused_lamb",
    "fused_lion",
    "inference_core_ops",
    "quantizer",
    "random_ltd",
    "spatial_inference",
    "stochastic_transformer",
    "transformer",
    "transformer_inference",
    "utils",
)

MODULES = {name: f"{__name__}.{name}" for name in _NAMES}


def register(op_builder: ModuleType) -> None:
    """Tell the op builders which module serves which op. The import hook calls this with their package."""
    op_builder.register_modules(MODULES)
