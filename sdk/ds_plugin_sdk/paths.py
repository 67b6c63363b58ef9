"""Where the kernel sources shipped with the SDK are, and the files of other packages; files written as a whole."""

from __future__ import annotations

import contextlib
import errno
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


def write_whole(file: Path, text: str) -> None:
    """Write a text file that then is there as a whole, or as it was before. Raises OSError.

    Devices, pipes and what links lead to are written as they stand, and so is a file that cannot be exchanged: one that
    is mounted by itself, or in another user's folder.
    """
    if file.is_symlink() or (file.exists() and not file.is_file()):
        file.write_text(text, encoding="utf-8")
        return
    new = file.with_name(f".{file.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        if error.errno not in (errno.EBUSY, errno.EACCES, errno.EPERM) or not file.is_file():
            raise
        file.write_text(text, encoding="utf-8")
