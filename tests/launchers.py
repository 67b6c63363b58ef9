"""Programs in several ranks, by the launchers that DeepSpeed is started with."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ds_plugin_sdk.conformance import programs

LAUNCHERS = {
    "deepspeed": [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node"],
    "mpirun": ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np"],
}


def launch(launcher: str, ranks: int, program: Path, *arguments: str, **variables: str) -> str:
    """What a program prints in as many ranks, on the CPU plugin with one thread each; a test fails if a rank does.

    Where there is no mpirun, or no mpi4py by which DeepSpeed asks for its ranks, the test is skipped. There the program
    has to say to ``init_distributed`` at which port they meet: ``MASTER_PORT``, which has it under every launcher.
    """
    if launcher == "mpirun" and (shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None):
        pytest.skip("mpirun or mpi4py is not installed")
    port = free_port()
    command = [*LAUNCHERS[launcher], str(ranks)]
    command += [sys.executable] if launcher == "mpirun" else ["--master_port", port]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    ours = {"PATH": path, "MASTER_PORT": port, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(program), *arguments],
        env={**os.environ, **ours, **variables},
        cwd=program.parent,
        capture_output=True,
        text=True,
        check=False,
        timeout=840,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def free_port() -> str:
    """A port at which ranks that are yet to start can meet."""
    return str(programs.free_port())
