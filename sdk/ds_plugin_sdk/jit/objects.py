"""Object files of builds, kept for a day: where only the link has changed, by ``LDFLAGS`` say, only that is repeated.

    <root>/v1/.objects/<owner>.<op>.<digest>/{<unit>.o, key.json}

The digest is of all that the compiler depends on but the headers, which ``key.json`` lists as an entry's does. What is
newer replaces what was there; `cache.prune` removes all.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_plugin_sdk.jit import entry
from ds_plugin_sdk.jit.entry import Header
from ds_plugin_sdk.jit.plan import Plan, digest, file_digest
from ds_plugin_sdk.jit.store import Store, children, older

_KEPT_SECONDS = 24 * 3600


def take(plan: Plan, place: Store, work: Path) -> list[Header] | None:
    """Copy the objects of `plan` into `work`, and return their headers; None if there are none of what is there now."""
    folder = _folder(plan, place)
    try:
        record = json.loads((folder / entry.KEY_FILE).read_bytes())
        if place.distrust_entry(folder) or entry.stale_header(record, plan.request.tokens):
            return None
        for name in _names(plan):
            shutil.copyfile(folder / name, work / name)
            if file_digest(work / name) != record["objects"][name]:
                return None
        return [(path, size, mtime_ns, sha256) for path, size, mtime_ns, sha256 in record["headers"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep(plan: Plan, place: Store, work: Path, headers: Sequence[Header]) -> None:
    """Keep the objects in `work`, if there is space, and remove those that are too old."""
    made, folder = work / "objects", _folder(plan, place)
    with contextlib.suppress(OSError):
        for old in older(_root(place), _KEPT_SECONDS):
            place.discard(old)
        made.mkdir(mode=0o700)
        digests = {name: file_digest(work / name) for name in _names(plan)}
        for name in digests:
            (work / name).rename(made / name)
        text = json.dumps({"headers": headers, "objects": digests}, indent=1)
        (made / entry.KEY_FILE).write_text(text, encoding="utf-8")
        for file in made.iterdir():
            file.chmod(0o600)
        place.discard(folder)
        place.make_folder(folder.parent)  # after it, as it removes a folder that it leaves empty
        made.rename(folder)


def remove(place: Store) -> None:
    """Remove all."""
    for folder in children(_root(place)):
        place.discard(folder)


def _root(place: Store) -> Path:
    return place.base / ".objects"


def _folder(plan: Plan, place: Store) -> Path:
    request: Any = plan.key["request"]
    commands: Any = plan.key["commands"]
    seen: Mapping[str, object] = {
        **plan.key,
        "request": {**request, "link_args": []},
        "commands": commands[: len(plan.compile)],
    }
    return _root(place) / f"{plan.spec.owner}.{plan.spec.name}.{digest(seen)}"


def _names(plan: Plan) -> list[str]:
    return [f"{source.stem}.o" for source in plan.spec.sources]
