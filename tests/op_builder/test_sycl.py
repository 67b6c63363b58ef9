"""SYCL: command lines beside those of DeepSpeed's builders, a kernel against SYCL's headers, and on a device."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from ds_plugin_sdk import jit
from ds_plugin_sdk.errors import ToolchainError
from ds_plugin_sdk.jit.machine import here

# Twice each element, on whatever device SYCL has.
SOURCE = """\
#include <sycl/sycl.hpp>

extern "C" int doubled(const float* x, float* result, std::size_t count) {
  sycl::queue queue;
  sycl::buffer<float, 1> from(x, sycl::range<1>(count)), to(result, sycl::range<1>(count));
  queue.submit([&](sycl::handler& handler) {
    sycl::accessor read(from, handler, sycl::read_only);
    sycl::accessor write(to, handler, sycl::write_only, sycl::no_init);
    handler.parallel_for(sycl::range<1>(count), [=](sycl::id<1> i) { write[i] = 2 * read[i]; });
  });
  return 42;
}
"""

# What the builders of DeepSpeed set that is no matter of the toolchain: debug information, MKL, the choice of Intel's
# GPUs, which is icpx's own, their registers, and how many links run side by side.
OWN = ("-g", "-gdwarf-4", "-DMKL_ILP64", "-fno-strict-aliasing", "-fsycl-targets=spir64", "-Xs ", "-fsycl-max-parallel")


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment into which pip has installed a SYCL runtime."""
    (tmp_path / "include" / "sycl").mkdir(parents=True)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libsycl.so").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    return tmp_path


@pytest.fixture
def spec(tmp_path: Path) -> jit.BuildSpec:
    """One kernel."""
    source = tmp_path / "doubled.cpp"
    source.write_text(SOURCE, encoding="utf-8")
    return jit.BuildSpec("doubled", "test", (jit.Source(source),), toolchain="sycl")


@pytest.mark.slow
def test_all_that_deepspeeds_builders_say_is_said(
    prefix: Path, spec: jit.BuildSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of torch's headers and libraries, of the standard and of SYCL's own; a builder says the rest."""
    deepspeeds = importlib.import_module("deepspeed.ops.op_builder.xpu.builder").SYCLOpBuilder
    compiler = tmp_path / "bin" / "icpx"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\necho 'Intel(R) oneAPI DPC++/C++ Compiler 2026.2.0'\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(compiler.parent), prepend=":")
    toolchain, machine = jit.get_toolchain("sycl"), here()
    compiling = toolchain.compile_command(spec.sources[0], spec, machine)
    linking = toolchain.link_command(spec, machine)
    builder = type("Builder", (deepspeeds,), {"sources": lambda self: [], "absolute_name": lambda self: "x"})("x")
    wanted = [each for each in builder.cxx_args() if not each.startswith((*OWN, "-std"))]
    assert wanted == ["-isystem", str(prefix / "include"), "-fsycl", "-O3", "-fPIC"]
    assert set(wanted) <= set(compiling)
    assert any(each.startswith("-std=c++") for each in compiling)
    linked = [each for each in builder.extra_ldflags() if not each.startswith((*OWN, "-Wl,-export-dynamic", "-fPIC"))]
    torch_lib = str(Path(importlib.import_module("torch").__file__).parent / "lib")
    for each in linked:
        assert each in linking or each.endswith(torch_lib), f"{each} is not in {linking}"
    assert f"-L{torch_lib}" in linking  # without its folder in the binary: the process has loaded torch


@pytest.mark.compiler
def test_a_kernel_runs(spec: jit.BuildSpec) -> None:
    """On the device that SYCL chooses; the CPU is one."""
    try:
        jit.get_toolchain("sycl").find()
    except ToolchainError as error:
        pytest.skip(f"{error.what}: {error.why}")
    import ctypes

    library = ctypes.CDLL(str(jit.acquire(spec).path))
    x, result = (ctypes.c_float * 3)(1, 2, 3), (ctypes.c_float * 3)()
    assert library.doubled(x, result, ctypes.c_size_t(3)) == 42 and list(result) == [2, 4, 6]


@pytest.mark.compiler
def test_the_kernel_is_sycl(tmp_path: Path) -> None:
    """By the headers of pip's intel-sycl-rt, which any compiler of the host takes."""
    headers = Path(sys.prefix, "include")
    if not (headers / "sycl").is_dir():
        pytest.skip("no SYCL headers: pip install intel-sycl-rt")
    source = tmp_path / "doubled.cpp"
    source.write_text(SOURCE, encoding="utf-8")
    command = ["c++", "-std=c++20", "-fsyntax-only", "-w", "-isystem", str(headers), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
