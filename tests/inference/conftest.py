"""The transformers that DeepSpeed's layers are written for."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The last release whose models DeepSpeed's layers fit, and what it insists on in versions of its own time.
OLD = ("transformers==4.43.4", "tokenizers>=0.19,<0.20", "huggingface-hub>=0.23.2,<1")


@pytest.fixture(scope="session")
def old_transformers() -> str:
    """``PYTHONPATH`` of the programs here: that release before what is installed, and the tests' own helpers.

    The release is fetched once, and kept with the tree's other build results.
    """
    if sys.version_info >= (3, 13):
        pytest.skip("transformers 4.43.4 insists on tokenizers 0.19, which exists for Python up to 3.12")
    folder = ROOT / "build" / "transformers-4.43.4"
    if not (folder / "transformers").is_dir():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        folder.parent.mkdir(exist_ok=True)
        # Into a folder that gets its name when it is whole: pip moves one package after the other to where it is told.
        with tempfile.TemporaryDirectory(dir=folder.parent) as new:
            subprocess.run([*pip, "--target", f"{new}/packages", *OLD], check=True)
            with contextlib.suppress(OSError):  # another worker has been quicker
                Path(new, "packages").rename(folder)
    return os.pathsep.join([str(folder), str(ROOT / "tests")])
