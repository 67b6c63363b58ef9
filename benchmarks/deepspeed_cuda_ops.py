"""DeepSpeed's own CUDA ops, built by DeepSpeed itself, to be measured beside ours.

    TORCH_DEVICE_BACKEND_AUTOLOAD=0 TORCH_EXTENSIONS_DIR=FOLDER python benchmarks/deepspeed_cuda_ops.py FOLDER

Each op in a process of its own, all at once. What does not build is said, and is no failure of ours.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

OPS = {
    "fused_adam": "FusedAdamBuilder",
    "fused_lamb": "FusedLambBuilder",
    "quantizer": "QuantizerBuilder",
    "transformer": "TransformerBuilder",
}
BUILD = "from deepspeed.accelerator import get_accelerator; get_accelerator().create_op_builder({builder!r}).load()"


def build(op: str) -> str:
    """Build one op; how it went, in a line."""
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(builder=OPS[op])], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return f"{op}: {time.monotonic() - begin:.0f} s"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    error = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no output")
    return f"{op}: does not build: {error.strip()}"


@functools.cache
def load(op: str, folder: Path) -> ModuleType | None:
    """The module of an op that was built into a folder, or None."""
    path = folder / op / f"{op}.so"
    if not path.exists():
        return None
    loader = importlib.machinery.ExtensionFileLoader(op, str(path))
    spec = importlib.util.spec_from_file_location(op, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def main() -> None:
    with ThreadPoolExecutor() as pool:
        for line in pool.map(build, OPS):
            print(line, flush=True)


if __name__ == "__main__":
    main()
