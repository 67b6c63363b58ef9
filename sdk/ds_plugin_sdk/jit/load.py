"""Load a binary into this process. The one part of the JIT that imports torch."""

from __future__ import annotations

import ctypes
import fcntl
import importlib.machinery
import importlib.util
import os
import re
from types import ModuleType

from ds_plugin_sdk.errors import ArtifactError
from ds_plugin_sdk.jit import entry
from ds_plugin_sdk.jit.entry import DamagedError
from ds_plugin_sdk.jit.spec import Artifact, BuildSpec

# By device and inode.
_loaded: dict[tuple[int, int], ModuleType | ctypes.CDLL] = {}
_last_file = 2


def load(artifact: Artifact, spec: BuildSpec) -> ModuleType | ctypes.CDLL:
    """Load what `acquire` returned.

    Returns:
        The pybind11 module, or the library, which has registered its kernels with torch's dispatcher; the same one for
        the same binary.

    Raises:
        ArtifactError: the binary cannot be loaded. It is not offered again in this process: another `acquire` gives
            the next best one.
    """
    try:
        prebuilt = artifact.origin == "prebuilt"
        file = entry.open_whole(artifact.path) if prebuilt else entry.open_binary(artifact.path, artifact.key)
    except DamagedError as error:
        raise _rejected(artifact, spec, str(error)) from error
    try:
        state = os.fstat(file)
        library = state.st_dev, state.st_ino
        if library not in _loaded:
            _loaded[library] = _load(file, artifact, spec)
        return _loaded[library]
    finally:
        os.close(file)


def _load(file: int, artifact: Artifact, spec: BuildSpec) -> ModuleType | ctypes.CDLL:
    import torch  # its libraries must be in the process first: binaries carry no path to them

    path = name = str(artifact.path)
    try:
        # A wheel's binary may look for libraries beside it ($ORIGIN); it is trusted as the wheel's Python is.
        if artifact.origin != "prebuilt":
            name = _name_of(file, path)
        if spec.kind == "torch_library":
            library = ctypes.CDLL(name)  # as torch.ops.load_library does, which follows links first
            torch.ops.loaded_libraries.add(path)
            return library
        return _import(name, path, spec)
    except (OSError, ImportError, RuntimeError) as error:
        raise _rejected(artifact, spec, str(error).strip().replace(name, path)) from error


def _rejected(artifact: Artifact, spec: BuildSpec, why: str) -> ArtifactError:
    path = artifact.path
    hint = f"it is {path}; `sdk cache why {spec.name}` says what it was made of"
    if "cannot open shared object file" in why:  # of one that it needs
        hint += "; extra_ldflags() of the builder can say where a library is, -Wl,-rpath,FOLDER, or LD_LIBRARY_PATH"
    entry.reject(path.parent, artifact.key, f"{path} could not be loaded: {why}")
    return ArtifactError(
        f"the {artifact.origin} binary could not be loaded",
        plugin=spec.owner,
        op=spec.name,
        why=why,
        hint=hint,
    )


def _name_of(file: int, path: str) -> str:
    """A name of the open file, whatever lies at its path by now; its path where there is no /proc, or no number left.

    The file stays open, under a number that was not used before: the loader takes two files of one name for one.
    """
    global _last_file
    try:
        _last_file = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _last_file + 1)
    except OSError:  # no number is left below the limit on open files
        return path
    name = f"/proc/self/fd/{_last_file}"
    return name if os.path.exists(name) else path  # noqa: PTH110  # a string for dlopen


def _import(loaded_as: str, path: str, spec: BuildSpec) -> ModuleType:
    # The last component names the init function; the others keep equal op names of two plugins apart.
    name = f"ds_plugin_sdk._native.{re.sub(r'[^A-Za-z0-9_]', '_', spec.owner)}.{spec.name}"
    loader = importlib.machinery.ExtensionFileLoader(name, loaded_as)
    found = importlib.util.spec_from_file_location(name, loaded_as, loader=loader)
    if found is None:
        raise ImportError(f"{path} is not an extension module")
    module = importlib.util.module_from_spec(found)
    loader.exec_module(module)
    module.__file__ = found.origin = path
    return module
