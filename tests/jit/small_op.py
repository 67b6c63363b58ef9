"""A small op to build, and what the tests do with it."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from ds_plugin_sdk.jit import BuildSpec, Source, cache, machine

# Plain C++: nothing of torch, so that a build takes a tenth of a second.
EXPORT = 'extern "C" __attribute__((visibility("default"))) '
SOURCE = f'#include "answer.h"\n#include "shared.h"\n{EXPORT} int answer() {{ return ANSWER + SHARED; }}\n'


@dataclasses.dataclass(frozen=True)
class Project:
    """A checkout: ``answer()`` adds a number of its own header to one of a header that belongs to somebody else."""

    root: Path
    shared: Path

    def spec(self, **changes: object) -> BuildSpec:
        spec = BuildSpec(
            name="answer",
            owner="ds-plugin-test",
            sources=(Source(self.root / "answer.cpp"),),
            include_dirs=(self.root, self.shared),
            roots=(("test", self.root),),
        )
        return dataclasses.replace(spec, **changes)


def make_project(root: Path, shared: Path) -> Project:
    root.mkdir(parents=True)
    shared.mkdir(exist_ok=True)
    (root / "answer.cpp").write_text(SOURCE)
    (root / "answer.h").write_text("#define ANSWER 40\n")
    (shared / "shared.h").write_text("#define SHARED 2\n")
    return Project(root, shared)


def answer(path: Path) -> int:
    """Call the built function. Each path is a library of its own."""
    return int(ctypes.CDLL(str(path)).answer())


def script(path: Path, body: str) -> Path:
    """An executable shell script."""
    path.write_text("#!/bin/sh\n" + textwrap.dedent(body))
    path.chmod(0o755)
    return path


@dataclasses.dataclass(frozen=True)
class CountingCompiler:
    """The real compiler behind a script that leaves a line for each compilation."""

    path: Path
    log: Path

    def count(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


Process: TypeAlias = "subprocess.Popen[str]"
Spawn = Callable[..., Process]
SpawnIn = Callable[[Path], tuple[Project, Spawn]]


def finish(process: Process) -> str:
    """What a worker said; the test fails with its complaint if it failed."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out.strip()


def entry_folder() -> Path:
    """The only entry of the cache."""
    (entry,) = cache.entries()
    return entry.path


def other_torch(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Pretend that another torch is installed in the same folder."""
    here = machine.here()
    other = dataclasses.replace(here, torch=dataclasses.replace(here.torch, version=version))
    monkeypatch.setattr(machine, "here", lambda: other)


def in_namespace(*mounts: str) -> list[str]:
    """Command prefix that runs a program with mounts of its own; empty where that is not permitted."""
    user = [] if os.geteuid() == 0 else ["-r"]
    prefix = ["unshare", "-m", *user, "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh"]
    probe = subprocess.run([*prefix, "true"], capture_output=True, check=False)
    return prefix if probe.returncode == 0 else []
