"""What is kept of a build that failed: its log, and a note that says of what it was, so that a report can tell.

    <root>/v1/.failed/<owner>.<op>.log     what the compiler said
    <root>/v1/.failed/<owner>.<op>.json    what it was a build of, when, and the error

The note is of the latest failure. It is gone once the op is built.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from ds_plugin_sdk.errors import CompileError
from ds_plugin_sdk.jit.compile import own_headers
from ds_plugin_sdk.jit.plan import Plan
from ds_plugin_sdk.jit.store import Store


def keep(error: CompileError, log: Path, place: Store, plan: Plan) -> None:
    """Keep log and note, and say in `error` where the log is; where there is no space for them, they are lost."""
    kept, noted = _files(place, plan)
    with contextlib.suppress(OSError):
        place.make_folder(kept.parent)
        log.replace(kept)
        error.hint = "\n  -> ".join(filter(None, (error.hint, f"log: {kept}")))
        note = {"direct": plan.direct, "headers": own_headers(plan), "why": error.why, "time": time.time()}
        written = log.with_name(noted.name)
        written.write_text(json.dumps(note, indent=1), encoding="utf-8")
        written.replace(noted)


def forget(place: Store, plan: Plan) -> None:
    """The op has been built."""
    with contextlib.suppress(OSError):
        _files(place, plan)[1].unlink()


def latest(place: Store, plan: Plan) -> str:
    """When and why the latest build of `plan`, as its files are now, failed, and its log; empty if none did."""
    log, noted = _files(place, plan)
    try:
        note = json.loads(noted.read_bytes())
        same = (note["direct"], note["headers"]) == (plan.direct, own_headers(plan))
        when = time.strftime("%F %T", time.localtime(note["time"]))
        return f"the build of {when} failed: {note['why']}; log: {log}" if same else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _files(place: Store, plan: Plan) -> tuple[Path, Path]:
    name = f"{plan.spec.owner}.{plan.spec.name}"
    return place.base / ".failed" / f"{name}.log", place.base / ".failed" / f"{name}.json"
