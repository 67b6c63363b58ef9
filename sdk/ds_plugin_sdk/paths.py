"""Where the kernel sources shipped with the SDK are."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def kernels_root() -> Path:
    """Folder of the SDK's kernel sources: inside the wheel, or at the top of a source checkout."""
    installed = _PACKAGE / "kernels"
    return installed if installed.is_dir() else _PACKAGE.parents[1] / "kernels"


def sdk_root() -> Path:
    """Folder of this package, which has the headers of a device's runtime."""
    return Path(__file__).resolve().parent
