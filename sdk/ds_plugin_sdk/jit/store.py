"""A folder of immutable entries, read without a lock.

    <root>/v1/<owner>/<op>/<direct key>/<content key>/{<op>.so, key.json, build.log}
    <root>/v1/.build/      private folders of builds in progress, and of entries on their way out
    <root>/v1/.locks/      see `lock`
    <root>/v1/.failed/     see `failures`
    <root>/v1/.objects/    see `objects`

An entry is made in ``.build`` and renamed into place: it is there whole or not at all, and two builders who race may
both continue. Nothing in it changes afterwards but the time stamp of ``key.json``, which says when it was last used.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import grp
import os
import pwd
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from ds_plugin_sdk.errors import CompileError
from ds_plugin_sdk.jit import entry
from ds_plugin_sdk.jit.entry import DamagedError, Record, Search
from ds_plugin_sdk.jit.plan import SCHEMA, Plan, Request
from ds_plugin_sdk.settings import settings

_ABANDONED_SECONDS = 24 * 3600
_TOUCH_SECONDS = 3600
# Longer than the way from any folder of the store to a binary in it, which is some 100 to 180 characters.
_LONGEST = Path(*("0" * 64 for _ in range(3)))


class Store:
    """The cache below one root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = root / f"v{SCHEMA}"
        # A folder that was named may serve others, who read it as far as the umask allows; the rest is the user's own.
        self._mode = 0o755 if root == _named_root() else 0o700

    def home(self, plan: Plan) -> Path:
        """The folder of all builds of `plan`."""
        return self.base / plan.spec.owner / plan.spec.name / plan.direct

    def entries(self, owner: str = "*", op: str = "*") -> list[Path]:
        """The folders of all entries (of an owner, of an op)."""
        with contextlib.suppress(OSError):  # of `base` itself; `glob` passes over what is below it and cannot be read
            return [path for path in self.base.glob(f"{owner}/{op}/*/*") if not path.parts[-4].startswith(".")]
        return []

    def unusable(self, home: Path) -> str:
        """Why nothing can be built into `home`, a folder of this store; empty if it can."""
        try:
            home = _nearest(home / _LONGEST)
        except OSError as error:
            return f"{home}: {error.strerror}"
        if reason := _closed(home) or self.noexec():
            return reason
        if not os.access(home, os.W_OK):
            return f"{home} cannot be written"
        return self.distrust(home) if home.is_relative_to(self.root) else exposed(self.root)

    def make(self) -> str:
        """Make the store's folder. Returns why that failed; empty if it did not.

        `unusable` cannot tell: root may write in /proc, says the system, and where folders are mounted when asked for.
        """
        try:
            self.make_folder(self.base)
        except OSError as error:
            return f"{error.filename} cannot be made: {error.strerror}"
        return ""

    def unreadable(self) -> str:
        """Why this user cannot see what is in the store; empty if they can."""
        try:
            return _closed(_nearest(self.base))
        except OSError as error:
            return f"{self.base}: {error.strerror}"

    def noexec(self) -> str:
        """Why no binary can be loaded from the store: its file system forbids that. Empty if it does not."""
        with contextlib.suppress(OSError):
            if os.statvfs(_nearest(self.base)).f_flag & os.ST_NOEXEC:
                return f"{self.root} lies on a file system that is mounted noexec: nothing can be loaded from there"
        return ""

    def distrust(self, folder: Path) -> str:
        """Why others could have made `folder`, which lies in this store, what it is; empty if they could not."""
        while not (why := distrust(folder)) and folder != self.root:
            folder = folder.parent
        return why or exposed(self.root)

    def distrust_entry(self, folder: Path) -> str:
        """Why the binary of an entry may not be loaded: others could have put it there. Empty if it may."""
        return self.distrust(folder) or next(filter(None, map(distrust, children(folder))), "")

    def lookup(self, plan: Plan) -> Search:
        """The entry of `plan` whose headers are as they are now."""
        folders = [] if self.noexec() else children(self.home(plan))
        return entry.search(folders, lambda record: entry.outdated(record, plan), self.distrust_entry)

    def lookup_alike(self, request: Request) -> Search:
        """An entry that was made of the same sources and runs here, whichever compiler made it.

        The newest of those with the user's arguments of now, else the newest.
        """
        if reason := self.noexec():
            return Search(None, {}, (reason,))
        folders = sorted(self.entries(request.spec.owner, request.spec.name), key=_made, reverse=True)

        def unfit(record: Record) -> str:
            return entry.misfit(record, request)

        def otherwise_made(record: Record) -> str:
            return "" if entry.user_args(record) == request.user_args else "it was made with other arguments"

        alike = entry.search(folders, lambda record: otherwise_made(record) or unfit(record), self.distrust_entry)
        return alike if alike.path else entry.search(folders, unfit, self.distrust_entry)

    def newest(self, owner: str, op: str) -> Record | None:
        """The ``key.json`` of the latest build of an op, whatever it was made of."""
        records = []
        for folder in self.entries(owner, op):
            with contextlib.suppress(DamagedError):
                records.append(entry.read(folder))
        return max(records, key=lambda record: float(record["created"]), default=None)

    def make_folder(self, folder: Path) -> None:
        """Make `folder`, which lies in this store, and its missing parents. Nobody else can write to them, but for a
        group that is trusted and shares the store.
        """
        missing = []
        while not folder.exists():
            missing.append(folder)
            folder = folder.parent
        for new in reversed(missing):
            with contextlib.suppress(FileExistsError):
                new.mkdir(mode=self._mode)
                if self.root == _named_root() and shared_by_group(new.parent):
                    new.chmod(stat.S_IMODE(new.parent.stat().st_mode))

    def workplace(self, name: str) -> AbstractContextManager[Path]:
        """A new private folder on the store's file system; gone afterwards, with all that is still in it."""
        parent = self.base / ".build"
        self.make_folder(parent)
        _remove_abandoned(parent)
        return private_folder(parent, f"{name}-{os.getpid()}-")

    def publish(self, built: Path, place: Path) -> Path:
        """Move a finished entry to its place; if another builder was faster, theirs stays and ours is dropped."""
        self.make_folder(place.parent)
        if self.root == _named_root() and shared_by_group(place.parent):
            for each in (built, *built.iterdir()):  # whatever this user's umask
                mode = stat.S_IMODE(each.stat().st_mode)
                each.chmod(mode | (mode & 0o500) >> 3)
        try:
            built.rename(place)
        except OSError:
            # Not every file system says ENOTEMPTY or EEXIST of a folder that is there: SSHFS says EPERM.
            if not (place / entry.KEY_FILE).is_file():
                raise
        return place

    def discard(self, folder: Path) -> str:
        """Take an entry out, whole at once, then delete it. Returns why that is not possible here; empty if it was."""
        try:
            with self.workplace("discarded") as trash:
                folder.rename(trash / folder.name)
        except OSError as error:
            if not os.path.lexists(folder):  # another process may have been faster
                return ""
            if error.errno not in (errno.EXDEV, errno.ENOSPC, errno.EDQUOT):
                return str(error)
            if why_not := _remove_in_place(folder):
                return why_not
        with contextlib.suppress(OSError):
            folder.parent.rmdir()  # unless other builds of the same plan are left
        return ""


def root() -> Path:
    """The cache's folder: ``DS_PLUGIN_CACHE_DIR``, else the user's cache folder, else (no home) `private_root`."""
    if (named := _named_root()) is not None:
        return named
    from platformdirs import user_cache_path

    try:
        users = user_cache_path("ds-plugin-sdk")
    except RuntimeError:  # older ones of platformdirs give ~/.cache as it stands
        users = Path()
    return users if users.is_absolute() else private_root()


def _named_root() -> Path | None:
    return settings.cache_dir.absolute() if settings.cache_dir is not None else None


@functools.cache
def private_root() -> Path:
    """Where builds go when `root` cannot be used: a folder of this user below the system's temporary folder, or, where
    somebody else has taken its name, one of this process's own that is removed at exit.

    Raises:
        CompileError: the system has no temporary folder that can be written, as in a container that is read-only.
    """
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise CompileError(
            "there is no folder to build in",
            why=f"neither the cache nor a temporary folder can be written: {error.strerror}",
            hint="TMPDIR or DS_PLUGIN_CACHE_DIR: a folder that this user can write",
        ) from error
    folder = temporary / f"ds-plugin-sdk-{os.geteuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    if _is_private(folder):
        return folder
    folder = Path(tempfile.mkdtemp(prefix="ds-plugin-sdk-"))
    atexit.register(_remove_own, folder, os.getpid())
    return folder


def _is_private(folder: Path) -> bool:
    """Whether it is a folder, and no link to one, that this user alone can enter and write."""
    try:
        state = folder.lstat()
    except OSError:
        return False
    mine = stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o077
    return mine and os.access(folder, os.W_OK | os.X_OK)


def _remove_own(folder: Path, process: int) -> None:
    if os.getpid() == process:  # and no fork of it
        shutil.rmtree(folder, ignore_errors=True)


def shared_by_group(folder: Path) -> bool:
    """Whether all members of a trusted group may write to a folder."""
    return settings.cache_trust_group and bool(folder.stat().st_mode & stat.S_IWGRP)


def distrust(path: Path) -> str:
    """Why a folder or file may be other people's work; empty if only this user and root can write it, and a group of
    this user's that is trusted.
    """
    try:
        state = path.stat()
    except OSError as error:
        return f"{path}: {error.strerror}"
    of_trusted_group = settings.cache_trust_group and state.st_gid in (os.getegid(), *os.getgroups())
    if state.st_uid not in (os.geteuid(), 0) and not of_trusted_group:
        return f"{path} belongs to another user (uid {state.st_uid})"
    return _open_to_others(path, state)


def exposed(folder: Path) -> str:
    """Why others could put a folder of theirs in the place of `folder`, which need not exist; empty if they could not.

    That takes the right to write to one of the folders above it, here or, where links lead elsewhere, there.
    """
    above = folder.parents
    real = os.path.realpath(folder)
    for parent in above if real == str(folder) else (*above, *Path(real).parents):
        try:
            state = parent.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            return f"{parent}: {error.strerror}"
        # In a sticky folder, such as /tmp, only what belongs to oneself can be renamed.
        if not state.st_mode & stat.S_ISVTX and (why := _open_to_others(parent, state)):
            return why
    return ""


def _open_to_others(path: Path, state: os.stat_result) -> str:
    if state.st_mode & stat.S_IWOTH:
        return f"{path} can be written by everybody (`chmod o-w` it)"
    if state.st_mode & stat.S_IWGRP and not settings.cache_trust_group and not _is_own_group(state.st_gid):
        return f"{path} can be written by its group (`chmod g-w` it, or set DS_PLUGIN_CACHE_TRUST_GROUP=1)"
    return ""


@functools.cache
def _is_own_group(group: int) -> bool:
    """Whether a group has no member but this user: root's, or one that bears the user's name, as most systems make."""
    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid())
    except KeyError:
        return group == 0
    return group == 0 or (found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name})


def _nearest(folder: Path) -> Path:
    """`folder`, or the first above it that is there, as far as this user can see.

    Raises:
        OSError: there can be no such folder: its name is too long, links go in a circle ...
    """
    for place in (folder, *folder.parents):
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            continue
        return place
    return folder


def _closed(folder: Path) -> str:
    """Why this user cannot enter `folder`, which is there; empty if they can."""
    if not folder.is_dir():
        return f"{folder} is no folder"
    return "" if os.access(folder, os.X_OK) else f"{folder} cannot be entered by this user"


def children(folder: Path) -> list[Path]:
    """What is in `folder`, which need not exist."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


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


def _remove_in_place(folder: Path) -> str:
    """Delete an entry that cannot be renamed: on a full disk, or in a lower layer of an overlay. Returns why that is
    not possible; empty if it was.
    """
    try:
        (folder / entry.KEY_FILE).unlink(missing_ok=True)  # first: without it the rest is no entry
        shutil.rmtree(folder)
    except OSError as error:
        return str(error) if os.path.lexists(folder) else ""
    return ""


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed builds left behind, once they are certain to be over: none of this process's, whatever clocks
    say.
    """
    for folder in older(parent, _ABANDONED_SECONDS):
        if f"-{os.getpid()}-" not in folder.name:
            shutil.rmtree(folder, ignore_errors=True)


def older(parent: Path, seconds: float) -> Iterator[Path]:
    """The folders in `parent` that are older than so much, by the clock of the file system: that of this process may be
    days ahead of it.
    """
    with contextlib.suppress(OSError):
        os.utime(parent)
        now = parent.stat().st_mtime
        for folder in children(parent):
            with contextlib.suppress(OSError):
                if now - folder.stat().st_mtime > seconds:
                    yield folder
