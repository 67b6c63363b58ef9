"""What `sdk cache` shows and does. See `store` for how the cache works."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ds_plugin_sdk.jit import entry, objects
from ds_plugin_sdk.jit.entry import KEY_FILE, DamagedError, Record
from ds_plugin_sdk.jit.plan import differences
from ds_plugin_sdk.jit.store import Store, root

__all__ = ["Entry", "Pruned", "entries", "prune", "root", "unreadable", "unusable", "verify", "why"]


@dataclass(frozen=True)
class Entry:
    """One build in the cache.

    Attributes:
        owner: plugin of the op.
        op: name of the op.
        path: the entry's folder.
        bytes: size of its files.
        created: when it was built, seconds since the epoch.
        last_used: when it was last used, seconds since the epoch, to the hour.
        key: the contents of its ``key.json``; empty if unreadable.
    """

    owner: str
    op: str
    path: Path
    bytes: int
    created: float
    last_used: float
    key: Record


def entries(op: str = "*") -> list[Entry]:
    """Every build in the cache (of one op), the newest first."""
    found = [entry_at for folder in Store(root()).entries(op=op) if (entry_at := _describe(folder))]
    return sorted(found, key=lambda item: item.created, reverse=True)


def unusable() -> str:
    """Why nothing can be built into the cache; empty if it can."""
    store = Store(root())
    return store.unusable(store.base)


def unreadable() -> str:
    """Why this user cannot see what is in the cache; empty if they can."""
    return Store(root()).unreadable()


def verify() -> list[str]:
    """What is wrong in the cache, a line each: damaged binaries, unreadable keys, folders that others can write."""
    store = Store(root())
    problems = []
    for item in entries():
        if reason := store.distrust_entry(item.path):
            problems.append(reason)
        try:
            entry.check_binary(item.path, entry.read(item.path))
        except DamagedError as error:
            problems.append(str(error))
    return problems


class Pruned(NamedTuple):
    """What `prune` has done.

    Attributes:
        removed: the entries that are gone.
        kept: those that should be, and why each is not.
    """

    removed: list[Entry]
    kept: list[tuple[Entry, str]]


def prune(*, max_bytes: int | None = None, older_than: float | None = None, everything: bool = False) -> Pruned:
    """Remove entries, and all object files; processes that use them are not disturbed, but for those of other hosts on
    a file system that keeps no removed file for them, as NFS.

    Args:
        max_bytes: remove the least recently used until the cache is no larger than this.
        older_than: remove those unused for so many seconds.
        everything: remove all.
    """
    store = Store(root())
    objects.remove(store)
    now = time.time()
    total = 0
    pruned = Pruned([], [])
    for item in sorted(entries(), key=lambda item: item.last_used, reverse=True):
        total += item.bytes
        old = older_than is not None and now - item.last_used > older_than
        excess = max_bytes is not None and total > max_bytes
        if not (everything or old or excess):
            continue
        if why_not := store.discard(item.path):
            pruned.kept.append((item, why_not))
        else:
            pruned.removed.append(item)
            total -= item.bytes
    return pruned


def why(op: str) -> list[str]:
    """What each build of `op` was made of and why, the newest first, with the changes from the one before it.

    Empty if the cache has no build of it.
    """
    lines: list[str] = []
    found = entries(op)
    for position, item in enumerate(found):
        before = next((other for other in found[position + 1 :] if other.owner == item.owner and other.key), None)
        lines.append(f"{item.op} of {item.owner}, {time.strftime('%F %T', time.localtime(item.created))}: {item.path}")
        try:
            lines += [*_tell(item), *_changes_since(before, item)]
        except (KeyError, TypeError, ValueError, AttributeError):  # nobody but this package writes such files
            lines.append(f"  {KEY_FILE} is damaged")
    return lines


def _tell(item: Entry) -> Iterator[str]:
    if not item.key:
        yield f"  {KEY_FILE} cannot be read"
        return
    key = item.key["key"]
    for role, facts in key["toolchain"].items():
        if isinstance(facts, dict):
            yield f"  {role}: {facts['path']} {facts['version']}"
    yield f"  for {key['arch']} {key['cpu'] or '(any CPU)'}, torch {key['abi']['torch']}"
    yield f"  {len(key['request']['sources'])} sources, {len(item.key['headers'])} headers, {item.bytes} bytes"
    yield f"  {item.key['reason']} ({item.key['seconds']} s)"


def _changes_since(before: Entry | None, item: Entry) -> list[str]:
    changes = _changes(before.key, item.key) if before is not None and item.key else []
    return [f"  since the one before: {change}" for change in changes]


def _changes(old: Record, new: Record) -> list[str]:
    changes = differences({**old["key"], "commands": ()}, {**new["key"], "commands": ()})
    before = {path: sha256 for path, _, _, sha256 in old["headers"]}
    after = {path: sha256 for path, _, _, sha256 in new["headers"]}
    changed = sorted(path for path in before.keys() & after.keys() if before[path] != after[path])
    return [*changes, *(f"header {path} changed" for path in changed)]


def _describe(folder: Path) -> Entry | None:
    """The entry in `folder`; None if it was removed meanwhile."""
    try:
        size = sum(file.stat().st_size for file in folder.iterdir())
        created = folder.stat().st_mtime
    except OSError:
        return None
    try:
        record: Record = entry.read(folder)
        used = (folder / KEY_FILE).stat().st_mtime
    except (DamagedError, OSError):
        record, used = {}, created
    return Entry(folder.parts[-4], folder.parts[-3], folder, size, float(record.get("created", created)), used, record)
