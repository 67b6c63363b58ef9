"""One build on disk, in the cache or in a wheel: a folder with the binary, ``key.json`` and the build's log."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

from ds_plugin_sdk.jit import target, toolchains
from ds_plugin_sdk.jit.machine import STABLE_TORCH, STABLE_TORCH_VERSION
from ds_plugin_sdk.jit.plan import (
    SCHEMA,
    Plan,
    Request,
    Tokens,
    differences,
    digest,
    file_digest,
    lacking,
    stream_digest,
)

KEY_FILE = "key.json"
LOG_FILE = "build.log"

# Contents of key.json: "key" (see `plan.Plan`), "headers" ([path, size, mtime_ns, sha256] each), "binary", and
# "created", "seconds", "reason" for the reader.
Record = Mapping[str, Any]
# What is read of it without looking, and of which type that is.
_PARTS: Mapping[str, type | tuple[type, ...]] = {
    "key.request.op": str,
    "key.request.sources": list,
    "key.arch": str,
    "key.cpu": str,
    "key.abi.torch": str,
    "key.toolchain": dict,
    "headers": list,
    "binary.bytes": int,
    "binary.sha256": str,
    "created": (int, float),
    "seconds": (int, float),
    "reason": str,
}
Header = tuple[str, int, int, str]

_ELF64_HEADER = 64
_SHARED, _LOADED = 3, 1  # types of a file and of its segments


class DamagedError(Exception):
    """An entry is not what its ``key.json`` says; the text says how."""


def describe_headers(paths: Iterable[Path], tokens: Tokens) -> list[Header]:
    """The headers of a build, as ``key.json`` lists them."""
    headers = []
    for path in sorted(set(paths)):
        state = path.stat()
        headers.append((tokens.write(str(path)), state.st_size, state.st_mtime_ns, file_digest(path)))
    return headers


def content_key(direct: str, headers: Sequence[Header]) -> str:
    """Name of an entry's folder: the direct key and the contents of all headers. Time stamps do not count."""
    return digest([direct, [(path, sha256) for path, _, _, sha256 in headers]])


def write(folder: Path, plan: Plan, headers: Sequence[Header], *, seconds: float, reason: str) -> None:
    """Complete `folder`, which holds the binary, with its ``key.json``."""
    binary = folder / plan.spec.library
    record = {
        "key": plan.key,
        "headers": headers,
        "binary": {"bytes": binary.stat().st_size, "sha256": file_digest(binary)},
        "created": time.time(),
        "seconds": round(seconds, 3),
        "reason": reason,
    }
    (folder / KEY_FILE).write_text(json.dumps(record, indent=1), encoding="utf-8")


def read(folder: Path) -> Record:
    """The ``key.json`` of an entry.

    Raises:
        DamagedError: it is missing, unreadable, of another schema, or lacks a part.
    """
    try:
        record = json.loads((folder / KEY_FILE).read_bytes())
        schema = record["key"]["schema"]
    except OSError as error:
        raise DamagedError(f"{folder / KEY_FILE}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{folder / KEY_FILE} is damaged: {error!r}") from error
    if schema != SCHEMA:
        raise DamagedError(f"{folder} has schema {schema}, not {SCHEMA}")
    if part := _wrong_part(record):
        raise DamagedError(f"{folder / KEY_FILE} is damaged: {part} is missing or wrong")
    return record  # type: ignore[no-any-return]  # json that this module wrote


def _wrong_part(record: Record) -> str:
    """The first of `_PARTS` that a record lacks, or that is of another type; empty if none."""
    for name, kind in _PARTS.items():
        part: Any = record
        for key in name.split("."):
            part = part.get(key) if isinstance(part, dict) else None
        if not isinstance(part, kind):
            return name
    return ""


def check_binary(folder: Path, record: Record) -> None:
    """Compare the binary with its digest.

    Raises:
        DamagedError: it is missing, truncated or altered.
    """
    with _opened(folder / f"{record['key']['request']['op']}.so") as file:
        _compare(file, record)


def check_whole(folder: Path, record: Record) -> None:
    """See that nothing is missing at the end of a binary in a wheel. Its digest may be another one: distributions strip
    what they pack, or write paths into it. It is trusted as the wheel's Python is.

    Raises:
        DamagedError: it is missing, truncated or no library.
    """
    os.close(open_whole(folder / f"{record['key']['request']['op']}.so"))


def open_whole(path: Path) -> int:
    """A descriptor of the binary `path`. Raises as `check_whole`."""
    with _opened(path) as file:
        size = _state(file).size
        end = _end_of_segments(file, size)
        if end is None:
            raise DamagedError(f"{path} is no library")
        if end > size:
            raise DamagedError(f"{path} is truncated: it has {size} bytes, of at least {end}")
        return os.dup(file.fileno())


def _end_of_segments(file: BufferedReader, size: int) -> int | None:
    """How far a file of so many bytes must reach to be loaded; None if it is no shared library of 64 bits: elf(5)."""
    header = file.read(_ELF64_HEADER)
    if header[:5] != b"\x7fELF\x02" or len(header) < _ELF64_HEADER:
        return None
    order = ">" if header[5] == 2 else "<"
    (kind,) = struct.unpack_from(f"{order}16xH", header)
    if kind != _SHARED:
        return None
    first, bytes_each, count = struct.unpack_from(f"{order}32xQ14xHH", header)
    segment = struct.Struct(f"{order}I4xQ16xQ{max(bytes_each, 40) - 40}x")  # type, offset, size in the file
    end_of_table: int = first + segment.size * count
    if end_of_table > size:
        return end_of_table
    file.seek(first)
    table = file.read(segment.size * count)
    ends = [offset + length for type, offset, length in segment.iter_unpack(table) if type == _LOADED]
    return max(ends, default=None)


def open_binary(path: Path, record: Record) -> int:
    """A descriptor of the binary `path`, which is what its digest says: read through it, now or by `check_binary`.

    Raises:
        DamagedError: it is missing, truncated or altered.
    """
    with _opened(path) as file:
        if _checked.get(_state(file)) != record["binary"]["sha256"]:
            _compare(file, record)
        return os.dup(file.fileno())


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise DamagedError(f"{path.parent}: {error.strerror}") from error


def _compare(file: BufferedReader, record: Record) -> None:
    state, expected = _state(file), record["binary"]
    if state.size != expected["bytes"]:
        raise DamagedError(f"{file.name} has {state.size} bytes instead of {expected['bytes']}")
    if stream_digest(file) != expected["sha256"]:
        raise DamagedError(f"{file.name} does not match its SHA-256 in {KEY_FILE}")
    _checked[state] = expected["sha256"]


class _State(NamedTuple):
    """A file, and whether it was written since."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def _state(file: BufferedReader) -> _State:
    state = os.fstat(file.fileno())
    return _State(state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


def outdated(record: Record, plan: Plan) -> str:
    """Why a build of `plan` is not what the plan would give now; empty if it is.

    Raises:
        DamagedError: it is not a build of `plan`, though it lies where those do.
    """
    if digest(record["key"]) != plan.direct:
        raise DamagedError(f"a {KEY_FILE} does not belong to its folder {plan.direct}")
    return stale_header(record, plan.request.tokens)


def stale_header(record: Record, tokens: Tokens, *, own_only: bool = False) -> str:
    """What became of the first header that is no longer as it was; empty if all are.

    A foreign header of the same size and time stamp is taken to be the same file; the op's own, which people edit,
    are read. With `own_only`, foreign headers do not matter.
    """
    for path, size, mtime_ns, sha256 in record["headers"]:
        own = tokens.is_own(path)
        if own_only and not own:
            continue
        real = tokens.read(path)
        try:
            state = os.stat(real)  # noqa: PTH116  # faster than pathlib, for hundreds
            if not own and (state.st_size, state.st_mtime_ns) == (size, mtime_ns):
                continue
            if state.st_size != size or file_digest(real) != sha256:
                return f"header {path} changed"
        except OSError:
            return f"header {path} is gone"
    return ""


def misfit(record: Record, request: Request) -> str:
    """Why a binary made elsewhere, by a compiler that we may not have, does not fit `request`; empty if it does.

    It fits if it was made of the same sources, own headers and arguments, and this machine's CPU, GPUs, torch and
    Python can run it.
    """
    key, spec, here = record["key"], request.spec, request.machine
    if key["arch"] != here.target.arch:
        return f"it is for {key['arch']}, not for {here.target.arch}"
    if lines := lacking(key["request"], request.facts):
        return "it was built from something else: " + "; ".join(lines)
    # A model that the user names now, as when it was made, is taken to be this CPU's.
    claimed = key["cpu"] == request.cpu and not target.is_level(key["arch"], key["cpu"])
    if not claimed and not here.target.runs(key["cpu"]):
        return f"it is for CPUs of {key['cpu']}, and this one is {here.target.level or 'unknown'}"
    on_devices = toolchains.get_toolchain(spec.toolchain).misfit(key["toolchain"])
    if reason := on_devices or "; ".join(differences(key["abi"], here.abi(spec))):
        return reason
    if spec.stable and here.torch.release < STABLE_TORCH:
        return f"it needs torch {STABLE_TORCH_VERSION} or later, not {here.torch.version}"
    stale = stale_header(record, request.tokens, own_only=True)
    if stale.startswith(("header $sdk/", "header $kernels/")):
        stale += (
            ": it was made for another ds-plugin-sdk; install that one, or what the plugin's makers made for this one"
        )
    return stale


def user_args(record: Record) -> tuple[str, ...]:
    """What the user added to the commands of a build, as `plan.Request` has it."""
    return tuple(record["key"].get("user_args", ()))


@dataclass(frozen=True)
class Search:
    """Outcome of a search.

    Attributes:
        path: the folder of the entry found, or None.
        record: its ``key.json``; empty if none was found.
        reasons: why the others that were looked at do not do.
        useless: those of them that nobody can use: damaged, open to others, or failed to load.
    """

    path: Path | None
    record: Record
    reasons: tuple[str, ...] = ()
    useless: tuple[Path, ...] = ()


def search(
    folders: Iterable[Path],
    unfit: Callable[[Record], str],
    distrust: Callable[[Path], str] | None = None,
    check: Callable[[Path, Record], None] = check_binary,
) -> Search:
    """The first entry of `folders` that is whole, by `check`, and loads, and that neither test has a reason against.

    `distrust` judges the folder before anything in it is read.
    """
    reasons: list[str] = []
    useless: list[Path] = []
    for folder in folders:
        try:
            if distrust and (reason := distrust(folder)):
                raise DamagedError(reason)
            record = read(folder)
            if reason := unfit(record):
                reasons.append(reason)
                continue
            check(folder, record)
            if reason := _rejected.get(_identity(folder, record), ""):
                raise DamagedError(reason)
            return Search(folder, record, tuple(reasons), tuple(useless))
        except DamagedError as error:
            reasons.append(str(error))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reasons.append(f"{folder / KEY_FILE} is damaged: {error!r}")
        useless.append(folder)
    return Search(None, {}, tuple(reasons), tuple(useless))


def reject(folder: Path, record: Record, reason: str) -> None:
    """Do not offer this build again in this process: it is whole, but could not be loaded."""
    _rejected[_identity(folder, record)] = reason


def _identity(folder: Path, record: Record) -> tuple[Path, float]:
    """One build, as opposed to a later one in the same place."""
    return folder, float(record["created"])


_rejected: dict[tuple[Path, float], str] = {}
_checked: dict[_State, str] = {}  # digests of the binaries that were compared
