"""Which collectives the CPU has, and what of Intel's former extensions to torch has no part in them."""

from __future__ import annotations

import functools
import importlib.metadata
import warnings

import torch

_BINDINGS = "oneccl-bindings-for-pytorch"
_IPEX = "intel-extension-for-pytorch"


def choose() -> tuple[str, str]:
    """The torch.distributed backend, and why: ``ccl`` only where a library has registered it, else ``gloo``."""
    if "ccl" in torch.distributed.Backend.backend_list:
        return "ccl", "oneCCL has registered itself with torch.distributed"
    version = _version(_BINDINGS)
    if version is None:
        return "gloo", "part of torch"
    return "gloo", f"{_BINDINGS} {version} is installed, but has registered no backend with this torch"


def ipex() -> str | None:
    """Why intel-extension-for-pytorch, if it is installed, has no part here; told by its metadata alone."""
    version = _version(_IPEX)
    if version is None:
        return None
    return (
        f"{_IPEX} {version} is installed and not used: it ended with torch 2.8, its optimisations are in torch or in "
        f"the SDK's kernels, and no op of this plugin calls it"
    )


@functools.cache
def warn_of_ipex() -> None:
    """Say once in a process that intel-extension-for-pytorch has no part here."""
    found = ipex()
    if found is not None:
        warnings.warn(f"ds-plugin-cpu: {found}; pip uninstall {_IPEX}", RuntimeWarning, stacklevel=3)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
