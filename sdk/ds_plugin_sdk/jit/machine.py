"""What the binary must fit besides the compiler: CPU, torch and Python, found without importing torch."""

from __future__ import annotations

import functools
import importlib.util
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from ds_plugin_sdk.errors import ToolchainError
from ds_plugin_sdk.jit import target
from ds_plugin_sdk.jit.spec import BuildSpec
from ds_plugin_sdk.jit.target import CpuTarget

# The stable ABI of torch 2.11: binaries run on it and on every later torch.
STABLE_TORCH = (2, 11)
STABLE_TORCH_VERSION = "{}.{}".format(*STABLE_TORCH)
STABLE_TORCH_MACRO = f"0x{STABLE_TORCH[0]:02X}{STABLE_TORCH[1]:02X}000000000000"


@dataclass(frozen=True)
class Torch:
    """An installed torch.

    Attributes:
        root: its package folder.
        version: such as ``2.11.0+cu130``.
        cxx11_abi: whether its C++ uses libstdc++'s new ABI.
        cuda_release: the CUDA that it was built for, such as (13, 0); None if for none.
    """

    root: Path
    version: str
    cxx11_abi: bool
    cuda_release: tuple[int, int] | None = None

    @property
    def include_dirs(self) -> tuple[Path, ...]:
        include = self.root / "include"
        return include, include / "torch" / "csrc" / "api" / "include"

    @property
    def lib_dir(self) -> Path:
        return self.root / "lib"

    @property
    def release(self) -> tuple[int, int]:
        return release_of(self.version)

    def has(self, library: str) -> bool:
        """Whether torch comes with ``lib<library>.so``."""
        return (self.lib_dir / f"lib{library}.so").exists()


@dataclass(frozen=True)
class Machine:
    """What a binary is built for.

    Attributes:
        target: architecture, and level of the CPU.
        torch: the torch whose headers and libraries are used.
        python_include: folder of Python's headers.
        python_abi: the interface of Python that a pybind11 module depends on, ``SOABI``.
    """

    target: CpuTarget
    torch: Torch
    python_include: Path
    python_abi: str

    def abi(self, spec: BuildSpec) -> dict[str, object]:
        """The interfaces that a binary of `spec` depends on: an equal dict means an exchangeable binary."""
        if spec.stable:
            return {"torch": f"stable >= {STABLE_TORCH[0]}.{STABLE_TORCH[1]}"}
        facts: dict[str, object] = {"torch": self.torch.version, "cxx11_abi": self.torch.cxx11_abi}
        return {**facts, "python": self.python_abi} if spec.kind == "python_module" else facts


@functools.cache
def here() -> Machine:
    """The machine of this process.

    Raises:
        ToolchainError: torch is not installed.
    """
    return Machine(
        target=target.here(),
        torch=find_torch(),
        python_include=Path(sysconfig.get_paths()["include"]),
        python_abi=str(sysconfig.get_config_var("SOABI")),
    )


def find_torch() -> Torch:
    """The torch that `import torch` would import."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        raise ToolchainError("torch is not installed", why="kernels are built against it", hint="pip install torch")
    root = Path(found.origin).parent
    facts = _read(root / "version.py")
    version = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", facts)
    if version is None:
        raise ToolchainError("torch's version is unknown", why=f"{root}/version.py does not tell it")
    config = _read(root / "share" / "cmake" / "Torch" / "TorchConfig.cmake")
    cuda = re.search(r"^cuda\b.*=\s*['\"](\d+)\.(\d+)", facts, re.MULTILINE)
    return Torch(
        root, version[1], "_GLIBCXX_USE_CXX11_ABI=0" not in config, (int(cuda[1]), int(cuda[2])) if cuda else None
    )


def release_of(version: str) -> tuple[int, int]:
    """Major and minor number of a version such as ``2.11.0+cu130``."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
