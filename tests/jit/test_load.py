"""Real modules in this process: a library on torch's stable ABI, a pybind11 module, a CUDA library."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ds_plugin_sdk.errors import ArtifactError
from ds_plugin_sdk.jit import Artifact, BuildSpec, CudaToolchain, Source, acquire, cache, explain, load, machine, obtain
from ds_plugin_sdk.jit.compile import dependencies
from ds_plugin_sdk.jit.machine import find_torch
from ds_plugin_sdk.jit.plan import file_digest

pytestmark = pytest.mark.compiler

LIBRARY = """\
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
double total(torch::stable::Tensor t) {
  const float* data = static_cast<const float*>(t.data_ptr());
  double sum = 0;
  for (int64_t i = 0; i < t.numel(); ++i) sum += data[i];
  return sum;
}
STABLE_TORCH_LIBRARY(NAMESPACE, m) { m.def("total(Tensor t) -> float"); }
STABLE_TORCH_LIBRARY_IMPL(NAMESPACE, CPU, m) { m.impl("total", TORCH_BOX(&total)); }
"""

MODULE = """\
#include <pybind11/pybind11.h>
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("add", [](int a, int b) { return a + b; }); }
"""

# A kernel with half arithmetic, which needs the operators, registered as a torch library of the stable ABI.
CUDA = """\
#include <cuda_fp16.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
__global__ void scale(__half* x, __half factor, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (i < n) x[i] = x[i] * factor;
}
void scale_(torch::stable::Tensor t, double factor) {
  const int64_t n = t.numel();
  scale<<<(n + 255) / 256, 256>>>(static_cast<__half*>(t.data_ptr()), __float2half(float(factor)), n);
}
STABLE_TORCH_LIBRARY(jit_test_cuda, m) { m.def("scale_(Tensor(a!) t, float factor) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(jit_test_cuda, CUDA, m) { m.impl("scale_", TORCH_BOX(&scale_)); }
"""


def write(folder: Path, name: str, text: str) -> Source:
    (folder / name).write_text(text)
    return Source(folder / name)


def test_a_torch_library(tmp_path: Path) -> None:
    source = write(tmp_path, "total.cpp", LIBRARY)
    spec = BuildSpec(
        name="total", owner="ds-plugin-test", sources=(source,), cxx_args=("-DNAMESPACE=jit_test", "-march=native")
    )
    artifact, library = obtain(spec)
    assert (artifact.origin, type(library)) == ("compiled", ctypes.CDLL)
    assert torch.ops.jit_test.total(torch.ones(10)) == 10.0
    # Every header is on the list, torch's and the system's too.
    headers = [path for path, _, _, _ in artifact.key["headers"]]
    assert "$torch/include/torch/csrc/stable/library.h" in headers
    assert any(path.endswith("/stdio.h") for path in headers)
    assert load(acquire(spec), spec) is library


def test_no_binary_carries_the_path_of_this_environment(tmp_path: Path) -> None:
    source = write(tmp_path, "total.cpp", LIBRARY)
    spec = BuildSpec(name="total", owner="ds-plugin-test", sources=(source,), cxx_args=("-DNAMESPACE=jit_test_path",))
    tags = subprocess.run(["readelf", "-d", acquire(spec).path], capture_output=True, text=True, check=True).stdout
    assert "libtorch_cpu.so" in tags
    assert "RPATH" not in tags and "RUNPATH" not in tags
    assert "gomp" not in tags  # torch's thread pool, never a second OpenMP


def test_a_python_module(tmp_path: Path) -> None:
    source = write(tmp_path, "adder.cpp", MODULE)
    spec = BuildSpec(name="adder", owner="ds-plugin-test", sources=(source,), kind="python_module")
    artifact, module = obtain(spec)
    assert module is not None
    assert module.add(2, 3) == 5
    assert artifact.key["key"]["abi"]["torch"] == torch.__version__
    again = acquire(spec)
    assert again.origin == "cache"
    assert load(again, spec) is module


def test_what_is_no_library_is_not_loaded(tmp_path: Path) -> None:
    (tmp_path / "junk.so").write_bytes(b"\x7fELF and no more")
    spec = BuildSpec(name="junk", owner="ds-plugin-test", sources=(Source(tmp_path / "junk.cpp"),))
    sha256 = file_digest(tmp_path / "junk.so")
    artifact = Artifact(
        tmp_path / "junk.so", "cache", 0.0, "", {"created": 0.0, "binary": {"bytes": 16, "sha256": sha256}}
    )
    with pytest.raises(ArtifactError, match=r"junk\.so") as caught:
        load(artifact, spec)
    assert (caught.value.op, caught.value.plugin) == ("junk", "ds-plugin-test")


PLAIN = 'extern "C" __attribute__((visibility("default"))) int answer() { return ANSWER; }\n'


def plain_spec(folder: Path, number: int) -> BuildSpec:
    source = write(folder, f"plain{number}.cpp", PLAIN)
    return BuildSpec(name=f"plain{number}", owner="ds-plugin-test", sources=(source,), cxx_args=(f"-DANSWER={number}",))


def mapped(folder: Path) -> set[str]:
    """The libraries below `folder` that are in this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if str(folder) in line}


def test_a_binary_replaced_after_its_digest_was_compared_is_not_loaded(tmp_path: Path) -> None:
    good, evil = acquire(plain_spec(tmp_path, 1)), acquire(plain_spec(tmp_path, 2))
    good = acquire(plain_spec(tmp_path, 1))  # found, and compared
    good.path.unlink()
    shutil.copy(evil.path, good.path)
    with pytest.raises(ArtifactError, match=r"does not match its SHA-256|bytes instead of"):
        load(good, plain_spec(tmp_path, 1))
    assert str(good.path) not in mapped(cache.root())
    assert obtain(plain_spec(tmp_path, 1))[0].origin == "compiled"


def test_a_binary_replaced_just_before_it_is_loaded_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = plain_spec(tmp_path, 3)
    acquire(spec)
    artifact, evil = acquire(spec), acquire(plain_spec(tmp_path, 4))
    own = artifact.path.stat().st_ino
    loader = ctypes.CDLL

    def swap(name: str) -> ctypes.CDLL:
        artifact.path.rename(artifact.path.with_suffix(".kept"))
        shutil.copy(evil.path, artifact.path)
        return loader(name)

    monkeypatch.setattr(ctypes, "CDLL", swap)
    load(artifact, spec)
    inodes = {Path(path).stat().st_ino for path in mapped(cache.root())}
    assert own in inodes
    assert artifact.path.stat().st_ino not in inodes


def test_libraries_do_not_take_each_others_place(tmp_path: Path) -> None:
    """Though the descriptors by which they were loaded are closed, as daemons do."""
    before = mapped(cache.root())
    for number in range(5, 9):
        obtain(plain_spec(tmp_path, number))
        for descriptor in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                if descriptor.readlink().suffix == ".so":
                    os.close(int(descriptor.name))
    assert len(mapped(cache.root()) - before) == 4


def test_nothing_but_load_imports_torch(tmp_path: Path) -> None:
    """And what is found without importing it is what it says itself."""
    source = write(tmp_path, "plain.cpp", "int f() { return 1; }\n")
    program = f"""
import sys
from pathlib import Path
from ds_plugin_sdk.jit import BuildSpec, Source, acquire, build_into, cache, explain
spec = BuildSpec(name="plain", owner="ds-plugin-test", sources=(Source(Path({str(source.path)!r})),))
explain(spec); acquire(spec); acquire(spec); build_into(spec, Path({str(tmp_path / "wheel")!r}))
cache.why("plain"); cache.verify(); cache.prune(everything=True)
assert "torch" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True, env=_environment())
    found = find_torch()
    assert found.version == torch.__version__
    assert found.root == Path(torch.__file__).parent
    assert found.cxx11_abi == torch._C._GLIBCXX_USE_CXX11_ABI
    assert machine.here().torch == found


def _environment() -> dict[str, str]:
    from ds_plugin_sdk.settings import child_environment

    return child_environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0")


def test_lists_of_headers() -> None:
    text = "adam.o: /src/adam.cpp \\\n /a\\ b/c.h /cost$$s.h \\\n  /no\\#1.h\n"
    assert dependencies(text) == ["/src/adam.cpp", "/a b/c.h", "/cost$s.h", "/no#1.h"]
    assert dependencies("x.o : a.h b.h\n") == ["a.h", "b.h"]
    assert dependencies("x.o: a.cpp a.h\n\na.h:\n") == ["a.cpp", "a.h"]
    assert dependencies("x.o: ta\\\tb/h.h bs\\\\\\ sp/h.h en\\/h.h") == ["ta\tb/h.h", "bs\\ sp/h.h", "en\\/h.h"]


def cuda_spec(folder: Path) -> BuildSpec:
    device = write(folder, "scale.cu", CUDA)
    host = write(
        folder, "host.cpp", "#include <cuda_runtime.h>\nint devices() { int n; cudaGetDeviceCount(&n); return n; }\n"
    )
    return BuildSpec(name="scale", owner="ds-plugin-test", sources=(device, host), toolchain="cuda")


def test_a_cuda_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled and loaded where nvcc is; its command line everywhere (test_toolchains)."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc; its command lines are tested without it")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0+PTX")
    spec = cuda_spec(tmp_path)
    artifact = acquire(spec)
    load(artifact, spec)
    assert str(torch.ops.jit_test_cuda.scale_.default._schema).startswith("jit_test_cuda::scale_(Tensor(a!) t")
    key = artifact.key["key"]
    assert key["toolchain"]["nvcc"]["version"] == CudaToolchain().nvcc().version
    assert any(path.endswith("cuda_fp16.h") for path, _, _, _ in artifact.key["headers"])
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    assert "-gencode=arch=compute_80,code=sm_80" in " ".join(explain(spec))


def test_where_no_file_number_is_left_the_path_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["ds_plugin_sdk.jit.load"]
    monkeypatch.setattr(module, "_last_file", 1 << 30)
    with (tmp_path / "file").open("wb") as file:
        assert module._name_of(file.fileno(), "the path") == "the path"
