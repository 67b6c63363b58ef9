"""The device runtime: the functions of ``runtime.h``, simulated on host memory until you replace these files.

The comments in ``runtime.h``, in the SDK's ``privateuse1/csrc``, say what hardware does in each function:

    device.cpp    which devices there are, and which one a thread uses
    memory.cpp    malloc, free, memcpy, memset
    stream.cpp    queues of work, launch
    event.cpp     points in a queue

Replace a file by one that calls your driver, run the tests, continue with the next, in this order; stream.cpp and
event.cpp together. Link your driver's library in `libraries_args`.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from ds_plugin_sdk import privateuse1, simulator


class DeviceRuntime(privateuse1.RuntimeBuilder):
    """Builds the files in this folder."""

    def sources(self) -> list[str]:
        return [str(path) for path in sorted(Path(__file__).parent.glob("*.cpp"))]

    def libraries_args(self) -> list[str]:
        return []  # for example ["{{ cookiecutter.name }}rt"]

    def configure(self, library: ctypes.CDLL) -> None:
        simulator.configure(library)  # the settings DS_SIMULATOR_*: remove this with the last simulated file
