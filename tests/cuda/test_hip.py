"""The CUDA kernels as HIP's compiler sees them: the same sources, with CUDA's names given by one header.

It compiles them for AMD's GPUs as far as their code goes; nothing is linked, and no builder makes such binaries.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
SOURCES = sorted((KERNELS / "cuda").glob("*.cu"))


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_kernels_are_hip_too(source: Path) -> None:
    compiler = shutil.which("hipcc")
    if compiler is None:
        pytest.skip("no HIP compiler: hipcc is not on PATH")
    folders = [Path(__file__).with_name("hip"), KERNELS / "include", KERNELS / "cuda"]
    command = [compiler, "-x", "hip", "--offload-arch=gfx90a", "--cuda-device-only", "-fsyntax-only", "-std=c++17"]
    command += [*(f"-I{folder}" for folder in folders), "-include", "cuda_runtime.h", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
