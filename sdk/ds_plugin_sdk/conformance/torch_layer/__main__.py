"""Runs torch's tests on a plugin's device: ``python -m ds_plugin_sdk.conformance.torch_layer NAME [FILE] [OPTIONS]``.

Options are those of unittest: ``-v``, ``-f``, ``-k PATTERN``. Without a file, `compare_cpu` runs.
"""

from __future__ import annotations

import runpy
import sys
import unittest
from pathlib import Path

from ds_plugin_sdk.conformance.outcome import BROKEN, HOLDS, NOTHING_RUN
from ds_plugin_sdk.conformance.target import Target
from ds_plugin_sdk.errors import ConformanceError, SdkError
from ds_plugin_sdk.settings import export


def main(arguments: list[str]) -> None:
    """Load the plugin, then the tests: they look for devices when they are imported."""
    if not arguments or arguments[0].startswith("-"):
        sys.exit(__doc__)
    name, *rest = arguments
    target = Target.find(name)
    _need_torch_s_tests()
    export({"PYTORCH_TESTING_DEVICE_ONLY_FOR": _torch_s_name(target.device_type)})
    if rest and not rest[0].startswith("-"):
        file, *options = rest
        sys.argv = [file, *options]
        sys.path.insert(0, str(Path(file).resolve().parent))  # they import their neighbours
        runpy.run_path(file, run_name="__main__")
    else:
        tests = "ds_plugin_sdk.conformance.torch_layer.compare_cpu"
        result = unittest.main(tests, argv=["torch_layer", *rest], exit=False).result
        # OpInfo expects some ops to differ from the CPU; where they do not, the device is none the worse.
        wrong = result.failures or result.errors
        sys.exit(NOTHING_RUN if not result.testsRun else BROKEN if wrong else HOLDS)


def _torch_s_name(device_type: str) -> str:
    """What torch's tests call a device: one from outside torch by the name it had before it was renamed."""
    import torch

    return "privateuse1" if device_type == torch._C._get_privateuse1_backend_name() else device_type


def _need_torch_s_tests() -> None:
    try:
        import torch.testing._internal.common_device_type  # noqa: F401  # tried: it may not be installed
        from torch.testing._internal import common_utils
    except ImportError as error:
        raise ConformanceError(
            "torch's tests cannot be imported", why=str(error), hint="pip install expecttest numpy"
        ) from error
    # Where CI is set torch takes the machine for one of its own, and wants reports by a package that is not here.
    common_utils.IS_CI = False


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except SdkError as problem:
        sys.exit(f"error: {problem}")
