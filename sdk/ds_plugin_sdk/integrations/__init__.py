"""The SDK inside other libraries: a package or module each, and nothing outside of it knows its library's internals."""

from __future__ import annotations

import importlib.metadata

# Distributions that start DeepSpeed for the user, on a device which they would look for themselves.
_FOLLOWERS = ("accelerate", "transformers", "lightning", "pytorch-lightning", "lightning-fabric")


def followers() -> dict[str, str]:
    """Those libraries that are installed and follow DeepSpeed's accelerator, with their versions."""
    found = {}
    for name in _FOLLOWERS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
