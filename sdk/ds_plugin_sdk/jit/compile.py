"""Run a plan's commands, and say it well when they fail."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import selectors
import shlex
import signal
import subprocess
import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TextIO

from ds_plugin_sdk.errors import CompileError, ToolchainError
from ds_plugin_sdk.jit.hints import hint_for
from ds_plugin_sdk.jit.plan import Plan, file_digest, source_digests
from ds_plugin_sdk.jit.stopwatch import Stopwatch
from ds_plugin_sdk.settings import child_environment, settings

_log = logging.getLogger("ds_plugin_sdk.jit")

_LOOK_SECONDS = 0.5
_PATIENCE_SECONDS = 30.0  # what files of kernels take on slow machines
_END_SECONDS = 5.0

# Their time stamps are when the commands began and ended.
_BEGIN, _END = "begin", "end"

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)

_ERROR = re.compile(
    r"\berror\b|undefined reference|multiple definition|cannot find|Killed|No space|exceeded|No such file",
    re.IGNORECASE,
)
_LINKER = re.compile(r"^\S*\b(ld|gold|lld|mold|bfd)\b\S*: ")
# Of programs that end because another has failed, which has said why.
_SAYS_NO_MORE = re.compile(r"collect2: error: ld returned|compilation terminated\.|.*linker command failed")


def run(plan: Plan, work: Path, log: Path) -> list[Path]:
    """Run all commands of `plan` in the folder `work`; what they say goes to `log`, also when they fail.

    Returns:
        The headers that the compiler read, in no order, sources excepted.

    Raises:
        CompileError: a command failed, or did not do its work.
        ToolchainError: a command cannot be run at all.
    """
    before = _digests(_own_headers(plan))
    headers = _run_once(plan, work, log)
    if _changed(headers, before) or _foreign_touched(headers, before, work):
        # Perhaps just before the compiler read it, perhaps after; the second time tells.
        before = _digests({*_own_headers(plan), *headers})
        headers = _run_once(plan, work, log)
        if changed := _changed(headers, before):
            raise failure(plan, f"{changed} was changed during the compilation; run again")
    if source_digests(plan.spec) != plan.request.digests:
        raise failure(plan, "a source was changed during the compilation; run again")
    return headers


def relink(plan: Plan, work: Path, log: Path) -> None:
    """Run the last command of `plan` alone, in the folder `work`, where the objects are. Raises as `run`."""
    with log.open("w", encoding="utf-8", errors="backslashreplace") as transcript:
        transcript.write("The objects are those of an earlier build.\n")
        _run(plan, {plan.spec.library: plan.link}, work, transcript)
    _check_library(plan, work / plan.spec.library)


def failure(plan: Plan, why: str, *, command: Sequence[str] = (), output: str = "") -> CompileError:
    """The error of a failed build, with the hint that suits and the command to reproduce it."""
    hints = filter(None, (hint_for(f"{why}\n{output}"), f"to reproduce: {shlex.join(command)}" if command else ""))
    return CompileError(
        "compiling failed", plugin=plan.spec.owner, op=plan.spec.name, why=why, hint="\n  -> ".join(hints)
    )


def _run_once(plan: Plan, work: Path, log: Path) -> list[Path]:
    (work / _BEGIN).touch()
    with log.open("w", encoding="utf-8", errors="backslashreplace") as transcript:
        objects = (f"{source.stem}.o" for source in plan.spec.sources)
        _run(plan, dict(zip(objects, plan.compile, strict=True)), work, transcript)
        _run(plan, {plan.spec.library: plan.link}, work, transcript)
    _check_library(plan, work / plan.spec.library)
    return _headers(plan, work)


def _run(plan: Plan, commands: Mapping[str, Sequence[str]], work: Path, transcript: TextIO) -> None:
    """Run commands, several at once, each by the file that it makes in `work`. Those that still run when one has
    failed, or the user interrupts, are ended.

    Without threads: a system's limit of processes must not end a training.
    """
    jobs = settings.max_jobs or len(os.sched_getaffinity(0))
    waiting = list(commands.items())[::-1]
    told = False
    with selectors.DefaultSelector() as running:
        try:
            while waiting or running.get_map():
                while waiting and len(running.get_map()) < jobs:
                    with _interrupts_later():
                        started = _Running(plan, *waiting.pop(), work)
                        running.register(started.output, selectors.EVENT_READ, started)
                for key, _ in running.select(_LOOK_SECONDS):
                    if not key.data.read():
                        key.data.finish(transcript)
                        running.unregister(key.fileobj)
                for key in list(running.get_map().values()):
                    key.data.check_time(transcript)
                    if not told and key.data.clock.seconds() > _PATIENCE_SECONDS:
                        told = True
                        _tell(plan, key.data.command)
        finally:
            for key in list(running.get_map().values()):
                key.data.end()


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Let an interrupt come at the end: within `Popen` it would leave a process behind of which nobody knows."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            usual(*came[0])


def _tell(plan: Plan, command: Sequence[str]) -> None:
    source = next((source.path.name for source in plan.spec.sources if str(source.path) in command), "the link")
    _log.warning(
        "op '%s': compiling: %s has taken %.0f s for %s, and may take %s s (DS_PLUGIN_LOCK_TIMEOUT)",
        plan.spec.name,
        command[0],
        _PATIENCE_SECONDS,
        source,
        settings.lock_timeout,
    )


# It reads a line if what it watches has ended, and nothing if the process that wrote to it has.
_WATCHER = 'read line || kill -s KILL -- "-$1"'


def _start_watcher(group: int) -> subprocess.Popen[bytes] | None:
    """What ends a group of processes as soon as this process ends, killed or not; None where it cannot be started."""
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", _WATCHER, "sh", str(group)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return None


class _Running:
    """A command that was started in the build folder, and what it has said."""

    def __init__(self, plan: Plan, makes: str, command: Sequence[str], work: Path) -> None:
        self.plan, self.command = plan, command
        self._made = work / makes
        self.clock = Stopwatch()  # a job that Slurm suspends is so as a whole
        self._said = bytearray()
        try:
            self._process = subprocess.Popen(
                command,
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                # English messages, for the hints; temporary files where they are removed with the rest.
                env=child_environment(LC_ALL="C", TMPDIR=str(work)),
                start_new_session=True,  # a compiler's own processes end with it
            )
        except OSError as error:
            raise ToolchainError(
                f"{command[0]} cannot be run",
                plugin=plan.spec.owner,
                op=plan.spec.name,
                why=str(error),
                hint=hint_for(str(error)),
            ) from error
        self._watcher = _start_watcher(self._process.pid)
        assert self._process.stdout is not None
        self.output = self._process.stdout

    def read(self) -> bool:
        """Take what it says now; false once it has nothing more to say."""
        text = os.read(self.output.fileno(), 1 << 16)
        self._said += text
        return bool(text)

    def check_time(self, transcript: TextIO) -> None:
        """End it, and raise, if it takes longer than it may."""
        if self.clock.seconds() >= settings.lock_timeout:
            self.end()
            self._write(transcript)
            raise self._failure(f"{self.command[0]} did not end within {settings.lock_timeout} s and was stopped")

    def finish(self, transcript: TextIO) -> None:
        """Wait for its end, and raise if that was a failure, or it has not made its file.

        Where SIGCHLD is ignored, the system tells no status, and `Popen` takes that for 0.
        """
        status = None
        while status is None:  # it may say nothing more and yet go on
            try:
                status = self._process.wait(_LOOK_SECONDS)
            except subprocess.TimeoutExpired:
                self.check_time(transcript)
        self.end()
        self._write(transcript)
        if status < 0:
            raise self._failure(f"{self.command[0]} was stopped: {signal.strsignal(-status)}")
        said = _first_error(self._text())
        if status:
            raise self._failure(said or f"{self.command[0]} exited with {status}")
        if not self._made.exists():
            why = f"{self.command[0]} reported success and made no {self._made.name}: {said or 'is it a compiler?'}"
            raise self._failure(why)

    def end(self) -> None:
        """Kill it, if it still runs, with the processes that it has started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that waits for a dead file server cannot be killed
            self._process.wait(_END_SECONDS)
            if self._watcher is not None and self._watcher.returncode is None:
                self._watcher.communicate(b"\n", _END_SECONDS)
        self.output.close()

    def _text(self) -> str:
        return self._said.decode(errors="replace")

    def _write(self, transcript: TextIO) -> None:
        transcript.write(f"$ {shlex.join(self.command)}\n{self._text()}")

    def _failure(self, why: str) -> CompileError:
        return failure(self.plan, why, command=self.command, output=self._text())


def _first_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if not _SAYS_NO_MORE.match(line)]
    found = (line for kind in (_ERROR, _LINKER) for line in telling if kind.search(line))
    return next(found, (telling or lines or [""])[0])


def _check_library(plan: Plan, library: Path) -> None:
    """That the linker's exit status 0 means a shared library."""
    try:
        with library.open("rb") as file:
            start = file.read(18)
    except OSError:
        start = b""
    if start[:4] != b"\x7fELF" or start[16:18].strip(b"\0") != b"\x03":  # e_type is ET_DYN
        raise failure(
            plan, f"{plan.link[0]} reported success and made no shared library: is it a compiler?", command=plan.link
        )


def _headers(plan: Plan, work: Path) -> list[Path]:
    sources = {source.path for source in plan.spec.sources}
    found: set[Path] = set()
    work = work.resolve()
    for source, command in zip(plan.spec.sources, plan.compile, strict=True):
        try:
            names = dependencies(os.fsdecode((work / f"{source.stem}.d").read_bytes()))
            # Ccache may write them relative to `work`, which is gone afterwards.
            found |= {_plain(work / name) for name in names}
        except OSError as error:
            why = f"{command[0]} made no list of headers ({source.stem}.d), as -MD asks"
            raise failure(plan, why, command=command) from error
        if absent := next((header for header in found if not header.exists()), None):
            why = (
                f"{command[0]} lists a header '{absent}', which does not exist: it may not know how to write the name "
                "of a folder with a tab, a line break or a backslash"
            )
            raise failure(plan, why, command=command)
    return sorted(found - sources)


def _plain(header: Path) -> Path:
    """A path without ``..``: by its text, which keeps the names of links, unless one of those leads elsewhere."""
    by_text = Path(os.path.normpath(header))
    return by_text if by_text.exists() else Path(os.path.realpath(header))


def dependencies(makefile: str) -> list[str]:
    """The prerequisites in a rule that a compiler wrote with -MD."""
    rule = makefile.replace("\\\n", " ").partition("\n")[0]  # with -MP there is one for each header, too
    prerequisites = rule.partition(":")[2]
    words = re.findall(r"(?:\\[ \t#]|\S)+", prerequisites)
    return [_BLANK.sub(_unescaped, word).replace("\\#", "#").replace("$$", "$") for word in words]


_BLANK = re.compile(r"(\\*)\\([ \t])")  # backslashes before a blank are doubled, and it has one more


def _unescaped(blank: re.Match[str]) -> str:
    return blank[1][: len(blank[1]) // 2] + blank[2]


def _own_headers(plan: Plan) -> set[Path]:
    """The headers that the sources include from their own folders, found without a compiler. Some may not be used."""
    found: set[Path] = set()
    unread = [source.path for source in plan.spec.sources]
    while unread:
        file = unread.pop()
        for name in _INCLUDE.findall(file.read_bytes()):
            for folder in (file.parent, *plan.spec.include_dirs):
                path = Path(os.path.realpath(folder / os.fsdecode(name)))
                if path not in found and path.is_file():
                    found.add(path)
                    unread.append(path)
    return found


def own_headers(plan: Plan) -> dict[str, str]:
    """SHA-256 of the headers that are found without a compiler, by their paths as keys have them."""
    write = plan.request.tokens.write
    return {write(str(path)): sha256 for path, sha256 in sorted(_digests(_own_headers(plan)).items())}


def _digests(files: Iterable[Path]) -> dict[Path, str]:
    """SHA-256 of files, by their paths without links."""
    return {Path(os.path.realpath(file)): file_digest(file) for file in files}


def _changed(headers: Iterable[Path], before: Mapping[Path, str]) -> Path | None:
    """A header whose digest was taken and is no longer the same."""
    now = ((header, Path(os.path.realpath(header))) for header in headers)
    return next((header for header, real in now if real in before and file_digest(real) != before[real]), None)


def _foreign_touched(headers: Iterable[Path], known: Container[Path], work: Path) -> Path | None:
    """Another header that was written while the commands ran, by the clock of the build folder's file system."""
    (work / _END).touch()
    begin, end = ((work / name).stat().st_mtime_ns for name in (_BEGIN, _END))
    return next(
        (
            header
            for header in headers
            if begin < header.stat().st_mtime_ns <= end and Path(os.path.realpath(header)) not in known
        ),
        None,
    )
