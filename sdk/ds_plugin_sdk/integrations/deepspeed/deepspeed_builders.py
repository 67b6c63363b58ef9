"""DeepSpeed's own builders for what the SDK has no native code for, so that installing a plugin removes no op.

Which they are says DeepSpeed's own accelerator of the device. That is asked for builder classes and nothing else, and
never initialised, so no device is touched; whether an op is compatible its builder says when it is asked.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import sys
import warnings
from typing import Any

from ds_plugin_sdk.op_builder import op_table

# NAME of the class that DeepSpeed's accelerators give for an op that they lack.
_ABSENT = "deepspeed_not_implemented"


def find(class_name: str, device_type: str) -> type[Any] | None:
    """DeepSpeed's builder class of a name for a device, or None."""
    accelerator = _accelerator(device_type)
    try:
        builder = None if accelerator is None else accelerator.get_op_builder(class_name)
    except Exception as error:  # some import the device's own software
        _complain(device_type, error)
        return None
    known = inspect.isclass(builder) and getattr(builder, "NAME", _ABSENT) != _ABSENT
    return builder if known else None


@functools.cache
def _accelerator(device_type: str) -> Any:
    """DeepSpeed's own accelerator of a device, as far as it is needed to ask for builders; None if there is none."""
    name = f"deepspeed.accelerator.{device_type}_accelerator"
    try:
        module = importlib.import_module(name)
        base = importlib.import_module("deepspeed.accelerator.abstract_accelerator").DeepSpeedAccelerator
        own = (cls for cls in vars(module).values() if inspect.isclass(cls) and cls.__module__ == name)
        found = next((cls for cls in own if issubclass(cls, base)), None)
        if found is None:
            return None
        accelerator: Any = found.__new__(found)  # __init__ may ask the device, and change torch's settings
        accelerator.class_dict = None  # where they keep their builders: nothing yet
        return accelerator
    except ImportError:  # DeepSpeed has none, or cannot use the device here by itself
        return None
    except Exception as error:
        _complain(device_type, error)
        return None


def _complain(device_type: str, error: Exception) -> None:
    warnings.warn(
        f"ds-plugin-sdk: DeepSpeed's own ops for '{device_type}' cannot be had: {type(error).__name__}: {error}",
        RuntimeWarning,
        stacklevel=3,
    )


def compatible(device_type: str) -> dict[str, bool]:
    """Whether DeepSpeed's own builders for a device are compatible with this machine, by their names."""
    importlib.import_module("deepspeed")
    found = {op.builder: find(op.builder, device_type) for op in op_table.OPS if op.deepspeed}
    return {name: _is_compatible(builder) for name, builder in found.items() if builder is not None}


def _is_compatible(builder: type[Any]) -> bool:
    try:
        return bool(builder().is_compatible(verbose=False))
    except Exception:  # without CUDA's toolkit
        return False


def main() -> None:
    """Print `compatible` of the device named on the command line: for a process that must not import DeepSpeed."""
    with contextlib.redirect_stdout(sys.stderr):
        table = compatible(sys.argv[1])
    sys.stdout.write(json.dumps(table))


if __name__ == "__main__":
    main()
