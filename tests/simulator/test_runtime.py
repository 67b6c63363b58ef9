"""The simulated runtime by itself, compiled with sanitizers and without torch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "sdk" / "ds_plugin_sdk" / "simulator" / "csrc"


@pytest.mark.compiler
@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_threads_use_the_runtime_at_once(sanitizers: str, tmp_path: Path) -> None:
    program = tmp_path / "stress"
    compiler = shutil.which("c++")
    assert compiler is not None
    sources = [HERE / "runtime_stress.cpp", *sorted((CSRC / "runtime").glob("*.cpp"))]
    subprocess.run(
        [
            compiler, "-std=c++17", "-g", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-fno-sanitize-recover=all",
            f"-fsanitize={sanitizers}", f"-I{CSRC}", *map(str, sources), "-o", str(program),
        ],
        check=True,
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
