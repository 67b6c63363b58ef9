"""The two libraries of a device: its runtime, which a vendor writes, and the torch backend, which is the same for all.

They are built apart, so that a change of the runtime compiles in a second or two, without torch's headers.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from ds_plugin_sdk import jit
from ds_plugin_sdk.op_builder import CppOpBuilder
from ds_plugin_sdk.settings import settings

if TYPE_CHECKING:
    from ds_plugin_sdk.jit import Artifact

_CSRC = Path(__file__).parent.resolve() / "csrc"


def include_dir() -> str:
    """Folder of ``runtime.h`` and ``launch.h``, for a runtime and for kernels that are launched on its streams."""
    return str(_CSRC)


class RuntimeBuilder(CppOpBuilder):
    """Builds a device runtime: the functions of ``runtime.h``.

    It is a builder like those of a vendor's ops::

        class DeviceRuntime(RuntimeBuilder):
            def sources(self):
                return [self.kernel_path("csrc/runtime/memory.cpp"), ...]

            def libraries_args(self):
                return ["zaprt"]
    """

    NAME = "device_runtime"

    def include_paths(self) -> list[str]:
        return [include_dir()]

    def configure(self, library: ctypes.CDLL) -> None:
        """Called once, after the library is loaded and before ``runtime_start``.

        A runtime with settings of its own sets them here, by C functions of its own. Most have none.
        """


class BackendBuilder(CppOpBuilder):
    """Builds the torch backend. It knows neither the device's name nor the runtime."""

    NAME = "torch_device"

    def sources(self) -> list[str]:
        # Those that take longest to compile first, so that none is left over at the end.
        files = ("ops.cpp", "fallback.cpp", "autocast.cpp", "hooks.cpp", "allocators.cpp", "guard.cpp", "missing.cpp")
        return [str(_CSRC / "torch" / file) for file in files]

    def include_paths(self) -> list[str]:
        return [include_dir()]

    def cxx_args(self) -> list[str]:
        # ATen's headers, as the stable ones have no guards, allocators or fallbacks. Optimizing buys nothing here.
        return ["-UTORCH_TARGET_VERSION", "-O1", "-g0"]


def load_runtime(builder: RuntimeBuilder) -> ctypes.CDLL:
    """The runtime's library, loaded so that those that come later find its functions.

    Raises:
        BuildError: it can neither be found nor compiled, or does not load.
    """
    # Global, because the backend and every kernel library refer to the runtime without being linked to it.
    artifact, _ = _obtain(builder, "device runtime")
    return ctypes.CDLL(str(artifact.path), mode=ctypes.RTLD_GLOBAL)


def load_backend(builder: BackendBuilder) -> str:
    """Register the device with torch. The runtime must be loaded. Raises as `load_runtime`.

    Returns:
        The functions of ``runtime.h`` that the runtime lacks, as they are declared there, with "; " between them.
    """
    _, backend = _obtain(builder, "torch backend of the device")
    assert isinstance(backend, ctypes.CDLL)
    backend.ds_device_missing_functions.restype = ctypes.c_char_p
    missing: bytes = backend.ds_device_missing_functions()
    return missing.decode()


def _obtain(builder: CppOpBuilder, what: str) -> tuple[Artifact, ModuleType | ctypes.CDLL]:
    spec = builder.build_spec()
    compiling = jit.find(spec) is None and settings.local_rank == 0 and not jit.refusal(spec)
    if compiling:
        _say(f"ds-plugin-sdk: compiling the {what} ({len(spec.sources)} files, once) ...")
    try:
        artifact, library = jit.obtain(spec)
    except BaseException:
        if compiling:
            _say(" failed\n")
        raise
    if compiling:
        _say(f" {artifact.seconds:.0f} s\n")
    return artifact, library


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
