"""Native code on demand: a content-addressed cache of compiled ops, and the toolchains that fill it.

    spec = BuildSpec(name="cpu_adam", owner="ds-plugin-cpu", sources=(Source(path),))
    artifact = acquire(spec)          # prebuilt, else cached, else compiled
    module = load(artifact, spec)
    artifact, module = obtain(spec)   # both, and again if a binary made earlier no longer loads

Nothing here knows accelerators, plugins or DeepSpeed, and only `load` imports torch.
"""

from ds_plugin_sdk.jit import cache
from ds_plugin_sdk.jit.acquire import acquire, build_into, explain, failure, find, obtain, refusal
from ds_plugin_sdk.jit.compiler import Compiler, identify
from ds_plugin_sdk.jit.load import load
from ds_plugin_sdk.jit.machine import Machine
from ds_plugin_sdk.jit.spec import Artifact, BuildSpec, Source
from ds_plugin_sdk.jit.toolchains import (
    CudaToolchain,
    CxxToolchain,
    SyclToolchain,
    Toolchain,
    get_toolchain,
    register_toolchain,
    toolchain_names,
)

__all__ = [
    "Artifact",
    "BuildSpec",
    "Compiler",
    "CudaToolchain",
    "CxxToolchain",
    "Machine",
    "Source",
    "SyclToolchain",
    "Toolchain",
    "acquire",
    "build_into",
    "cache",
    "explain",
    "failure",
    "find",
    "get_toolchain",
    "identify",
    "load",
    "obtain",
    "refusal",
    "register_toolchain",
    "toolchain_names",
]
