"""Fixtures of the JIT's tests: a small op, a compiler that counts, and processes to build in."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from small_op import CountingCompiler, Process, Project, Spawn, SpawnIn, make_project, script

SDK = Path(__file__).resolve().parents[2] / "sdk"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "checkout", tmp_path / "shared")


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No compiler, flag or temporary folder of the user who runs the tests."""
    for variable in (
        "CC",
        "CXX",
        "CFLAGS",
        "CXXFLAGS",
        "LDFLAGS",
        "CPATH",
        "MAX_JOBS",
        "TORCH_CUDA_ARCH_LIST",
        "CUDA_HOME",
        "DS_PLUGIN_LOCK_TIMEOUT",
        "NVCC_APPEND_FLAGS",
        "NVCC_PREPEND_FLAGS",
    ):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CountingCompiler:
    log = tmp_path / "compilations"
    real = shutil.which("c++")
    path = script(
        tmp_path / "counting-c++",
        f"""\
        case "$*" in *" -c "*) echo x >> {log};; esac
        exec {real} "$@"
        """,
    )
    monkeypatch.setenv("CXX", str(path))
    return CountingCompiler(path, log)


# A process of its own that builds the project given in its arguments and tells what it got.
WORKER = """\
import pathlib, sys
sys.path[:0] = [{sdk!r}, {here!r}]
import small_op
from ds_plugin_sdk.jit import acquire
project = small_op.Project(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))
artifact = acquire(project.spec())
print(artifact.origin, small_op.answer(artifact.path), flush=True)
"""


def spawner(project: Project) -> Spawn:
    """Starts processes that acquire the project's op and print origin and answer."""
    worker = WORKER.format(sdk=str(SDK), here=str(Path(__file__).parent))

    def start(before: str = "", *, prefix: Sequence[str] = (), limit: Callable[[], None] | None = None) -> Process:
        return subprocess.Popen(
            [*prefix, sys.executable, "-c", before + worker, str(project.root), str(project.shared)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,  # noqa: PLW1509  # the tests have no threads
        )

    return start


@pytest.fixture
def spawn(project: Project) -> Spawn:
    return spawner(project)


@pytest.fixture
def spawn_in() -> SpawnIn:
    """A project in the folder given, and what `spawn` is for it."""

    def make(folder: Path) -> tuple[Project, Spawn]:
        project = make_project(folder / "checkout", folder / "shared")
        return project, spawner(project)

    return make
