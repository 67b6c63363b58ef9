"""Several processes that want the same op: one compiles, nobody hangs, whatever happens to the one."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from small_op import CountingCompiler, Project, Spawn, finish, script

from ds_plugin_sdk.jit import acquire, cache, lock, plan

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
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_killed_builder_holds_nobody_up(project: Project, hanging: Path, spawn: Spawn, tmp_path: Path) -> None:
    builder = spawn()
    wait_until(lambda: hanging.exists() and hanging.read_text(), "the builder compiles")
    waiting = [spawn() for _ in range(3)]
    wait_until(lambda: all(has_lock_file_open(process.pid) for process in waiting), "three processes wait")
    builder.kill()
    assert builder.wait() == -signal.SIGKILL
    builder.communicate()
    said = sorted(finish(process, timeout=30) for process in waiting)
    assert said == ["cache 42", "cache 42", "compiled 42"]
    assert finish(spawn(), timeout=30) == "cache 42"
    assert len((tmp_path / "compilations").read_text().splitlines()) == 2
    assert cache.verify() == []


NO_LOCKS = """\
import errno, fcntl
def flock(*args):
    raise OSError(errno.ENOLCK, "no locks here")
fcntl.flock = flock
"""


def test_without_locks_two_hosts_race_and_both_win(
    project: Project, spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    said = [finish(process) for process in [spawn(NO_LOCKS), spawn(NO_LOCKS)]]
    assert said == ["compiled 42"] * 2
    assert len(cache.entries()) == 1
    assert cache.verify() == []
    assert list((cache.root() / "v1" / ".build").iterdir()) == []


def test_a_holder_that_takes_too_long_is_named_and_not_waited_for(
    project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DS_PLUGIN_LOCK_TIMEOUT", "1")
    monkeypatch.setattr(lock, "_PATIENCE_SECONDS", 0.2)
    locks = cache.root() / "v1" / ".locks"
    locks.mkdir(parents=True)
    file = locks / f"{plan.make_plan(plan.make_request(project.spec())).direct}.lock"
    file.write_text('{"host": "node17", "pid": 4711, "since": "yesterday"}')
    with file.open() as held, caplog.at_level(logging.WARNING):
        fcntl.flock(held, fcntl.LOCK_EX)
        start = time.monotonic()
        assert acquire(project.spec()).origin == "compiled"
    assert 1 <= time.monotonic() - start < 10
    waiting, given_up = (record.getMessage() for record in caplog.records)
    assert waiting == "op 'answer': waiting for process 4711 on node17 (since yesterday), which is compiling it"
    assert "waited 1 s for process 4711 on node17" in given_up


def test_a_lock_file_left_behind_means_nothing(project: Project) -> None:
    """A build that was killed leaves its lock file; the operating system has let go of the lock."""
    direct = plan.make_plan(plan.make_request(project.spec())).direct
    locks = cache.root() / "v1" / ".locks"
    locks.mkdir(parents=True)
    (locks / f"{direct}.lock").write_text('{"host": "gone", "pid": 1, "since": "long ago"}')
    start = time.monotonic()
    assert acquire(project.spec()).origin == "compiled"
    assert time.monotonic() - start < 5
