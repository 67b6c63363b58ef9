"""The simulated runtime by itself, compiled with sanitizers and without torch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ds_plugin_sdk import privateuse1, simulator

HERE = Path(__file__).resolve().parent


@pytest.mark.compiler
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_threads_use_the_runtime_at_once(sanitizers: str, tmp_path: Path) -> None:
    program = tmp_path / "stress"
    compiler = shutil.which("c++")
    assert compiler is not None
    sources = [HERE / "runtime_stress.cpp", *sorted(simulator.sources_dir().glob("*.cpp"))]
    subprocess.run(
        [
            compiler,
            "-std=c++17",
            "-g",
            "-O1",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pthread",
            "-fno-sanitize-recover=all",
            f"-fsanitize={sanitizers}",
            f"-I{privateuse1.include_dir()}",
            *map(str, sources),
            "-o",
            str(program),
        ],
        check=True,
    )
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
