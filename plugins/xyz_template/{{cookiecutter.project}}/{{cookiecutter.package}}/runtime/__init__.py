"""The device runtime: the functions of ``runtime.h``, simulated on host memory until you replace them.

Each file here answers a part of ``runtime.h``; the comments there say what hardware does in each function:

    device.cpp    which devices there are, and which one a thread uses
    memory.cpp    malloc, free, memcpy, memset
    stream.cpp    queues of work, launch
    event.cpp     points in a queue

Replace a function by the call into your driver, run the tests, go on with the next. Link your driver's library in
`libraries_args`.
"""

from __future__ import annotations

from pathlib import Path

from ds_plugin_sdk import simulator


class DeviceRuntime(simulator.RuntimeBuilder):
    """Builds the files in this folder."""

    def sources(self) -> list[str]:
        return [str(path) for path in sorted(Path(__file__).parent.glob("*.cpp"))]

    def libraries_args(self) -> list[str]:
        return []  # for example ["{{ cookiecutter.name }}rt"]
