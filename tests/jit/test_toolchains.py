"""Which compiler is called, and with which arguments, on this machine and on others."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import Mock

import pytest
from small_op import Project, answer, script

from ds_plugin_sdk.errors import ToolchainError
from ds_plugin_sdk.jit import (
    BuildSpec,
    Compiler,
    CudaToolchain,
    CxxToolchain,
    Machine,
    Source,
    SyclToolchain,
    Toolchain,
    acquire,
    compiler,
    get_toolchain,
    identify,
    register_toolchain,
    toolchains,
)
from ds_plugin_sdk.jit.cuda_archs import gencode
from ds_plugin_sdk.jit.machine import Torch
from ds_plugin_sdk.jit.target import CpuTarget
from ds_plugin_sdk.jit.toolchains import cxx_sibling
from pages import ROOT

SUMMIT = CpuTarget("ppc64le", "power9")
GRAVITON = CpuTarget("aarch64", "armv8.2-a+fp16+dotprod")
RISCV = CpuTarget("riscv64", "rv64gcv")
EPYC = CpuTarget("x86_64", "x86-64-v4")


@pytest.fixture
def torch_folder(tmp_path: Path) -> Path:
    lib = tmp_path / "torch" / "lib"
    lib.mkdir(parents=True)
    for name in ("torch", "torch_cpu", "c10", "torch_python"):
        (lib / f"lib{name}.so").touch()
    return tmp_path / "torch"


def machine_with(target: CpuTarget, torch_folder: Path) -> Machine:
    torch = Torch(torch_folder, "2.11.0", cxx11_abi=True)
    return Machine(target, torch, Path("/usr/include/python3.12"), "cpython-312-x")


def spec_of(*names: str, **fields: object) -> BuildSpec:
    sources = tuple(Source(Path("/src") / name) for name in names)
    return BuildSpec(name="fused_adam", owner="ds-plugin-test", sources=sources, **fields)


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with compilers that only tell their names."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, version in (
        ("g++", "g++ (Debian) 12.2.0"),
        ("clang++", "clang version 18.1.8"),
        ("icpx", "Intel(R) oneAPI DPC++/C++ Compiler 2025.2.0"),
        ("nvcc", "Cuda compilation tools, release 12.8, V12.8.93"),
    ):
        script(folder / name, f"echo '{version}'\n")
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (EPYC, "-march=x86-64-v4"),
        (SUMMIT, "-mcpu=power9"),
        (GRAVITON, "-march=armv8.2-a+fp16+dotprod"),
        (RISCV, "-march=rv64gcv"),
    ],
)
def test_flags_of_other_architectures(target: CpuTarget, expected: str, torch_folder: Path, compilers: Path) -> None:
    spec = spec_of("adam.cpp", cxx_args=("-march=native",))
    flags = CxxToolchain().flags(spec, machine_with(target, torch_folder))
    assert [flag for flag in flags if flag.startswith("-m")] == [expected]


def test_summit(torch_folder: Path, compilers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OLCF Summit, POWER9 with V100s: what its users had to patch by hand.

    DeepSpeed's flags there held -march=native, which POWER compilers do not know, its headers <x86intrin.h>, and
    torch's builder the macros that take the half operators away.
    """
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0")
    machine = machine_with(SUMMIT, torch_folder)
    spec = spec_of("adam.cpp", "adam.cu", toolchain="cuda", cxx_args=("-march=native",), nvcc_args=("--use_fast_math",))
    host, device = (CudaToolchain().compile_command(source, spec, machine) for source in spec.sources)
    words = " ".join([*host, *device, *CudaToolchain().link_command(spec, machine)])
    assert "-march" not in words and "native" not in words
    assert not any(x86 in words for x86 in ("avx", "AVX", "sse", "-mfma", "x86", "cpuid"))
    assert "-mcpu=power9" in host
    assert not any(word.startswith("-D__CUDA_NO_") for word in device)
    for macro in ("HALF_OPERATORS", "HALF_CONVERSIONS", "HALF2_OPERATORS", "BFLOAT16_CONVERSIONS"):
        assert f"-U__CUDA_NO_{macro}__" in device
    assert [word for word in device if "gencode" in word] == ["-gencode=arch=compute_70,code=sm_70"]


def test_a_stable_library(torch_folder: Path, compilers: Path) -> None:
    machine = machine_with(EPYC, torch_folder)
    spec = spec_of("adam.cpp", include_dirs=(Path("/src/include"),), link_args=("-lvendor",))
    compiling = CxxToolchain().compile_command(spec.sources[0], spec, machine)
    assert "-DTORCH_TARGET_VERSION=0x020B000000000000" in compiling
    assert "-std=c++17" in compiling
    assert "-MD" in compiling and "-MMD" not in compiling
    assert "-I/src/include" in compiling
    assert "/usr/include/python3.12" not in compiling
    assert compiling[-5:] == ["adam.cpp.d", "-c", "/src/adam.cpp", "-o", "adam.cpp.o"]
    link = CxxToolchain().link_command(spec, machine)
    assert link.index("-lvendor") < link.index("-ltorch_cpu")
    assert "-Wl,-z,defs" in link and "-ltorch_python" not in link
    assert not any("rpath" in word for word in link)


def test_a_python_module(torch_folder: Path, compilers: Path) -> None:
    machine = machine_with(EPYC, torch_folder)
    spec = spec_of("adam.cpp", kind="python_module", cxx_args=("-std=c++23",))
    compiling = CxxToolchain().compile_command(spec.sources[0], spec, machine)
    assert "-DTORCH_EXTENSION_NAME=fused_adam" in compiling
    assert not any(word.startswith("-DTORCH_TARGET_VERSION") for word in compiling)
    assert [word for word in compiling if "std=" in word] == ["-std=c++23"]
    assert "/usr/include/python3.12" in compiling
    link = CxxToolchain().link_command(spec, machine)
    assert "-ltorch_python" in link and "-Wl,-z,defs" not in link


def test_arguments_of_one_unit_come_last(torch_folder: Path, compilers: Path) -> None:
    spec = spec_of("adam.cpp", cxx_args=("-mavx2",))
    unit = Source(Path("/src/adam.cpp"), ("-mavx512f",), "avx512")
    command = CxxToolchain().compile_command(unit, spec, machine_with(EPYC, torch_folder))
    assert command.index("-mavx2") < command.index("-mavx512f")
    assert command[-1] == "adam.cpp.avx512.o"


@pytest.mark.parametrize(
    ("arch_list", "expected"),
    [
        ("8.0", ["80,code=sm_80"]),
        ("7.0;8.0+PTX", ["70,code=sm_70", "80,code=sm_80", "80,code=compute_80"]),
        ("9.0a 10.0f", ["90a,code=sm_90a", "100f,code=sm_100f"]),
        ("Volta, Hopper", ["70,code=sm_70", "70,code=compute_70", "90,code=sm_90", "90,code=compute_90"]),
        ("8.0 8.0", ["80,code=sm_80"]),
        ("Ampere+Tegra", ["87,code=sm_87"]),
    ],
)
def test_cuda_architectures(arch_list: str, expected: list[str]) -> None:
    assert gencode((), arch_list, "13.0") == [f"-gencode=arch=compute_{arch}" for arch in expected]


def test_cuda_architectures_by_default_and_by_the_builder() -> None:
    assert gencode((), None, "13.0") == gencode((), " ", "13.0") == ["-arch=all-major"]
    for arg in ("-gencode=arch=compute_80,code=sm_80", "-gencode", "-arch=sm_90", "--generate-code=arch=compute_80"):
        assert gencode((arg,), "7.0", "13.0") == []


@pytest.mark.parametrize(("nvcc", "newest"), [("12.4", "90"), ("12.8", "120")])
def test_cuda_12_leaves_out_what_has_no_grid_constant(nvcc: str, newest: str) -> None:
    """Its all-major has code for 5.0 and 6.0, for which the kernels do not compile."""
    flags = gencode((), None, nvcc)
    architectures = [flag.partition("sm_")[2] for flag in flags if "code=sm_" in flag]
    assert architectures[:3] == ["70", "80", "90"] and architectures[-1] == newest
    assert flags[-1] == f"-gencode=arch=compute_{newest},code=compute_{newest}"


def test_the_architectures_follow_the_nvcc_found(
    torch_folder: Path, compilers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    spec = spec_of("adam.cu", toolchain="cuda", portable=True)
    assert "-gencode=arch=compute_70,code=sm_70" in CudaToolchain().flags(spec, machine_with(EPYC, torch_folder))
    script(compilers / "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    assert "-arch=all-major" in CudaToolchain().flags(spec, machine_with(EPYC, torch_folder))


@pytest.mark.parametrize("arch_list", ["8", "sm_80", "Tesla"])
def test_cuda_architectures_that_do_not_exist(arch_list: str) -> None:
    with pytest.raises(ToolchainError, match="is no architecture"):
        gencode((), arch_list, "13.0")


@pytest.mark.parametrize(
    ("cc", "cxx"),
    [
        ("gcc", "g++"),
        ("/usr/bin/gcc-12", "/usr/bin/g++-12"),
        ("clang-18", "clang++-18"),
        ("/opt/llvm/bin/clang", "/opt/llvm/bin/clang++"),
        ("powerpc64le-linux-gnu-gcc", "powerpc64le-linux-gnu-g++"),
        ("cc", "c++"),
        ("icx", "icpx"),
        ("nvc", ""),
        ("tcc", ""),
        ("", ""),
    ],
)
def test_the_sibling_of_the_c_compiler(cc: str, cxx: str) -> None:
    assert cxx_sibling(cc) == cxx


def test_the_users_choice_of_compiler(compilers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CxxToolchain().compiler().command == (str(compilers / "g++"),)
    monkeypatch.setenv("CC", "clang")
    assert CxxToolchain().compiler().version == "18.1.8"
    monkeypatch.setenv("CC", "clang -m64")
    assert CxxToolchain().compiler().command == (str(compilers / "clang++"), "-m64")
    monkeypatch.setenv("CC", "gcc-99")
    assert CxxToolchain().compiler().command == (str(compilers / "g++"),)
    monkeypatch.setenv("CXX", "g++ -m64 '-DTWO=words, one argument'")
    assert CxxToolchain().compiler().command == (str(compilers / "g++"), "-m64", "-DTWO=words, one argument")


@pytest.mark.compiler
@pytest.mark.parametrize("given", ["CXX=./c++", "CXX=tools/c++", "PATH=tools", "CXX=ccache c++", "CUDA_HOME=toolkit"])
def test_a_compiler_with_a_relative_path_is_the_one_that_runs(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """Compilers run in the build folder, from where a relative path leads elsewhere, or PATH to another compiler."""
    variable, _, value = given.partition("=")
    ran = tmp_path / "ran"
    for folder in ("tools", "toolkit/bin", "."):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        script(tmp_path / folder / "c++", f'echo >> {ran}\nexec {shutil.which("c++")} "$@"\n')
    script(tmp_path / "tools" / "ccache", 'exec "$@"\n')
    script(tmp_path / "toolkit" / "bin" / "nvcc", "echo 'release 13.0, V13.0.88'\n")
    monkeypatch.chdir(tmp_path)
    if value.startswith("ccache") or variable == "PATH":
        monkeypatch.setenv("PATH", "tools", prepend=":")
    if variable != "PATH":
        monkeypatch.setenv(variable, value)
    if variable == "CUDA_HOME":
        assert CudaToolchain().nvcc().command == (str(tmp_path / "toolkit" / "bin" / "nvcc"),)
        return
    key = acquire(project.spec()).key["key"]
    assert len(ran.read_text().splitlines()) == 3, "it says its version, compiles and links"
    assert str(tmp_path) in key["toolchain"]["cxx"]["path"]
    assert all(str(tmp_path) in " ".join(command[:2]) for command in key["commands"])


def test_nvcc_is_found_in_its_places(compilers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert CudaToolchain().nvcc().version == "12.8"
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    script(home / "bin" / "nvcc", "echo 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert CudaToolchain().nvcc().version == "13.0"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(ToolchainError, match="no CUDA compiler"):
        CudaToolchain().nvcc()


def test_nvcc_of_pip_is_found(compilers: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (compilers / "nvcc").unlink()
    folder = tmp_path / "site" / "nvidia" / "cu13" / "bin"
    folder.mkdir(parents=True)
    script(folder / "nvcc", "echo 'Cuda compilation tools, release 13.1, V13.1.1'\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert CudaToolchain().nvcc().path == folder / "nvcc"


def test_nvcc_takes_the_host_compiler_behind_a_launcher(
    compilers: Path, torch_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(compilers / "ccache", 'exec "$@"\n')
    monkeypatch.setenv("CXX", "ccache clang++ -m64")
    spec = spec_of("adam.cu", toolchain="cuda")
    command = CudaToolchain().compile_command(spec.sources[0], spec, machine_with(EPYC, torch_folder))
    assert command[command.index("-ccbin") + 1] == str(compilers / "clang++")


def test_sycl(compilers: Path, torch_folder: Path) -> None:
    spec = spec_of("adam.cpp", toolchain="sycl", cxx_args=("-fsycl-targets=spir64",))
    machine = machine_with(EPYC, torch_folder)
    toolchain = SyclToolchain()
    assert toolchain.compile_command(spec.sources[0], spec, machine)[:2] == [str(compilers / "icpx"), "-fsycl"]
    assert "-fsycl-targets=spir64" in toolchain.compile_command(spec.sources[0], spec, machine)
    assert toolchain.link_command(spec, machine)[:2] == [str(compilers / "icpx"), "-fsycl"]
    (compilers / "icpx").unlink()
    with pytest.raises(ToolchainError, match="icpx") as caught:
        toolchain.find()
    assert "oneAPI" in caught.value.hint


@pytest.mark.compiler
def test_sycl_builds(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the host's compiler in icpx's clothes: it takes all arguments but -fsycl."""
    real = shutil.which("c++")
    folder = tmp_path / "oneapi"
    folder.mkdir()
    script(folder / "icpx", f'[ "$1" = -fsycl ] && shift\nexec {real} "$@"\n')
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    artifact = acquire(project.spec(toolchain="sycl"))
    assert answer(artifact.path) == 42
    assert "icpx" in artifact.key["key"]["toolchain"]


class VendorToolchain(Toolchain):
    """What a vendor writes: a compiler, its flags, the two commands."""

    def find(self) -> Mapping[str, Compiler]:
        return CxxToolchain().find()

    def flags(self, spec: BuildSpec, machine: Machine) -> list[str]:
        return ["-fPIC", "-DANSWER=40", "-DSHARED=2", *toolchains.includes(spec, machine)]

    def compile_command(self, source: Source, spec: BuildSpec, machine: Machine) -> list[str]:
        return ["c++", *self.flags(spec, machine), *toolchains.outputs(source)]

    def link_command(self, spec: BuildSpec, machine: Machine) -> list[str]:
        return ["c++", "-shared", "-o", spec.library, *(f"{source.stem}.o" for source in spec.sources)]


@pytest.mark.compiler
def test_the_documented_toolchain_compiles_with_the_vendors_compiler(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(# ds_plugin_zap/toolchain.py\n.*?)```", page, re.DOTALL)
    monkeypatch.setattr(toolchains, "_toolchains", dict(toolchains._toolchains))
    kernel = (project.root / "answer.cpp").rename(project.root / "answer.zap")
    host = project.root / "host.cpp"
    host.write_text("int host() { return 1; }\n")
    spec = project.spec(toolchain="zap", sources=(Source(kernel), Source(host)))
    exec(code, {"__name__": "toolchain"})
    with pytest.raises(ToolchainError, match="compiler 'zapcc' was not found"):
        acquire(spec)
    compiled = tmp_path / "compiled"
    body = '[ "$1" = --version ] && echo zapcc 1.0 && exit\n' + f'echo "$@" >> {compiled}\nexec c++ "$@"\n'
    script(tmp_path / "zapcc", body)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert answer(acquire(spec).path) == 42
    assert [line.rpartition(" -o ")[2] for line in compiled.read_text().splitlines()] == ["answer.zap.o"]
    (project.root / "answer.h").write_text("#define ANSWER 41\n")
    assert answer(acquire(spec).path) == 43


@pytest.mark.compiler
def test_a_vendors_toolchain(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchains, "_toolchains", dict(toolchains._toolchains))
    with pytest.raises(ToolchainError, match="no toolchain 'vendor'"):
        acquire(project.spec(toolchain="vendor"))
    mine = VendorToolchain()
    register_toolchain("vendor", mine)
    register_toolchain("vendor", mine)
    assert get_toolchain("vendor") is mine
    assert answer(acquire(project.spec(toolchain="vendor")).path) == 42
    with pytest.raises(ToolchainError, match="there is a toolchain 'vendor' already"):
        register_toolchain("vendor", VendorToolchain())


def test_a_compiler_that_does_not_answer_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op asks, and each time would take a minute."""
    monkeypatch.setattr(compiler, "_ANSWER_SECONDS", 0.2)
    asked = tmp_path / "asked"
    path = script(tmp_path / "mute-c++", f"echo x >> {asked}\nexec sleep 300\n")
    for _ in range(2):
        with pytest.raises(ToolchainError, match=r"mute-c\+\+ --version` did not answer within 0\.2 s") as caught:
            identify([str(path)])
        assert "licence server" in caught.value.hint
    assert asked.read_text() == "x\n"
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 600)
    path.write_text("#!/bin/sh\necho mute 1.0\n".ljust(path.stat().st_size, "\n"))
    assert identify([str(path)]).version == "1.0"


@pytest.mark.parametrize(
    ("program", "hint"), [("sleep 300", "licence server"), ("exit 1", "install g++")], ids=["waits", "fails"]
)
def test_a_compiler_that_cannot_be_used_has_the_hint_that_suits(
    program: str, hint: str, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "_ANSWER_SECONDS", 0.2)
    monkeypatch.setenv("CXX", str(script(tmp_path / "odd-c++", f"{program}\n")))
    with pytest.raises(ToolchainError, match="CXX names it") as caught:
        acquire(project.spec())
    assert hint in caught.value.hint


def test_a_compiler_that_the_system_does_not_start_has_the_systems_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of processes, say: installing another one would not help."""
    monkeypatch.setattr(compiler, "answer_to", Mock(side_effect=OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))))
    with pytest.raises(ToolchainError, match="Resource temporarily unavailable") as caught:
        identify([str(script(tmp_path / "any-c++", "exit 0\n"))])
    assert "ulimit -u" in caught.value.hint


def test_a_compiler_that_could_not_be_started_is_asked_again(tmp_path: Path) -> None:
    """What a system lacks for a moment, such as processes."""
    path = script(tmp_path / "late-c++", f"[ -e {tmp_path}/here ] || exit 1\necho late 1.0\n")
    with pytest.raises(ToolchainError, match="--version` exited with 1"):
        identify([str(path)])
    (tmp_path / "here").touch()
    assert identify([str(path)]).version == "1.0"


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("c++ -Ofast -shared -ffast-math a.o", "c++ -shared a.o"),
        ("c++ -shared -static-libstdc++ -static-libgcc a.o", "c++ -shared -static-libstdc++ a.o"),
        ("c++ -shared -static-libgcc a.o", "c++ -shared -static-libgcc a.o"),
        ("nvcc -Xcompiler -ffast-math -shared a.o", "nvcc -shared a.o"),
        ("nvcc -Xcompiler=-fPIC,-Ofast -Xcompiler -O2,-Ofast -shared", "nvcc -Xcompiler=-fPIC -Xcompiler -O2 -shared"),
        ("nvcc --compiler-options=-Ofast -Xlinker=-z,now a.o", "nvcc -Xlinker=-z,now a.o"),
        ("c++ -Wl,-z,defs -o x.so", "c++ -Wl,-z,defs -o x.so"),
    ],
)
def test_a_link_has_nothing_that_changes_the_process(words: str, left: str) -> None:
    """What kernels tell torch of wrong arguments passes from library to library, and denormal numbers stay."""
    assert toolchains.harmless(words.split()) == left.split()


@pytest.mark.parametrize("variables", [{"CXX": "c++ -Ofast"}, {"LDFLAGS": "-ffast-math"}], ids=str)
def test_a_library_leaves_denormal_numbers_as_they_are(
    project: Project, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GCC before 13 links code into it that makes zeros of them, in the process that loads it."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    program = "import ctypes, sys; x = 5e-324; ctypes.CDLL(sys.argv[1]); sys.exit(x * float(1) == 0)"
    subprocess.run([sys.executable, "-c", program, acquire(project.spec()).path], check=True)
