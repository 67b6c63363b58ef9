"""SYCL: our command lines beside those of DeepSpeed's builders, its headers, and a kernel where there is a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ds_plugin_sdk import SYCLOpBuilder, jit
from ds_plugin_sdk.errors import ToolchainError

SOURCE = """\
#include <ATen/Parallel.h>
#include <torch/extension.h>

#include <sycl/sycl.hpp>

// Twice each element, on whatever device SYCL has; host memory goes through a buffer.
torch::Tensor doubled(const torch::Tensor& x) {
  torch::Tensor result = torch::empty_like(x);
  sycl::queue queue;
  {
    sycl::buffer<float, 1> from(x.data_ptr<float>(), sycl::range<1>(x.numel()));
    sycl::buffer<float, 1> to(result.data_ptr<float>(), sycl::range<1>(x.numel()));
    queue.submit([&](sycl::handler& handler) {
      sycl::accessor read(from, handler, sycl::read_only);
      sycl::accessor write(to, handler, sycl::write_only, sycl::no_init);
      handler.parallel_for(sycl::range<1>(x.numel()), [=](sycl::id<1> i) { write[i] = 2 * read[i]; });
    });
  }
  return result;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("doubled", &doubled); }
"""


@pytest.fixture
def builder(tmp_path: Path) -> SYCLOpBuilder:
    """A builder of one kernel."""
    source = tmp_path / "doubled.cpp"
    source.write_text(SOURCE, encoding="utf-8")

    class DoubledBuilder(SYCLOpBuilder):
        BUILD_VAR, NAME = "DS_BUILD_DOUBLED", "doubled"

        def sources(self) -> list[str]:
            return [str(source)]

        def cxx_args(self) -> list[str]:
            return ["-fsycl-targets=spir64"]

    return DoubledBuilder()


@pytest.mark.compiler
def test_a_kernel_runs(builder: SYCLOpBuilder) -> None:
    try:
        jit.get_toolchain("sycl").find()
    except ToolchainError as error:
        pytest.skip(f"{error.what}: {error.why}")
    x = torch.arange(1000.0)
    assert torch.equal(builder.load().doubled(x), 2 * x)
