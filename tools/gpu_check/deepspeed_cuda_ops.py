r"""DeepSpeed's own CUDA ops, built by DeepSpeed itself, to be measured beside ours.

    PYTHONPATH=tools TORCH_DEVICE_BACKEND_AUTOLOAD=0 TORCH_EXTENSIONS_DIR=FOLDER \
        python -m gpu_check.deepspeed_cuda_ops FOLDER

Each op in a process of its own, all at once. What does not build is said, and is no failure of ours.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

OPS = {
    "fused_adam": "FusedAdamBuilder",
    "fused_lamb": "FusedLambBuilder",
    "quantizer": "QuantizerBuilder",
    "random_ltd": "RandomLTDBuilder",
    "transformer": "TransformerBuilder",
}
BUILD = "from deepspeed.accelerator import get_accelerator; get_accelerator().create_op_builder({builder!r}).load()"


def build(op: str, environment: Mapping[str, str]) -> str:
    """Build one op; how it went, in a line."""
    begin = time.monotonic()
    command = [sys.executable, "-c", BUILD.format(builder=OPS[op])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return f"{op}: {time.monotonic() - begin:.0f} s"
    return f"{op}: does not build: {first_error(done.stdout + done.stderr)}"


def first_error(output: str) -> str:
    """The line that says most: a compiler's or linker's, else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no output"]
    return next(filter(re.compile(r"\berror: |cannot find |undefined reference").search, lines), lines[-1])


def with_pips_cuda(environment: Mapping[str, str], links: Path) -> dict[str, str]:
    """An environment in which compilers also find headers and libraries of the CUDA that pip has installed with torch.

    DeepSpeed wants more of them than some toolkits have. pip's libraries are named as only a loader takes them, hence
    the links.
    """
    torch = importlib.util.find_spec("torch")
    site = Path(torch.origin).parents[1] if torch and torch.origin else Path()
    homes = sorted(site.glob("nvidia/cu[0-9]*"))
    links.mkdir(parents=True, exist_ok=True)
    for library in (library for home in homes for library in home.glob("lib/lib*.so.*")):
        link = links / library.name.partition(".so.")[0]
        link = link.with_name(f"{link.name}.so")
        if not link.exists():
            link.symlink_to(library)
    # The toolkit's first: pip's headers lack some of those that they include.
    toolkit = environment.get("CUDA_HOME", "/usr/local/cuda")
    includes = [Path(toolkit, "include"), *(home / "include" for home in homes)]
    more = {"CPLUS_INCLUDE_PATH": includes, "LIBRARY_PATH": [links]}
    return {**environment} | {
        name: os.pathsep.join([*filter(None, [environment.get(name)]), *map(str, paths)])
        for name, paths in more.items()
    }


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
    environment = with_pips_cuda(os.environ, Path(sys.argv[1]) / "libraries")
    with ThreadPoolExecutor() as pool:
        for line in pool.map(lambda op: build(op, environment), OPS):
            print(line, flush=True)


if __name__ == "__main__":
    main()
