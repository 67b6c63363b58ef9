"""What is to be built, and what came of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Kind = Literal["torch_library", "python_module"]
Origin = Literal["prebuilt", "cache", "compiled"]

_NAME = re.compile(r"[a-z0-9_]+")
_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Source:
    """One translation unit.

    Attributes:
        path: the file.
        args: compiler arguments of this unit alone, after all others.
        tag: tells apart several units made of one file, e.g. one for each instruction-set level.
    """

    path: Path
    args: tuple[str, ...] = ()
    tag: str = ""

    @property
    def stem(self) -> str:
        """Name of the object file, without suffix."""
        return f"{self.path.name}.{self.tag}" if self.tag else self.path.name


@dataclass(frozen=True)
class BuildSpec:
    """An op's native code, as its builder describes it.

    Attributes:
        name: op name, ``[a-z0-9_]+``, as in ``OpBuilder.NAME``.
        owner: plugin that offers the op; a folder of the cache, and the plugin that messages name.
        sources: the translation units.
        include_dirs: folders of the op's own headers.
        cxx_args: arguments for the C++ (or SYCL) compiler. ``-march=native`` and ``-mcpu=native`` stand for "the CPU
            of this machine" and are resolved to its name, in the spelling of its architecture.
        nvcc_args: arguments for nvcc; an explicit ``-gencode`` or ``-arch`` here overrules TORCH_CUDA_ARCH_LIST.
        link_args: arguments for the linker, before torch's libraries.
        toolchain: name of a registered toolchain.
        kind: ``torch_library`` registers with torch's dispatcher when loaded, on the stable ABI unless the arguments
            hold ``-UTORCH_TARGET_VERSION``; ``python_module`` is a pybind11 module of the op's name.
        prebuilt_dirs: folders that may hold ``<owner>/<name>/<name>.so``, built earlier by `build_into`.
        roots: (token, folder) pairs. Paths below a folder are written as ``$token/...`` in keys, so that one cache
            serves several checkouts and virtual environments; headers below it are the op's own.
        portable: to be run on other machines too: nothing is chosen by what this one has.

    Raises:
        ValueError: a name that could not be a folder's name, or two units that would share an object file.
    """

    name: str
    owner: str
    sources: tuple[Source, ...]
    include_dirs: tuple[Path, ...] = ()
    cxx_args: tuple[str, ...] = ()
    nvcc_args: tuple[str, ...] = ()
    link_args: tuple[str, ...] = ()
    toolchain: str = "cxx"
    kind: Kind = "torch_library"
    prebuilt_dirs: tuple[Path, ...] = ()
    roots: tuple[tuple[str, Path], ...] = ()
    portable: bool = False

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"op name {self.name!r} must match [a-z0-9_]+")
        if not _OWNER.fullmatch(self.owner):
            raise ValueError(f"owner {self.owner!r} of op '{self.name}' must match {_OWNER.pattern}")
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind {self.kind!r} of op '{self.name}' must be {' or '.join(get_args(Kind))}")
        if self.kind == "python_module" and not self.name.isidentifier():
            raise ValueError(f"op name {self.name!r} cannot be a Python module's name")
        stems = [source.stem for source in self.sources]
        if not stems or len(set(stems)) != len(stems):
            raise ValueError(f"op '{self.name}' needs sources of distinct names and tags, not {stems}")

    @property
    def library(self) -> str:
        """File name of the binary."""
        return f"{self.name}.so"

    @property
    def stable(self) -> bool:
        """Whether the binary uses LibTorch's stable ABI only, and so serves every torch from the target version on."""
        return self.kind == "torch_library" and "-UTORCH_TARGET_VERSION" not in self.cxx_args + self.nvcc_args


@dataclass(frozen=True)
class Artifact:
    """A binary fit for this machine.

    Attributes:
        path: the shared library.
        origin: where it came from.
        seconds: wall time spent finding or making it.
        reason: why this one, in words.
        key: what it was made of, the contents of its ``key.json``.
    """

    path: Path
    origin: Origin
    seconds: float
    reason: str
    key: Mapping[str, object]
