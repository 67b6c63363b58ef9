"""Where each op of this process came from: one record a load, kept in memory and, if asked, appended to a file.

``DS_PLUGIN_PROVENANCE=FILE`` makes every process of a run (all ranks) append its records as JSON lines, so that one
table can be made of the run afterwards: ``sdk report --run FILE``.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import threading
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from ds_plugin_sdk.errors import SdkError
from ds_plugin_sdk.settings import settings

Origin = Literal["prebuilt", "cache", "compiled", "reference", "lent", "accelerator"]


@dataclass(frozen=True)
class Record:
    """One op (or the accelerator itself) as this process obtained it.

    Attributes:
        name: op name as in ``OpBuilder.NAME``, or the accelerator's device name.
        plugin: name of the plugin that provides it.
        version: version of that plugin's distribution.
        origin: where the native code came from; ``reference`` is plain torch, ``lent`` is DeepSpeed's own op.
        seconds: time spent obtaining it (compiling, or finding and loading).
        detail: the binary's path, or why the reference is used.
        rank: of the process; where the launcher does not say it, its local rank.
    """

    name: str
    plugin: str
    version: str
    origin: Origin
    seconds: float
    detail: str
    rank: int


_BEGIN = '{"name":'  # of a record's line
_records: list[Record] = []
_lock = threading.Lock()


def record(name: str, *, plugin: str, version: str, origin: Origin, seconds: float = 0.0, detail: str = "") -> None:
    """Remember one load, and append it to ``DS_PLUGIN_PROVENANCE`` if that is set."""
    rank = settings.local_rank if settings.rank is None else settings.rank
    entry = Record(name, plugin, version, origin, seconds, detail, rank)
    with _lock:
        _records.append(entry)
    if settings.provenance_file is not None:
        try:
            # One short write in append mode: lines of several ranks do not mix. On NFS that takes a lock, too.
            with settings.provenance_file.open("a", encoding="utf-8") as file:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.lockf(file, fcntl.LOCK_EX)
                file.write(json.dumps(asdict(entry)) + "\n")
        except OSError as error:
            _warn_once(settings.provenance_file, str(error))


@functools.cache
def _warn_once(file: Path, why: str) -> None:
    """A report that cannot be written is no reason to fail an op."""
    with contextlib.suppress(Warning):  # under -W error it is an exception
        warnings.warn(f"DS_PLUGIN_PROVENANCE={file} cannot be written: {why}", RuntimeWarning, stacklevel=3)


def records() -> tuple[Record, ...]:
    """What this process loaded so far, in order."""
    with _lock:
        return tuple(_records)


def read(file: Path) -> tuple[list[Record], list[int]]:
    """The records of a whole run, as ``DS_PLUGIN_PROVENANCE`` collected them.

    Returns:
        The records, and the numbers, from 1, of lines that are none: the last one of a rank that was killed, or of a
        disk that was full.

    Raises:
        SdkError: no line of the file is a record.
    """
    found, others = [], []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        entry = _parsed(line)
        if entry is None and line:
            others.append(number)
            entry = _parsed(line[line.rfind(_BEGIN) :])  # the next rank has gone on in the line that was cut off
        if entry is not None:
            found.append(entry)
    if not found:
        raise SdkError(
            f"{file} has no record of a run",
            why=f"it has {len(others)} lines, and none is one",
            hint="set DS_PLUGIN_PROVENANCE=FILE for a run, and give that file",
        )
    return found, others


def _parsed(line: str) -> Record | None:
    try:
        return Record(**json.loads(line))
    except (ValueError, TypeError):
        return None
