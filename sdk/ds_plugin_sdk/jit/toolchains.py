"""How compilers are found and called. A vendor adds a toolchain of their own with `register_toolchain`.

Command lines are functions of the spec and the machine, so that those for other machines can be tested on this one.
They name absolute inputs and outputs relative to the build folder, in which they are run without a shell.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_plugin_sdk.errors import ToolchainError
from ds_plugin_sdk.jit.compiler import LAUNCHERS, Compiler, answer_to, identify
from ds_plugin_sdk.jit.cuda_archs import capabilities, cuda_archs, gencode, runs_on
from ds_plugin_sdk.jit.machine import STABLE_TORCH_MACRO, Machine, Torch, find_torch
from ds_plugin_sdk.jit.spec import BuildSpec, Source
from ds_plugin_sdk.settings import settings


class Toolchain(ABC):
    """A family of compilers."""

    @abstractmethod
    def find(self) -> Mapping[str, Compiler]:
        """The compilers to be used, by role, e.g. ``{"cxx": ..., "nvcc": ...}``.

        Raises:
            ToolchainError: one is missing or unusable; the hint says what to install.
        """

    @abstractmethod
    def flags(self, spec: BuildSpec, machine: Machine) -> list[str]:
        """Arguments that all compilations of `spec` share."""

    @abstractmethod
    def compile_command(self, source: Source, spec: BuildSpec, machine: Machine) -> list[str]:
        """Compile `source` to ``<source.stem>.o``, listing every header, the system's too, in ``<source.stem>.d``."""

    @abstractmethod
    def link_command(self, spec: BuildSpec, machine: Machine) -> list[str]:
        """Link all objects to ``spec.library``."""

    def identity(self, spec: BuildSpec) -> dict[str, object]:
        """What the key says of this toolchain beside the command lines."""
        return {role: compiler.identity() for role, compiler in self.find().items()}

    def misfit(self, identity: Mapping[str, Any]) -> str:
        """Why a device of this machine does not run what was made with this `identity`; empty if all seen do."""
        return ""


class CxxToolchain(Toolchain):
    """g++, clang++ or whatever ``CXX`` names."""

    candidates: tuple[str, ...] = ("c++", "g++", "clang++")
    install_hint = "install g++ or clang++, or name one with CXX; on a cluster, `module load gcc` may do"

    def find(self) -> Mapping[str, Compiler]:
        return {"cxx": self.compiler()}

    def compiler(self) -> Compiler:
        """The C++ compiler: ``CXX``, else the sibling of ``CC`` if there is one, else the first candidate on PATH."""
        try:
            return identify(settings.cxx or self._candidate())
        except ToolchainError as error:
            why = f"CXX names it; {error.why}" if settings.cxx else error.why
            raise ToolchainError(error.what, why=why, hint=error.hint or self.install_hint) from error

    def _candidate(self) -> list[str]:
        # Of "ccache gcc -m64" it is "ccache g++ -m64".
        sibling = [cxx_sibling(word) or word for word in settings.cc] if any(map(cxx_sibling, settings.cc)) else []
        for command in (sibling, *([name] for name in self.candidates)):
            if command and shutil.which(command[0]):
                return command
        names = ", ".join(self.candidates)
        raise ToolchainError("no C++ compiler", why=f"none of {names} is on PATH", hint=self.install_hint)

    def flags(self, spec: BuildSpec, machine: Machine) -> list[str]:
        args = [*spec.cxx_args, *settings.cflags, *settings.cxxflags]
        return [
            *standard(spec, spec.cxx_args),
            "-O3",
            "-fPIC",
            "-fvisibility=hidden",
            *definitions(spec, machine),
            *includes(spec, machine),
            *machine.target.resolve(args),
        ]

    def compile_command(self, source: Source, spec: BuildSpec, machine: Machine) -> list[str]:
        return [
            *self.compiler().command,
            *self.flags(spec, machine),
            *machine.target.resolve(source.args),
            *outputs(source),
        ]

    def link_command(self, spec: BuildSpec, machine: Machine) -> list[str]:
        # An undefined symbol of a torch library is an error here and not at load; a Python module's are Python's.
        strict = ["-Wl,-z,defs"] if spec.kind == "torch_library" else []
        return [
            *self.compiler().command,
            "-shared",
            *(f"{source.stem}.o" for source in spec.sources),
            "-o",
            spec.library,
            *spec.link_args,
            *strict,
            "-Wl,--as-needed",
            *torch_libraries(spec, machine),
            *settings.ldflags,
        ]


class SyclToolchain(CxxToolchain):
    """Intel's DPC++, ``icpx -fsycl``.

    Where pip has installed a SYCL runtime, as torch's wheels for Intel's GPUs do, its headers and libraries go before
    those of the compiler: the process has one runtime, and it is torch's.
    """

    install_hint = "install Intel's oneAPI DPC++/C++ compiler and `source /opt/intel/oneapi/setvars.sh`"

    def compiler(self) -> Compiler:
        if shutil.which("icpx") is None:
            raise ToolchainError("no SYCL compiler", why="icpx is not on PATH", hint=self.install_hint)
        return identify(["icpx"])

    def find(self) -> Mapping[str, Compiler]:
        return {"icpx": self.compiler()}

    def flags(self, spec: BuildSpec, machine: Machine) -> list[str]:
        headers = Path(sys.prefix, "include")
        ours = ["-isystem", str(headers)] if (headers / "sycl").is_dir() else []
        return ["-fsycl", *ours, *super().flags(spec, machine)]

    def link_command(self, spec: BuildSpec, machine: Machine) -> list[str]:
        libraries = Path(sys.prefix, "lib")
        ours = [f"-L{libraries}", f"-Wl,-rpath,{libraries}"] if (libraries / "libsycl.so").is_file() else []
        program, *rest = super().link_command(spec, machine)
        return [program, "-fsycl", *rest, *ours]


class CudaToolchain(Toolchain):
    """nvcc for ``.cu`` files and the link, its host compiler for the others."""

    def __init__(self) -> None:
        self._host = _HostToolchain()

    def find(self) -> Mapping[str, Compiler]:
        return {"nvcc": self.fitting_nvcc(find_torch()), "cxx": self._host.compiler()}

    def fitting_nvcc(self, torch: Torch) -> Compiler:
        """`nvcc`, if what it makes runs with `torch`: kernels and torch share the CUDA runtime of the process.

        Raises:
            ToolchainError: there is no nvcc, or it is too old, or of another CUDA generation.
        """
        nvcc = self.nvcc()
        release = tuple(map(int, re.findall(r"\d+", nvcc.version)[:2]))
        wanted = torch.cuda_release[0] if torch.cuda_release else _OLDEST_NVCC[0]
        # pip's nvidia-cuda-nvcc-cu12 has an assembler and no compiler.
        of_pip = f", or `pip install 'nvidia-cuda-nvcc=={wanted}.*'`" if wanted >= 13 else ""
        hint = f"set CUDA_HOME to a CUDA {wanted} toolkit, or `module load cuda/{wanted}` on a cluster{of_pip}"
        if release and release < _OLDEST_NVCC:
            oldest = ".".join(map(str, _OLDEST_NVCC))
            raise ToolchainError(
                f"nvcc {nvcc.version} is too old", why=f"{nvcc.path}; at least {oldest} is needed", hint=hint
            )
        if release and torch.cuda_release and release[0] != torch.cuda_release[0]:
            raise ToolchainError(
                f"nvcc {nvcc.version} does not fit torch {torch.version}",
                why=f"{nvcc.path} makes code for CUDA {release[0]}, torch was built for CUDA {torch.cuda_release[0]}",
                hint=hint,
            )
        return nvcc

    def nvcc(self) -> Compiler:
        """nvcc of ``PYTORCH_NVCC``, else of ``CUDA_HOME``, on PATH, of pip's nvidia packages, of /usr/local/cuda."""
        for program, *args in self._commands():
            if shutil.which(program):
                return identify([program, *args])
        named = "PYTORCH_NVCC" if settings.nvcc else "CUDA_HOME" if settings.cuda_home is not None else ""
        if named:
            raise ToolchainError(
                "no CUDA compiler",
                why=f"{named} names {program}, which is no program; nothing else is looked at then",
                hint=f"correct {named}, or unset it: nvcc is then looked for on PATH and in /usr/local/cuda",
            )
        raise ToolchainError(
            "no CUDA compiler",
            why="no nvcc on PATH, in pip's nvidia packages or in /usr/local/cuda",
            hint="install the CUDA toolkit or `pip install nvidia-cuda-nvcc`, or set CUDA_HOME",
        )

    @staticmethod
    def _commands() -> Iterable[list[str]]:
        if settings.nvcc:
            yield [word for word in settings.nvcc if Path(word).name not in LAUNCHERS] or [*settings.nvcc]
            return
        if settings.cuda_home is not None:
            yield [str(settings.cuda_home / "bin" / "nvcc")]
            return
        yield ["nvcc"]
        for folder in _pip_folders():
            yield [str(folder / "bin" / "nvcc")]
        yield ["/usr/local/cuda/bin/nvcc"]

    @staticmethod
    def _launcher() -> list[str]:
        """What compiles through nvcc: that of ``PYTORCH_NVCC="ccache nvcc"``, else ccache if it is there."""
        if settings.nvcc:
            return [word for word in settings.nvcc if Path(word).name in LAUNCHERS]
        return ["ccache"] if shutil.which("ccache") else []

    def identity(self, spec: BuildSpec) -> dict[str, object]:
        return {**super().identity(spec), "cuda_archs": self._archs(spec)}

    def misfit(self, identity: Mapping[str, Any]) -> str:
        made, cuda = _major(identity.get("nvcc", {}).get("version", "")), find_torch().cuda_release
        if made and cuda and made != cuda[0]:
            return f"it needs the runtime of CUDA {made}, and torch brings that of CUDA {cuda[0]}"
        archs: list[str] = identity.get("cuda_archs") or []  # none where the builder chose them by itself
        for capability in capabilities() if archs else ():
            if not runs_on(archs, capability):
                version = ".".join(map(str, capability))
                return f"it has no code for a GPU of compute capability {version}: {' '.join(archs)}"
        return ""

    def flags(self, spec: BuildSpec, machine: Machine) -> list[str]:
        return [
            *standard(spec, spec.nvcc_args),
            "-O3",
            "--expt-relaxed-constexpr",
            "-Xcompiler=-fPIC,-fvisibility=hidden",
            *self._host_compiler(),
            "-DUSE_CUDA",
            *definitions(spec, machine),
            *HALF_OPERATORS,
            *includes(spec, machine),
            *self._headers(),
            *self._archs(spec),
            *machine.target.resolve(spec.nvcc_args),
        ]

    def compile_command(self, source: Source, spec: BuildSpec, machine: Machine) -> list[str]:
        if source.path.suffix == ".cu":
            args = [*self.flags(spec, machine), *machine.target.resolve(source.args), *outputs(source)]
            return [*self._launcher(), *self.fitting_nvcc(machine.torch).command, *args]
        command = self._host.compile_command(source, spec, machine)
        position = len(self._host.compiler().command)
        return [*command[:position], "-DUSE_CUDA", *self._headers(), *command[position:]]

    def link_command(self, spec: BuildSpec, machine: Machine) -> list[str]:
        return [
            *self.fitting_nvcc(machine.torch).command,
            "-shared",
            *self._runtime(),
            "--forward-unknown-to-host-compiler",  # and not to the linker, which knows no -Wl
            *self._host_compiler(),
            *(f"{source.stem}.o" for source in spec.sources),
            "-o",
            spec.library,
            *spec.link_args,
            *torch_libraries(spec, machine, *_TORCH_CUDA),
            # A wheel may be built with a torch without CUDA: its libraries then look into those of the torch that loads
            # them, where there are such.
            *(f"-Xlinker=--auxiliary=lib{name}.so" for name in _TORCH_CUDA if not machine.torch.has(name)),
            *settings.ldflags,
        ]

    def _archs(self, spec: BuildSpec) -> list[str]:
        nvcc = self.nvcc()
        return gencode(spec.nvcc_args, cuda_archs(spec.portable, nvcc), nvcc.version)

    def _host_compiler(self) -> list[str]:
        # -ccbin takes one program: of "ccache g++ -m64" it is g++.
        command = self._host.compiler().command
        return ["-ccbin", next((word for word in command if Path(word).name not in LAUNCHERS), command[0])]

    def _headers(self) -> list[str]:
        """Where compilers find cuda_runtime.h."""
        for folder in (home / "include" for home in self._homes()):
            if (folder / "cuda_runtime.h").exists() and self._is_of_nvcc(_release_of_headers(folder)):
                # Named by -isystem, /usr/include comes before g++'s own headers, which then find no math.h after them.
                return [] if folder.resolve() == Path("/usr/include") else ["-isystem", str(folder)]
        return []

    def _runtime(self) -> list[str]:
        """The shared CUDA runtime, so that kernels use the one that torch has loaded: one runtime in a process.

        By its file: pip's packages lack the name that -lcudart looks for.
        """
        for folder in (home / lib for home in self._homes() for lib in ("lib64", "lib")):
            found = sorted(folder.glob("libcudart.so*"))
            if found and self._is_of_nvcc(_major(found[0].resolve().name.partition(".so.")[2])):
                return ["--cudart=none", str(found[0])]
        return ["--cudart=shared"]

    def _homes(self) -> Iterable[Path]:
        """Folders with CUDA's include and lib. nvcc on PATH may be a script outside its toolkit, or pip's."""
        yield self.nvcc().path.parent.parent
        yield from _toolkit(self.nvcc())
        if settings.cuda_home is None and not settings.nvcc:
            yield Path("/usr/local/cuda")
        yield from _pip_folders()

    def _is_of_nvcc(self, major: int) -> bool:
        """Whether something is of nvcc's CUDA generation, as far as both are known."""
        return not major or _major(self.nvcc().version) in (0, major)


class _HostToolchain(CxxToolchain):
    """The host compiler of nvcc: as elsewhere, but ``NVCC_CCBIN`` goes before what is found on PATH."""

    def _candidate(self) -> list[str]:
        if settings.nvcc_ccbin is None or settings.cc:
            return super()._candidate()
        programs = (str(settings.nvcc_ccbin / name) for name in ("g++", "clang++", "c++"))
        return [next(filter(shutil.which, programs), str(settings.nvcc_ccbin))]


_TORCH_CUDA = ("torch_cuda", "c10_cuda")
_OLDEST_NVCC = (12, 0)  # torch 2.11 is built for CUDA 12 and 13


def _major(version: str) -> int:
    """The first number of a version; 0 if it has none."""
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0


@functools.cache
def _release_of_headers(folder: Path) -> int:
    """The generation of CUDA's headers in a folder; 0 if they do not say."""
    with contextlib.suppress(OSError):
        text = (folder / "cuda_runtime_api.h").read_text(errors="replace")
        if found := re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text):
            return int(found[1]) // 1000
    return 0


@functools.cache
def _toolkit(nvcc: Compiler) -> tuple[Path, ...]:
    """The toolkit that nvcc itself names, which a script or a link in another folder is not in."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        answer = answer_to(nvcc.command, "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull)
        if found := re.search(r"^#\$ TOP=(.+)$", answer.stderr, re.MULTILINE):
            return (Path(found[1].strip()).resolve(),)
    return ()


def _pip_folders() -> list[Path]:
    """Folders of pip's nvidia packages, the newest CUDA first."""
    packages = importlib.util.find_spec("nvidia")
    folders = (packages.submodule_search_locations or ()) if packages else ()
    return sorted((path for folder in folders for path in Path(folder).glob("*") if path.is_dir()), reverse=True)


# torch.utils.cpp_extension defines __CUDA_NO_HALF_OPERATORS__ and its family; kernels written for DeepSpeed need the
# operators, so the macros are undefined whatever the environment's flags say.
HALF_OPERATORS = [
    f"-U__CUDA_NO_{name}__"
    for name in (
        "HALF_OPERATORS",
        "HALF_CONVERSIONS",
        "HALF2_OPERATORS",
        "BFLOAT16_OPERATORS",
        "BFLOAT16_CONVERSIONS",
        "BFLOAT162_OPERATORS",
    )
]


def cxx_sibling(cc: str) -> str:
    """The C++ compiler beside a C compiler: ``gcc-12`` -> ``g++-12``, ``/opt/llvm/bin/clang`` -> its ``clang++``.

    Empty when there is none that we know.
    """
    pairs = {"gcc": "g++", "clang": "clang++", "cc": "c++", "icx": "icpx"}
    found = re.fullmatch(r"(.*?)(gcc|clang|cc|icx)(-[\d.]+)?", cc.strip())
    if found is None or (found[1] and found[1][-1] not in "/- "):
        return ""
    return f"{found[1]}{pairs[found[2]]}{found[3] or ''}"


def standard(spec: BuildSpec, args: Iterable[str]) -> list[str]:
    """C++17 is what the stable headers need and C++20 what torch's others do, unless the builder chose."""
    if any(arg.startswith(("-std=", "--std=")) for arg in args):
        return []
    return ["-std=c++17" if spec.stable else "-std=c++20"]


def definitions(spec: BuildSpec, machine: Machine) -> list[str]:
    """Macros that torch's headers and ours expect."""
    name = f"-DTORCH_EXTENSION_NAME={spec.name}"
    if spec.stable:
        return [name, f"-DTORCH_TARGET_VERSION={STABLE_TORCH_MACRO}"]
    return [
        name,
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(machine.torch.cxx11_abi)}",
    ]


def includes(spec: BuildSpec, machine: Machine) -> list[str]:
    """Own headers with -I; torch's and Python's as system headers, so that their warnings are not the op's."""
    foreign = list(machine.torch.include_dirs)
    if not spec.stable:
        foreign.append(machine.python_include)
    own = [f"-I{folder}" for folder in spec.include_dirs]
    return own + [word for folder in foreign for word in ("-isystem", str(folder))]


def outputs(source: Source) -> list[str]:
    """-MD and not -MMD: the latter leaves system headers out, torch's among them."""
    return ["-MD", "-MF", f"{source.stem}.d", "-c", str(source.path), "-o", f"{source.stem}.o"]


def torch_libraries(spec: BuildSpec, machine: Machine, *device: str) -> list[str]:
    """torch's libraries that are there. No rpath: at load they are in the process already, in whichever folder."""
    names = ["torch_cpu", "torch", "c10", *device]
    if spec.kind == "python_module":
        names.insert(0, "torch_python")
    return [f"-L{machine.torch.lib_dir}", *(f"-l{name}" for name in names if machine.torch.has(name))]


_toolchains: dict[str, Toolchain] = {
    "cxx": CxxToolchain(),
    "cuda": CudaToolchain(),
    "sycl": SyclToolchain(),
}


# With these GCC adds code to a library that makes zeros of all denormal numbers in the process that loads it: before
# version 13 with the first ones, since then with the last.
_FLUSHING = frozenset({"-Ofast", "-ffast-math", "--fast-math", "-funsafe-math-optimizations", "-mdaz-ftz"})
# With both, exceptions do not pass to other libraries: by them kernels tell torch of wrong arguments.
_STATIC = frozenset({"-static-libgcc", "-static-libstdc++"})
_TO_HOST = ("-Xcompiler", "--compiler-options")  # nvcc's


def harmless(command: Sequence[str]) -> list[str]:
    """A command that links a library, without what changes or ends the process that loads it."""
    words = {part for word in command for part in re.split("[,=]", word)}
    unwanted = _FLUSHING | ({"-static-libgcc"} if words >= _STATIC else set())
    kept: list[str] = []
    for word in command:
        option, equals, values = word.partition("=") if word.startswith(_TO_HOST) else ("", "", word)
        is_of_host = bool(equals) or kept[-1:] in ([option] for option in _TO_HOST)
        wanted = [each for each in (values.split(",") if is_of_host else [values]) if each not in unwanted]
        if wanted or not values:
            kept.append(f"{option}{equals}{','.join(wanted)}")
        elif is_of_host and not equals:
            kept.pop()  # the option that it was the argument of
    return kept


def register_toolchain(name: str, toolchain: Toolchain) -> None:
    """Make `toolchain` available to specs that name it.

    Raises:
        ToolchainError: another toolchain has that name.
    """
    if _toolchains.setdefault(name, toolchain) is not toolchain:
        raise ToolchainError(f"there is a toolchain '{name}' already", why=f"{_toolchains[name]!r}")


def get_toolchain(name: str) -> Toolchain:
    """The toolchain of that name.

    Raises:
        ToolchainError: there is none.
    """
    try:
        return _toolchains[name]
    except KeyError:
        raise ToolchainError(
            f"there is no toolchain '{name}'",
            why=f"registered: {', '.join(sorted(_toolchains))}",
            hint="register_toolchain() adds one",
        ) from None


def toolchain_names() -> list[str]:
    """The registered toolchains."""
    return list(_toolchains)
