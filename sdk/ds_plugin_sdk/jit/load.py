"""Load a binary into this process. The one part of the JIT that imports torch."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import re
from types import ModuleType

from ds_plugin_sdk.errors import ArtifactError
from ds_plugin_sdk.jit import entry
from ds_plugin_sdk.jit.spec import Artifact, BuildSpec

_modules: dict[str, ModuleType] = {}


def load(artifact: Artifact, spec: BuildSpec) -> ModuleType | None:
    """Load what `acquire` returned.

    Returns:
        The pybind11 module, the same one for the same binary; None for a torch library, which has registered its
        kernels with torch's dispatcher.

    Raises:
        ArtifactError: the binary cannot be loaded. It is not offered again in this process: another `acquire` gives
            the next best one.
    """
    import torch  # its libraries must be in the process first: binaries carry no path to them

    path = str(artifact.path)
    try:
        if spec.kind == "torch_library":
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]  # torch does not say
            return None
        if path not in _modules:
            _modules[path] = _import(path, spec)
        return _modules[path]
    except (OSError, ImportError, RuntimeError) as error:
        why = str(error).strip()
        entry.reject(artifact.path.parent, artifact.key, f"{path} could not be loaded: {why}")
        raise ArtifactError(
            f"the {artifact.origin} binary could not be loaded", plugin=spec.owner, op=spec.name, why=why,
            hint=f"it is {path}; `sdk cache why {spec.name}` says what it was made of",
        ) from error  # fmt: skip


def _import(path: str, spec: BuildSpec) -> ModuleType:
    # The last component names the init function; the others keep equal op names of two plugins apart.
    name = f"ds_plugin_sdk._native.{re.sub(r'[^A-Za-z0-9_]', '_', spec.owner)}.{spec.name}"
    loader = importlib.machinery.ExtensionFileLoader(name, path)
    found = importlib.util.spec_from_file_location(name, path, loader=loader)
    if found is None:
        raise ImportError(f"{path} is not an extension module")
    module = importlib.util.module_from_spec(found)
    loader.exec_module(module)
    return module
