"""Which compiler that is: its resolved path and what it says about itself."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_plugin_sdk.errors import ToolchainError
from ds_plugin_sdk.jit.hints import hint_for
from ds_plugin_sdk.settings import child_environment

# Programs that call the compiler that follows them.
LAUNCHERS = frozenset({"ccache", "sccache", "distcc", "icecc"})

_ANSWER_SECONDS = 60
_REMEMBERED_SECONDS = 600


@dataclass(frozen=True)
class Compiler:
    """A compiler as it is called, and its identity.

    Attributes:
        command: how to call it from any folder, e.g. ``("/usr/bin/ccache", "/usr/bin/g++")``.
        path: the file behind the command, links resolved.
        text: what ``--version`` prints.
    """

    command: tuple[str, ...]
    path: Path
    text: str

    @property
    def version(self) -> str:
        """The version number in `text`: nvcc's release, else the first number of a first line."""
        found = re.search(r"release (\d+(?:\.\d+)+)", self.text) or re.search(r"\d+(?:\.\d+)+", self.text)
        return found[found.lastindex or 0] if found else "of unknown version"

    def identity(self) -> dict[str, object]:
        """What goes into the key."""
        return {"path": str(self.path), "version": self.version, "text": self.text}


def identify(command: Sequence[str]) -> Compiler:
    """Ask a compiler who it is.

    Asked once in ten minutes, process and state of the file: ``--version`` takes milliseconds, a stat microseconds.

    Raises:
        ToolchainError: there is no such program, or it does not answer.
    """
    absolute = _absolute(command)
    path = Path(absolute[0]).resolve()
    stat = path.stat()
    answer = _ask(absolute, path, stat.st_size, stat.st_mtime_ns, int(time.monotonic() // _REMEMBERED_SECONDS))
    if isinstance(answer, Compiler):
        return answer
    raise _unusable(absolute, answer, "does it wait for a licence server, or a file system?")


def answer_to(command: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a compiler says, in English.

    Raises:
        OSError: it cannot be started.
        subprocess.TimeoutExpired: it takes too long.
    """
    return subprocess.run(
        [*command, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_ANSWER_SECONDS,
        env=child_environment(LC_ALL="C"),
        check=False,
    )


def _absolute(command: Sequence[str]) -> tuple[str, ...]:
    """`command` with its programs' paths: it is run in another folder, where relative ones lead elsewhere."""
    first, *rest = command
    program = shutil.which(first)
    if program is None:
        hint = "install it, or put its folder on PATH"
        raise ToolchainError(f"compiler {first!r} was not found", why="no such program on PATH", hint=hint)
    behind = _absolute(rest) if rest and Path(first).name in LAUNCHERS else tuple(rest)
    return str(Path(program).absolute()), *behind  # with links: a compiler may go by the name that it is called by


@functools.cache
def _ask(command: tuple[str, ...], path: Path, size: int, mtime_ns: int, period: int) -> Compiler | str:
    """The compiler; or, where it takes too long, what it does not do: every op asks, and would wait as long again.

    That may pass, as a file system's troubles do: it holds for a period.
    """
    question = f"`{' '.join(command)} --version`"
    try:
        answer = answer_to(command, "--version")
    except subprocess.TimeoutExpired:
        return f"{question} did not answer within {_ANSWER_SECONDS} s"
    except OSError as error:
        raise _unusable(command, str(error), hint_for(str(error))) from error
    if answer.returncode:
        raise _unusable(command, f"{question} exited with {answer.returncode}: {answer.stderr.strip()[:200]}")
    return Compiler(command, path, answer.stdout.strip())


def _unusable(command: Sequence[str], why: str, hint: str = "") -> ToolchainError:
    return ToolchainError(f"compiler {command[0]!r} cannot be used", why=why, hint=hint)
