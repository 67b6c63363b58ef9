"""Types of the fixtures, and the accelerators that the plugins of these tests bring."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

Install = Callable[..., Path]
Python = Callable[..., subprocess.CompletedProcess[str]]

# Accelerators that differ in everything DeepSpeed freezes: device string, compile backend, builder classes.
ACCELERATORS = """
import functools

from ds_plugin_cpu.accelerator import CPU_Accelerator


@functools.cache
def builder(owner, class_name):
    def load(self, verbose=True):
        return f"{owner}'s {class_name}"

    members = {"NAME": class_name, "name": class_name, "owner": owner, "load": load}
    return type(class_name, (), {**members, "is_compatible": lambda self, verbose=False: True})


class Zap(CPU_Accelerator):
    def device_name(self, device_index=None):
        return "meta"

    def get_compile_backend(self):
        return "eager"

    def get_op_builder(self, class_name):
        return builder(type(self).__name__, class_name)

    def create_op_builder(self, class_name):
        return self.get_op_builder(class_name)()


class Zip(Zap):
    def device_name(self, device_index=None):
        return "xla"

    def get_compile_backend(self):
        return "aot_eager"


class Broken(Zap):
    def __init__(self):
        raise OSError("libzap.so.3: cannot open shared object file")
"""
