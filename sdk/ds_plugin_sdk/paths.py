"""Where the kernel sources shipped with the SDK are, and the files of other packages."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

_PACKAGE = Path(__file__).parent.resolve()


def kernels_root() -> Path:
    """Folder of the SDK's kernel sources: inside the wheel, or at the top of a source checkout."""
    installed = _PACKAGE / "kernels"
    return installed if installed.is_dir() else _PACKAGE.parents[1] / "kernels"


def folder_of(module: ModuleType) -> Path:
    """Folder of a package, or of a module's file. A package without ``__init__.py`` has no file.

    The file itself may be a link that an installer made: the module's other files lie beside that.
    """
    folders = [*getattr(module, "__path__", [])]
    return (Path(folders[0]) if folders else Path(str(module.__file__)).parent).resolve()


def sdk_root() -> Path:
    """Folder of this package, which has the headers of a device's runtime."""
    return _PACKAGE
