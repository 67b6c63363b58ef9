"""nvcc: which one, whether it fits, for which GPUs, and what is said when something does not fit."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from small_op import script

import cuda_compile
from ds_plugin_cuda.op_builder.kernels import BUILDERS
from ds_plugin_sdk import nvml, op_builder, prebuild
from ds_plugin_sdk.errors import CompileError, ToolchainError
from ds_plugin_sdk.jit import CudaToolchain, cuda_archs, toolchains
from ds_plugin_sdk.jit.machine import Torch, find_torch
from ds_plugin_sdk.op_builder import CUDAOpBuilder
from ds_plugin_sdk.settings import child_environment
from gpu_check import check

ROOT = Path(__file__).resolve().parents[2]
NVCC = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc, neither on PATH nor in /usr/local/cuda")


def torch_for(cuda: tuple[int, int] | None) -> Torch:
    return Torch(Path("/torch"), "2.11.0", cxx11_abi=True, cuda_release=cuda)


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A toolkit of CUDA 12.8 in CUDA_HOME."""
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.delenv("PYTORCH_NVCC", raising=False)
    return says(home, "12.8")


def says(home: Path, release: str) -> Path:
    return script(home / "bin" / "nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.93'\n")


@pytest.mark.parametrize("cuda", [None, (12, 6), (12, 9)])
def test_an_nvcc_that_fits(nvcc: Path, cuda: tuple[int, int] | None) -> None:
    assert CudaToolchain().fitting_nvcc(torch_for(cuda)).path == nvcc


def test_an_nvcc_of_another_generation(nvcc: Path) -> None:
    with pytest.raises(ToolchainError, match=r"nvcc 12\.8 does not fit torch 2\.11\.0") as caught:
        CudaToolchain().fitting_nvcc(torch_for((13, 0)))
    assert "CUDA 12" in caught.value.why and "CUDA 13" in caught.value.why
    assert "nvidia-cuda-nvcc==13.*" in caught.value.hint and "CUDA_HOME" in caught.value.hint


def test_an_nvcc_that_is_too_old(nvcc: Path) -> None:
    says(nvcc.parents[1], "11.4")
    with pytest.raises(ToolchainError, match=r"nvcc 11\.4 is too old") as caught:
        CudaToolchain().fitting_nvcc(torch_for((12, 6)))
    assert "CUDA 12 toolkit" in caught.value.hint and "pip" not in caught.value.hint


def test_the_users_own_nvcc(nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``PYTORCH_NVCC="ccache nvcc -arguments"``, as torch's own builder takes it."""
    other = tmp_path / "other"
    (other / "bin").mkdir(parents=True)
    monkeypatch.setenv("PYTORCH_NVCC", f"ccache {says(other, '13.0')} -allow-unsupported-compiler")
    assert CudaToolchain().nvcc().version == "13.0"
    assert CudaToolchain().nvcc().command == (str(other / "bin" / "nvcc"), "-allow-unsupported-compiler")
    assert CudaToolchain._launcher() == ["ccache"]


def test_ccache_is_used_where_it_is(nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert CudaToolchain._launcher() == []
    (tmp_path / "bin").mkdir()
    script(tmp_path / "bin" / "ccache", 'exec "$@"\n')
    assert CudaToolchain._launcher() == ["ccache"]


def test_the_cuda_runtime_is_linked_by_its_file(nvcc: Path) -> None:
    """pip's packages have libcudart.so.12 and no libcudart.so, which -lcudart would look for."""
    lib = nvcc.parents[1] / "lib"
    lib.mkdir()
    (lib / "libcudart.so.12").touch()
    assert CudaToolchain()._runtime() == ["--cudart=none", str(lib / "libcudart.so.12")]


@pytest.fixture
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts GPUs of these capabilities into the machine."""

    def put(*capabilities: tuple[int, int]) -> None:
        gpus = tuple(nvml.Gpu("GPU", f"GPU-{i}", capability) for i, capability in enumerate(capabilities))
        monkeypatch.setattr(nvml, "ask", lambda: nvml.Driver("580.1", (13, 0), gpus))
        cuda_archs.capabilities.cache_clear()

    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    yield put
    cuda_archs.capabilities.cache_clear()


@pytest.fixture
def two_gpus(with_gpus: Callable[..., None]) -> None:
    with_gpus((9, 0), (8, 0), (9, 0))


def test_a_build_for_this_machine_is_for_its_gpus(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda_archs.cuda_archs(portable=False) == "8.0 9.0"
    assert cuda_archs.cuda_archs(portable=True) is None
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0+PTX")
    assert cuda_archs.cuda_archs(portable=False) == cuda_archs.cuda_archs(portable=True) == "7.0+PTX"


def test_a_gpu_that_is_too_old_keeps_no_other_from_its_kernels(with_gpus: Callable[..., None]) -> None:
    with_gpus((6, 1), (8, 9))
    assert cuda_archs.cuda_archs(portable=False) == "8.9"
    with_gpus((6, 1))
    assert cuda_archs.cuda_archs(portable=False) == "6.1", "so that nvcc says what is wrong"


def test_a_gpu_that_nvcc_does_not_know_keeps_no_other_from_its_kernels(
    with_gpus: Callable[..., None], nvcc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(nvcc, "echo 'release 13.0, V13.0'; printf 'compute_%s\\n' 75 80 86 90 100\n")
    compiler = CudaToolchain().nvcc()
    with_gpus((13, 0), (8, 9))
    assert cuda_archs.cuda_archs(False, compiler) == "8.6 10.0+PTX"
    with_gpus((7, 0), (8, 0))
    assert cuda_archs.cuda_archs(False, compiler) == "8.0"
    with_gpus((7, 0))
    assert cuda_archs.cuda_archs(False, compiler) == "7.0", "so that nvcc says what is wrong"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "native")
    assert cuda_archs.cuda_archs(False, compiler) == "7.0"


def test_hidden_gpus_do_not_count(with_gpus: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A display's GPU of 7.5 beside four of 8.0."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    with_gpus((7, 5), (8, 0), (8, 0))
    assert cuda_archs.cuda_archs(portable=False) == "8.0"
    assert CudaToolchain().misfit({"cuda_archs": cuda_archs.gencode((), "8.0", "13.0")}) == ""


def test_a_binary_of_another_cuda_generation_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cuda_12 = dataclasses.replace(find_torch(), cuda_release=(12, 8))
    monkeypatch.setattr(toolchains, "find_torch", lambda: with_cuda_12)
    made = {"nvcc": {"version": "13.0"}, "cuda_archs": ["-arch=all-major"]}
    assert "needs the runtime of CUDA 13, and torch brings that of CUDA 12" in CudaToolchain().misfit(made)
    assert CudaToolchain().misfit({**made, "nvcc": {"version": "12.4"}}) == ""


def test_headers_of_the_system_are_not_named(nvcc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``-isystem /usr/include`` g++ does not find the headers of C."""
    monkeypatch.setattr(CudaToolchain, "_homes", lambda self: [Path("/usr")])
    monkeypatch.setattr(Path, "exists", lambda self: self.name == "cuda_runtime.h")
    assert CudaToolchain()._headers() == []


def test_headers_and_runtime_are_of_nvcc_s_own_generation(
    nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvcc on PATH may be a script that starts one of another toolkit than /usr/local/cuda."""
    for home, release in (("other", 12080), ("own", 13000)):
        (tmp_path / home / "include").mkdir(parents=True)
        (tmp_path / home / "lib64").mkdir()
        (tmp_path / home / "include" / "cuda_runtime.h").touch()
        (tmp_path / home / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {release}\n")
        (tmp_path / home / "lib64" / f"libcudart.so.{release // 1000}.0.1").touch()
    script(nvcc, f"echo 'release 13.0, V13.0'; echo '#$ TOP={tmp_path}/own' >&2\n")
    assert toolchains._toolkit(CudaToolchain().nvcc()) == (tmp_path / "own",)
    monkeypatch.setattr(CudaToolchain, "_homes", lambda self: [tmp_path / "other", tmp_path / "own"])
    assert CudaToolchain()._headers() == ["-isystem", str(tmp_path / "own" / "include")]
    assert CudaToolchain()._runtime() == ["--cudart=none", str(tmp_path / "own" / "lib64" / "libcudart.so.13.0.1")]


def test_nvcc_s_own_variable_names_its_host_compiler(
    nvcc: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "old").mkdir()
    script(tmp_path / "old" / "g++", "echo g++ 12.1\n")
    for value in (tmp_path / "old", tmp_path / "old" / "g++"):
        monkeypatch.setenv("NVCC_CCBIN", str(value))
        assert CudaToolchain()._host_compiler() == ["-ccbin", str(tmp_path / "old" / "g++")]
    monkeypatch.setenv("CXX", "c++")
    assert CudaToolchain()._host_compiler() != ["-ccbin", str(tmp_path / "old" / "g++")]


@pytest.mark.parametrize("variable", ["CUDA_HOME", "PYTORCH_NVCC"])
def test_a_variable_that_names_no_nvcc_is_what_the_error_says(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_NVCC", raising=False)
    monkeypatch.setenv(variable, str(tmp_path / "nothing"))
    with pytest.raises(ToolchainError, match=f"{variable} names .*nothing.*nothing else is looked at"):
        CudaToolchain().nvcc()


@pytest.mark.parametrize(
    ("arch_list", "runs", "does_not"),
    [
        ("8.0", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (12, 0)]),
        ("8.6", [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        ("7.0 9.0+PTX", [(7, 0), (7, 5), (9, 0), (10, 0), (12, 1)], [(8, 0), (8, 9)]),
        ("9.0a+PTX", [(9, 0)], [(10, 0)]),
        ("10.0f", [(10, 0), (10, 3)], [(9, 0), (12, 0)]),
        ("", [(7, 5), (8, 9), (12, 1)], []),
    ],
)
def test_which_gpus_run_what_was_made(
    arch_list: str, runs: list[tuple[int, int]], does_not: list[tuple[int, int]]
) -> None:
    archs = cuda_archs.gencode((), arch_list, "13.0")
    assert [gpu for gpu in runs + does_not if cuda_archs.runs_on(archs, gpu)] == runs


def test_a_binary_for_other_gpus_does_not_fit(with_gpus: Callable[..., None]) -> None:
    """As one that a node with other GPUs put into a cache that this one sees, too."""
    made = {"cuda_archs": cuda_archs.gencode((), "8.0", "13.0")}
    with_gpus((9, 0))
    assert "no code for a GPU of compute capability 9.0" in CudaToolchain().misfit(made)
    with_gpus((8, 6))
    assert CudaToolchain().misfit(made) == ""
    with_gpus()
    assert CudaToolchain().misfit(made) == "", "a machine without GPUs may build wheels"
    with_gpus((9, 0))
    assert CudaToolchain().misfit({"cuda_archs": []}) == "", "the builder chose for itself"


def test_a_portable_build_says_so(two_gpus: None) -> None:
    assert BUILDERS["FusedAdagradBuilder"]().build_spec(portable=True).portable
    assert not BUILDERS["FusedAdagradBuilder"]().build_spec().portable


@pytest.mark.compiler
def test_a_host_compiler_that_is_too_new(nvcc: Path, tmp_path: Path) -> None:
    script(
        nvcc,
        f"""\
        [ "$1" = --version ] && echo 'Cuda compilation tools, release {torch.version.cuda or "12.8"}, V12.8.93' && exit
        echo 'host_config.h:143: error: #error -- unsupported GNU version! later than 14 is not supported'
        exit 1
        """,
    )
    with pytest.raises(CompileError, match="unsupported GNU version") as caught:
        prebuild.build(BUILDERS["FusedAdagradBuilder"](), tmp_path / "prebuilt")
    assert "CXX=g++-13" in caught.value.hint


def test_every_family_has_its_three_files() -> None:
    classes = op_builder.builders("ds_plugin_cuda.op_builder", "cuda").values()
    native = [cls() for cls in classes if issubclass(cls, CUDAOpBuilder)]
    assert {builder.build_spec().name for builder in native} >= {"adam", "lamb", "transformer", "attention", "linear"}
    for builder in native:
        assert all(Path(source).is_file() for source in builder.sources()), builder


@needs_nvcc
@pytest.mark.compiler
@pytest.mark.slow
def test_the_wheel_carries_binaries(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One op for one architecture; `make cuda-compile` compiles all for all."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(ROOT / "plugins" / "cuda")]
    wanted = {"DS_BUILD_OPS": "0", "DS_BUILD_FUSED_ADAGRAD": "1", "TORCH_CUDA_ARCH_LIST": "9.0+PTX", "MAX_JOBS": "1"}
    wanted |= {"LDFLAGS": "-Wl,-O2 -Wl,--as-needed -pthread"}  # as conda and distributions have them
    subprocess.run(command, check=True, env=child_environment(**wanted))
    (wheel,) = tmp_path.glob("ds_plugin_cuda-*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        prebuilt = [name for name in archive.namelist() if "/prebuilt/" in name and name.endswith(".so")]
        assert prebuilt == ["ds_plugin_cuda/prebuilt/ds-plugin-cuda/adagrad/adagrad.so"]
        binary = archive.read(prebuilt[0])
    assert b"libcudart.so" in binary and b"libtorch_cuda.so" in binary, "whether or not this torch has CUDA"
    code = cuda_compile.device_code(binary)
    assert set(code) == {"sm_90", "PTX"} and code["sm_90"] > code["PTX"] > 0
    cuda_compile.main(tmp_path)
    assert "| family | s | KiB | sm_90 | PTX |" in capsys.readouterr().out


@needs_nvcc
@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_native_tests_compile_as_on_a_gpu_machine(tmp_path: Path) -> None:
    """Without the JIT's options for nvcc: what `make gpu-check` runs under compute-sanitizer. -O0 is faster."""
    assert NVCC is not None
    command = [
        *check.building_of_native_tests(NVCC, "sm_90", tmp_path / "test_cuda"),
        "-Xcicc",
        "-O0",
        "-Xptxas",
        "-O0",
    ]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "test_cuda").exists()


@needs_nvcc
@pytest.mark.compiler
@pytest.mark.parametrize("family", ["activation", "norm"])
def test_packs_are_read_and_written_at_once(tmp_path: Path, family: str) -> None:
    """In accesses of 16 bytes, whatever nvcc makes of their addresses: see docs/decisions/0048."""
    assert NVCC is not None
    options = ["-std=c++17", "-O3", "-arch=sm_90", f"-I{ROOT / 'kernels' / 'include'}", "-ptx", "-o", tmp_path / "ptx"]
    subprocess.run([NVCC, *options, ROOT / "kernels" / "cuda" / f"{family}.cu"], check=True)
    kernels = re.findall(r"\.entry (\w*BFloat16ELi8E\w*)\((.*?)\n}", (tmp_path / "ptx").read_text(), re.DOTALL)
    assert kernels
    for name, body in kernels:
        accesses = re.findall(r"\b(?:ld|st)\.global\.\S+", body)
        assert accesses and all(".v4." in access for access in accesses), (name, accesses)
