"""Programs on a device that is installed with torch. Each needs a process of its own: torch takes one name in each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# For annotations: what `runner` returns, and the fixture `run_checks` of tests/privateuse1.
Run = Callable[..., "subprocess.CompletedProcess[str]"]
RunChecks = Callable[..., dict[str, str]]

_DROPPED = ("DS_ACCELERATOR", "DS_PLUGINS", "ZAP_VISIBLE_DEVICES", "RANK", "LOCAL_RANK", "WORLD_SIZE")
# Later ones win. Why torch's warning of Python 3.13.0 is none of ours: pyproject.toml.
_WARNINGS = "error,ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"


def environment(kernel_cache: Path) -> dict[str, str]:
    """One in which nothing but the program says which device there is, and every warning is an error."""
    kept = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    return {**kept, "DS_PLUGIN_CACHE_DIR": str(kernel_cache), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": _WARNINGS}


def runner(folder: Path, kernel_cache: Path) -> Run:
    """``run("-c", program)`` runs Python in `folder`; ``fails=True`` expects an error, otherwise none."""

    def run(*arguments: str, fails: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**environment(kernel_cache), **variables},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
        assert (done.returncode != 0) == fails, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run
