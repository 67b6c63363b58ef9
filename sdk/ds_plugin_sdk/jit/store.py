"""A folder of immutable entries, read without a lock.

    <root>/v1/<owner>/<op>/<direct key>/<content key>/{<op>.so, key.json, build.log}
    <root>/v1/.build/      private folders of builds in progress, and of entries on their way out
    <root>/v1/.locks/      see `lock`
    <root>/v1/.failed/     logs of failed builds

An entry is made in ``.build`` and renamed into place: it is there whole or not at all, and two builders who race may
both continue. Nothing in it changes afterwards but the time stamp of ``key.json``, which says when it was last used.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from ds_plugin_sdk.jit import entry
from ds_plugin_sdk.jit.entry import DamagedError, Record, Search
from ds_plugin_sdk.jit.plan import SCHEMA, Plan, Request
from ds_plugin_sdk.settings import settings

_ABANDONED_SECONDS = 24 * 3600
_TOUCH_SECONDS = 3600


class Store:
    """The cache below one root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = root / f"v{SCHEMA}"

    def home(self, plan: Plan) -> Path:
        """The folder of all builds of `plan`."""
        return self.base / plan.spec.owner / plan.spec.name / plan.direct

    def entries(self, owner: str = "*", op: str = "*") -> list[Path]:
        """The folders of all entries (of an owner, of an op)."""
        return [path for path in self.base.glob(f"{owner}/{op}/*/*") if not path.parts[-4].startswith(".")]

    def unusable(self, home: Path) -> str:
        """Why nothing can be built into `home`, a folder of this store; empty if it can."""
        while not home.exists() and home != home.parent:
            home = home.parent
        if not os.access(home, os.W_OK | os.X_OK):
            return f"{home} cannot be written"
        return self.distrust(home) if home.is_relative_to(self.root) else ""

    def distrust(self, folder: Path) -> str:
        """Why binaries in `folder`, which lies in this store, may not be loaded; empty if they may."""
        while not (why := distrust(folder)) and folder != self.root:
            folder = folder.parent
        return why

    def lookup(self, plan: Plan) -> Search:
        """The entry of `plan` whose headers are as they are now."""
        return entry.search(children(self.home(plan)), lambda record: entry.outdated(record, plan), self.distrust)

    def lookup_alike(self, request: Request) -> Search:
        """An entry that was made of the same sources and runs here, whichever compiler made it; the newest first."""
        folders = self.entries(request.spec.owner, request.spec.name)
        return entry.search(
            sorted(folders, key=_made, reverse=True), lambda record: entry.misfit(record, request), self.distrust
        )

    def newest(self, owner: str, op: str) -> Record | None:
        """The ``key.json`` of the latest build of an op, whatever it was made of."""
        records = []
        for folder in self.entries(owner, op):
            with contextlib.suppress(DamagedError):
                records.append(entry.read(folder))
        return max(records, key=lambda record: float(record["created"]), default=None)

    def workplace(self, name: str) -> AbstractContextManager[Path]:
        """A new private folder on the store's file system; gone afterwards, with all that is still in it."""
        parent = self.base / ".build"
        make_private(parent)
        _remove_abandoned(parent)
        return private_folder(parent, f"{name}-{os.getpid()}-")

    def publish(self, built: Path, place: Path) -> Path:
        """Move a finished entry to its place; if another builder was faster, theirs stays and ours is dropped."""
        make_private(place.parent)
        try:
            built.rename(place)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        return place

    def discard(self, folder: Path) -> bool:
        """Take an entry out, whole at once, then delete it. False if that is not possible here."""
        try:
            with self.workplace("discarded") as trash:
                folder.rename(trash / folder.name)
        except OSError:
            return False
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # unless other builds of the same plan are left
        return True

    def keep_log(self, log: Path, name: str) -> Path | None:
        """Keep the log of a failed build; None if there is no space for it."""
        kept = self.base / ".failed" / f"{name}.log"
        try:
            make_private(kept.parent)
            return log.replace(kept)
        except OSError:
            return None


def root() -> Path:
    """The cache's folder: ``DS_PLUGIN_CACHE_DIR``, else the user's cache folder."""
    if settings.cache_dir is not None:
        return settings.cache_dir.absolute()
    from platformdirs import user_cache_path

    return user_cache_path("ds-plugin-sdk")


@functools.cache
def private_root() -> Path:
    """Where builds go when `root` cannot be used: a folder of this user below the system's temporary folder."""
    folder = Path(tempfile.gettempdir()) / f"ds-plugin-sdk-{os.geteuid()}"
    make_private(folder)
    # Anybody may have made a folder of that name in /tmp before us.
    return Path(tempfile.mkdtemp(prefix="ds-plugin-sdk-")) if distrust(folder) else folder


def distrust(folder: Path) -> str:
    """Why binaries in `folder` may not be loaded: others could have put them there. Empty if they may."""
    try:
        state = folder.stat()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    if state.st_uid not in (os.geteuid(), 0):
        return f"{folder} belongs to another user (uid {state.st_uid})"
    if state.st_mode & stat.S_IWOTH:
        return f"{folder} can be written by everybody"
    return ""


def children(folder: Path) -> list[Path]:
    """What is in `folder`, which need not exist."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def make_private(folder: Path) -> None:
    """Make `folder` and its missing parents, closed to other users."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        with contextlib.suppress(FileExistsError):
            new.mkdir(mode=0o700)


def touch(folder: Path) -> None:
    """Note that an entry was used, if that is possible and was not noted within the hour."""
    key = folder / entry.KEY_FILE
    with contextlib.suppress(OSError):
        if time.time() - key.stat().st_mtime > _TOUCH_SECONDS:
            os.utime(key)


@contextlib.contextmanager
def private_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _made(folder: Path) -> float:
    """When an entry was put into its place; 0 if it is gone."""
    try:
        return folder.stat().st_mtime
    except OSError:
        return 0.0


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed builds left behind, once they are certain to be over."""
    for folder in children(parent):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
