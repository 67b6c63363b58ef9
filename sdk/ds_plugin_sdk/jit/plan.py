"""A build, planned: its command lines, and the key that says all it depends on but the headers.

Which headers a source includes only the compiler knows, so there are two keys, as in ccache's direct mode: the direct
key, computed here, leads to the builds made of these sources by these commands; each of them lists the headers it was
made with, and the first whose list still holds is the one (see `cache`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO

from ds_plugin_sdk.errors import CompileError, ToolchainError
from ds_plugin_sdk.jit import machine, target, toolchains
from ds_plugin_sdk.jit.machine import Machine
from ds_plugin_sdk.jit.spec import BuildSpec
from ds_plugin_sdk.settings import compiler_environment, settings

# Raise when the meaning of keys or the layout of entries changes: older entries are then not looked at.
SCHEMA = 1


class Tokens:
    """Writes paths below known folders as ``$token/...``, and reads them back."""

    def __init__(self, spec: BuildSpec, here: Machine) -> None:
        own = dict(spec.roots)
        foreign = {"torch": here.torch.root, "python": here.python_include}
        self._folders = {f"${token}": str(folder) for token, folder in {**foreign, **own}.items()}
        self._own = tuple(f"${token}/" for token in own)
        forms = {form: token for token, folder in self._folders.items() for form in (os.path.realpath(folder), folder)}
        self._patterns = [
            (re.compile(re.escape(form) + r"(?=$|[/,:;])"), forms[form])
            for form in sorted(forms, key=len, reverse=True)
        ]

    def write(self, text: str) -> str:
        """`text`, a path or an argument with paths in it, with folders replaced by tokens."""
        for pattern, token in self._patterns:
            text = pattern.sub(token, text)
        return text

    def read(self, path: str) -> str:
        """The path that `write` wrote."""
        token, slash, rest = path.partition("/")
        return self._folders[token] + slash + rest if token in self._folders else path

    def is_own(self, path: str) -> bool:
        """Whether a written path lies below one of the spec's own roots."""
        return path.startswith(self._own)


@dataclass(frozen=True)
class Request:
    """What a builder asks for, on which machine.

    Attributes:
        digests: SHA-256 of each source.
        facts: the spec in a form that is the same on every machine: sources, arguments, kind.
        user_args: what the user adds to the compiler's, by CFLAGS, CXXFLAGS and in CXX, in such a form.
        cpu: the CPU that code is made for, as `CpuTarget.runs` takes it.
    """

    spec: BuildSpec
    machine: Machine
    tokens: Tokens
    digests: tuple[str, ...]
    facts: Mapping[str, object]
    user_args: tuple[str, ...]
    cpu: str


@dataclass(frozen=True)
class Plan:
    """How a request is fulfilled on its machine.

    Attributes:
        compile: one command per source, in order; to be run in the build folder.
        link: the last command.
        key: everything the binary depends on, except the headers.
        direct: digest of `key`; the folder of the cache in which builds of this plan lie.
    """

    request: Request
    compile: tuple[tuple[str, ...], ...]
    link: tuple[str, ...]
    key: Mapping[str, object]
    direct: str

    @property
    def spec(self) -> BuildSpec:
        return self.request.spec


def make_request(spec: BuildSpec) -> Request:
    """State what `spec` asks for.

    Raises:
        ToolchainError: torch is not installed.
        CompileError: a source cannot be read.
    """
    here = machine.here()
    tokens = Tokens(spec, here)
    digests = source_digests(spec)

    def plain(args: Iterable[str]) -> list[str]:
        return [tokens.write(arg) for arg in target.without_native(args)]

    facts = {
        "op": spec.name,
        "owner": spec.owner,
        "kind": spec.kind,
        "toolchain": spec.toolchain,
        "cxx_args": plain(spec.cxx_args),
        "nvcc_args": plain(spec.nvcc_args),
        "link_args": plain(spec.link_args),
        "sources": [
            {
                "path": tokens.write(str(source.path)),
                "args": plain(source.args),
                "tag": source.tag,
                "sha256": sha256,
            }
            for source, sha256 in zip(spec.sources, digests, strict=True)
        ],
    }
    of_compiler = (word for word in settings.cxx or settings.cc if word.startswith("-"))
    of_user = (*of_compiler, *settings.cflags, *settings.cxxflags)
    cpu = target.named(here.target.arch, of_user)
    if here.target.runs(cpu) and _wants_native(spec, of_user):
        cpu = here.target.level
    return Request(spec, here, tokens, digests, facts, tuple(plain(of_user)), cpu)


def make_plan(request: Request) -> Plan:
    """Plan the build of `request` with the compilers of this machine.

    Raises:
        ToolchainError: there is no usable compiler, or torch is too old.
    """
    spec, here = request.spec, request.machine
    if spec.stable and here.torch.release < machine.STABLE_TORCH:
        raise ToolchainError(
            "torch is too old",
            why=f"kernels are compiled for torch {machine.STABLE_TORCH_VERSION} or later, this is {here.torch.version}",
            hint=f"pip install 'torch>={machine.STABLE_TORCH_VERSION}'",
        )
    toolchain = toolchains.get_toolchain(spec.toolchain)
    compiling = tuple(tuple(toolchain.compile_command(source, spec, here)) for source in spec.sources)
    link = tuple(toolchains.harmless(toolchain.link_command(spec, here)))
    linked_files = _linked_files((*spec.link_args, *settings.ldflags))
    linked = [f"{request.tokens.write(str(file))} {file_digest(file)}" for file in linked_files]
    key: dict[str, object] = {
        "schema": SCHEMA,
        "request": request.facts,
        "arch": here.target.arch,
        "cpu": request.cpu,
        "abi": here.abi(spec),
        "toolchain": toolchain.identity(spec),
        "environment": compiler_environment(),
        **({"user_args": [*request.user_args]} if request.user_args else {}),
        **({"linked": linked} if linked else {}),
        "commands": [[request.tokens.write(word) for word in command] for command in (*compiling, link)],
    }
    return Plan(request, compiling, link, key, digest(key))


def _linked_files(args: Sequence[str]) -> Iterator[Path]:
    """What a link copies into the library: objects and static libraries that its arguments name, and scripts it reads.

    Libraries are looked for in the folders that ``-L`` names, as the linker does. A shared one there is read when the
    library is loaded; a static one beside it counts, for ``-Bstatic`` may be in force.
    """
    folders = [Path(arg[2:]) for arg in args if arg.startswith("-L")]
    for arg in args:
        if arg.startswith("-l"):
            name = arg[2:]
            names = [name[1:]] if name.startswith(":") else [f"lib{name}.so", f"lib{name}.a"]
            there = ([folder / each for each in names if _is_file(folder / each)] for folder in folders)
            found = next(filter(None, there), [])
        else:
            parts = (Path(part.rpartition("=")[2]) for part in arg.split(","))
            found = [part for part in parts if part.is_absolute() and _is_file(part)]
        yield from (file for file in found if ".so" not in file.suffixes)


def _is_file(path: Path) -> bool:
    """Whether it is a file that this user can see."""
    try:
        return path.is_file()
    except OSError:  # it lies in a folder that this user cannot enter
        return False


def digest(value: object) -> str:
    """Name of a folder: 128 bits of the SHA-256 of a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def file_digest(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:  # noqa: PTH123  # faster than pathlib, for hundreds
        return stream_digest(file)


def stream_digest(file: BinaryIO) -> str:
    """SHA-256 of an open file, from its position on."""
    state = hashlib.sha256()
    while block := file.read(1 << 20):
        state.update(block)
    return state.hexdigest()


def differences(old: object, new: object, name: str = "") -> list[str]:
    """Where two keys differ, a line each: ``nvcc 12.8 -> 13.0``, ``$sdk/adam.cpp changed``, ``-O2 -> -O3`` ..."""
    if old == new:
        return []
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        if "text" in old and "text" in new:  # a compiler: its role, and the versions, the paths or all it says
            shown = next((each for each in ("version", "path") if old.get(each) != new.get(each)), "text")
            lines = (str(each.get(shown)).splitlines() for each in (old, new))
            was, now = next(pair for pair in zip_longest(*lines, fillvalue="nothing") if pair[0] != pair[1])
            return [f"{name} {was} -> {now}"]
        names = [*old, *(key for key in new if key not in old)]
        return [line for key in names for line in differences(old.get(key), new.get(key), key)]
    if name == "sources" and isinstance(old, list) and isinstance(new, list):
        return _source_differences(old, new)
    if isinstance(old, list) and isinstance(new, list):
        gone = [str(item) for item in old if item not in new]
        come = [str(item) for item in new if item not in old]
        return [f"{name}: {' '.join(gone) or 'nothing'} -> {' '.join(come) or 'nothing'}"]
    return [f"{name} {old or 'none'} -> {new or 'none'}"]


def lacking(built: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """What a binary lacks of what is asked for, a line each, as `differences` has them.

    It may have more units of the same files: a portable binary has one for each instruction-set level, and takes the
    best when it runs, where a build for one machine has one.
    """
    have, want = ({**facts, "sources": ()} for facts in (built, asked))
    files = {source["path"] for source in asked["sources"]}
    units = {_unit(source) for source in asked["sources"]}
    compared = [source for source in built["sources"] if _unit(source) in units or source["path"] not in files]
    return differences(have, want) + _source_differences(compared, asked["sources"])


def _unit(source: Mapping[str, Any]) -> tuple[str, str]:
    return source["path"], source["tag"]


def _source_differences(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[str]:
    before = {_unit(source): source for source in old}
    after = {_unit(source): source for source in new}
    lines = [f"{' '.join(unit).strip()} was removed" for unit in before if unit not in after]
    lines += [f"{' '.join(unit).strip()} was added" for unit in after if unit not in before]
    for unit in (unit for unit in before if unit in after):
        name = " ".join(unit).strip()
        if before[unit]["sha256"] != after[unit]["sha256"]:
            lines.append(f"{name} changed")
        lines += differences(before[unit]["args"], after[unit]["args"], f"arguments of {name}")
    return lines


def _wants_native(spec: BuildSpec, of_user: Sequence[str]) -> bool:
    of_sources = (arg for source in spec.sources for arg in source.args)
    return target.wants_native((*spec.cxx_args, *spec.nvcc_args, *of_sources, *of_user))


def source_digests(spec: BuildSpec) -> tuple[str, ...]:
    """SHA-256 of each source of `spec`.

    Raises:
        CompileError: one cannot be read.
    """
    digests: dict[Path, str] = {}
    for path in {source.path for source in spec.sources}:
        try:
            digests[path] = file_digest(path)
        except OSError as error:
            raise CompileError(
                "a source cannot be read",
                plugin=spec.owner,
                op=spec.name,
                why=f"{path}: {error.strerror or error}",
                hint="see what the builder's sources() lists, and that the package's data has the file",
            ) from error
    return tuple(digests[source.path] for source in spec.sources)
