"""Several processes that want the same op: one compiles, nobody hangs, whatever happens to the one."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_op import CountingCompiler, Project, Spawn, finish, script

from ds_plugin_sdk.errors import CompileError
from ds_plugin_sdk.jit import Source, acquire, cache, compile, lock, plan

pytestmark = pytest.mark.compiler


def wait_until(true: Callable[[], object], what: str) -> None:
    for _ in range(3000):
        if true():
            return
        time.sleep(0.01)
    pytest.fail(f"in vain: {what}")


def has_lock_file_open(pid: int) -> bool:
    try:
        return any(file.readlink().suffix == ".lock" for file in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False


def test_eight_processes_compile_once(project: Project, counting: CountingCompiler, spawn: Spawn) -> None:
    said = [finish(process) for process in [spawn() for _ in range(8)]]
    assert sorted(said) == ["cache 42"] * 7 + ["compiled 42"]
    assert counting.count() == 1


def test_eight_processes_build_a_damaged_entry_again_once(project: Project, spawn: Spawn) -> None:
    acquire(project.spec()).path.write_bytes(b"")
    said = [finish(process) for process in [spawn() for _ in range(8)]]
    assert sorted(said) == ["cache 42"] * 7 + ["compiled 42"]


def test_threads_of_one_process_compile_once(project: Project, counting: CountingCompiler) -> None:
    with ThreadPoolExecutor(4) as pool:
        origins = sorted(artifact.origin for artifact in pool.map(acquire, [project.spec()] * 4))
    assert origins == ["cache"] * 3 + ["compiled"]
    assert counting.count() == 1


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A compiler whose first compilation never ends; the file returned has its process id."""
    pid = tmp_path / "hanging.pid"
    count = tmp_path / "compilations"
    body = f"""\
        case "$*" in *" -c "*)
            echo x >> {count}
            [ -e {pid} ] || {{ echo $$ > {pid}; exec sleep 300; }};;
        esac
        exec {shutil.which("c++")} "$@"
        """
    monkeypatch.setenv("CXX", str(script(tmp_path / "hanging-c++", body)))
    yield pid
    if pid.exists():
        with contextlib.suppress(ProcessLookupError):  # it ends with the builder that started it
            os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_killed_builder_holds_nobody_up(project: Project, hanging: Path, spawn: Spawn, tmp_path: Path) -> None:
    builder = spawn()
    wait_until(lambda: hanging.exists() and hanging.read_text(), "the builder compiles")
    waiting = [spawn() for _ in range(3)]
    wait_until(lambda: all(has_lock_file_open(process.pid) for process in waiting), "three processes wait")
    builder.kill()
    assert builder.wait() == -signal.SIGKILL
    builder.communicate()
    said = sorted(finish(process) for process in waiting)
    assert said == ["cache 42", "cache 42", "compiled 42"]
    assert finish(spawn()) == "cache 42"
    assert len((tmp_path / "compilations").read_text().splitlines()) == 2
    assert cache.verify() == []


def gone(pid: int) -> bool:
    """Whether a process has ended: it may be a zombie whose parent, in a container, never asks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[int]]:
    """A compiler that starts a process and waits for it for ever, as for a licence; gives the ids of both."""
    pids = tmp_path / "pids"
    body = f"""\
        case "$*" in *" -c "*) echo no licence yet; sleep 300 & echo $$ $! > {pids}; wait;; esac
        exec {shutil.which("c++")} "$@"
        """
    monkeypatch.setenv("CXX", str(script(tmp_path / "stuck-c++", body)))
    return lambda: [int(pid) for pid in pids.read_text().split()] if pids.exists() else []


def test_a_compiler_that_does_not_end_is_named_and_stopped(
    project: Project,
    stuck: Callable[[], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("DS_PLUGIN_LOCK_TIMEOUT", "2")
    monkeypatch.setattr(compile, "_PATIENCE_SECONDS", 0.5)
    with pytest.raises(CompileError, match="did not end within 2 s and was stopped") as caught:
        acquire(project.spec())
    assert "stuck-c++" in str(caught.value)
    assert "licence server" in caught.value.hint and "DS_PLUGIN_LOCK_TIMEOUT" in caught.value.hint
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("op 'answer': compiling: ") and "for answer.cpp, and may take 2" in line
    assert "no licence yet" in Path(caught.value.hint.rpartition("log: ")[2]).read_text()
    wait_until(lambda: len(stuck()) == 2 and all(map(gone, stuck())), "the compiler and its process are gone")


def test_a_compiler_that_says_nothing_more_and_goes_on_is_stopped(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = 'case "$*" in *" -c "*) exec sleep 300 >&- 2>&-;; esac\necho 1.0\n'
    monkeypatch.setenv("CXX", str(script(tmp_path / "silent-c++", body)))
    monkeypatch.setenv("DS_PLUGIN_LOCK_TIMEOUT", "1")
    with pytest.raises(CompileError, match="did not end within 1 s"):
        acquire(project.spec())


def test_time_in_which_a_job_was_suspended_does_not_count(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm does for another job: between two looks at the clock lie hours, and the compiler stood still, too."""
    began, clock = tmp_path / "began", time.monotonic
    body = f"""\
        case "$*" in *" -c "*) touch {began}; sleep 1.2;; esac
        exec {shutil.which("c++")} "$@"
        """
    monkeypatch.setenv("CXX", str(script(tmp_path / "suspended-c++", body)))
    monkeypatch.setattr(time, "monotonic", lambda: clock() + (7200 if began.exists() else 0))
    assert acquire(project.spec()).origin == "compiled"


# What a shell starts in the background ignores interrupts, and so would all that such a run of the tests starts.
HEARS_INTERRUPTS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


def test_an_interrupt_ends_the_compiler(project: Project, stuck: Callable[[], list[int]], spawn: Spawn) -> None:
    builder = spawn(HEARS_INTERRUPTS)
    wait_until(lambda: len(stuck()) == 2, "the builder compiles")
    builder.send_signal(signal.SIGINT)
    _, err = builder.communicate(timeout=200)
    assert "KeyboardInterrupt" in err
    wait_until(lambda: all(map(gone, stuck())), "the compiler and its process are gone")
    assert list((cache.root() / "v1" / ".build").iterdir()) == []


# What `nohup` starts ignores the end of the terminal, and so would all that such a run of the tests starts.
HEARS_HANGUPS = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_compilers_do_not_outlive_who_started_them(
    project: Project, stuck: Callable[[], list[int]], spawn: Spawn, number: int
) -> None:
    builder = spawn(HEARS_HANGUPS)
    children = Path(f"/proc/{builder.pid}/task/{builder.pid}/children")
    wait_until(lambda: len(stuck()) == 2 and len(children.read_text().split()) == 2, "the builder compiles, watched")
    builder.send_signal(number)
    builder.communicate(timeout=200)
    wait_until(lambda: all(map(gone, stuck())), "the compiler and its process are gone")


def test_one_failure_ends_what_else_is_compiled(
    project: Project, stuck: Callable[[], list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (project.root / "bad.cpp").write_text("#error on purpose\n")
    body = Path(os.environ["CXX"]).read_text().replace('" -c "*)', '"/answer.cpp "*)')
    monkeypatch.setenv("CXX", str(script(tmp_path / "half-c++", body.removeprefix("#!/bin/sh\n"))))
    monkeypatch.setenv("MAX_JOBS", "2")
    start = time.monotonic()
    with pytest.raises(CompileError, match="on purpose"):
        acquire(project.spec(sources=(*project.spec().sources, Source(project.root / "bad.cpp"))))
    assert time.monotonic() - start < 60
    wait_until(lambda: all(map(gone, stuck())), "the compiler and its process are gone")


NO_LOCKS = """\
import errno, fcntl
def flock(*args):
    raise OSError(errno.ENOLCK, "no locks here")
fcntl.flock = flock
"""

# SSHFS keeps locks to each host, and has one answer for all that the other side refuses.
SSHFS = f"""\
{NO_LOCKS}
import pathlib

rename = pathlib.Path.rename


def refusing(self, target):
    try:
        return rename(self, target)
    except OSError as error:
        raise OSError(errno.EPERM, "Operation not permitted", str(self), None, str(target)) from error


pathlib.Path.rename = refusing
"""


@pytest.mark.parametrize("file_system", [NO_LOCKS, SSHFS], ids=["no locks", "SSHFS"])
def test_without_locks_two_hosts_race_and_both_win(
    project: Project, spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str
) -> None:
    """Each compilation waits until both have begun, so that they do race."""
    count = tmp_path / "compilations"
    body = f"""\
        case "$*" in *" -c "*)
            echo x >> {count}
            until [ $(wc -l < {count}) -ge 2 ]; do sleep 0.02; done;;
        esac
        exec {shutil.which("c++")} "$@"
        """
    monkeypatch.setenv("CXX", str(script(tmp_path / "racing-c++", body)))
    said = [finish(process) for process in [spawn(file_system), spawn(file_system)]]
    assert said == ["compiled 42"] * 2
    assert len(cache.entries()) == 1
    assert cache.verify() == []
    assert list((cache.root() / "v1" / ".build").iterdir()) == []


def test_a_holder_that_takes_too_long_is_named_and_not_waited_for(
    project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DS_PLUGIN_LOCK_TIMEOUT", "3")  # a compiler may take as long
    monkeypatch.setattr(lock, "_PATIENCE_SECONDS", 0.2)
    locks = cache.root() / "v1" / ".locks"
    locks.mkdir(parents=True)
    file = locks / f"{plan.make_plan(plan.make_request(project.spec())).direct}.lock"
    file.write_text('{"host": "node17", "pid": 4711, "since": "yesterday"}')
    with file.open() as held, caplog.at_level(logging.WARNING):
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.monotonic()
        assert acquire(project.spec()).origin == "compiled"
    assert 3 <= time.monotonic() - start < 12
    waiting, given_up = (record.getMessage() for record in caplog.records)
    assert waiting == "op 'answer': waiting for process 4711 on node17 (since yesterday), which is compiling it"
    assert "waited 3 s for process 4711 on node17" in given_up


FORKS = """\
import fcntl, os, pathlib, signal, sys
from ds_plugin_sdk.jit import lock

path = pathlib.Path(sys.argv[1])
with lock.building(path, "answer", timeout=0, done=lambda: False):
    child = os.fork()
    if not child:
        signal.pause()
try:
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
finally:
    os.kill(child, signal.SIGKILL)
"""


def test_a_process_that_was_forked_during_a_build_holds_no_lock_after_it(tmp_path: Path) -> None:
    """As a DataLoader's workers do; else, if the build fails, others wait for as long as these live."""
    command = [sys.executable, "-c", FORKS, str(tmp_path / "answer.lock")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_lock_file_left_behind_means_nothing(project: Project) -> None:
    """A build that was killed leaves its lock file; the operating system has let go of the lock."""
    direct = plan.make_plan(plan.make_request(project.spec())).direct
    locks = cache.root() / "v1" / ".locks"
    locks.mkdir(parents=True)
    (locks / f"{direct}.lock").write_text('{"host": "gone", "pid": 1, "since": "long ago"}')
    start = time.monotonic()
    assert acquire(project.spec()).origin == "compiled"
    assert time.monotonic() - start < 120  # a holder would be waited for for 600 s
