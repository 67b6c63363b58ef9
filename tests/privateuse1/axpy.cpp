// A kernel of the device in a library of its own, as a vendor writes them: x += a y, contiguous float32.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <launch.h>

using torch::stable::Tensor;

void axpy_(Tensor x, const Tensor& y, double a) {
  auto* sum = static_cast<float*>(x.data_ptr());
  const auto* added = static_cast<const float*>(y.data_ptr());
  const int64_t count = x.numel();
  runtime::launch(
      runtime::current_stream(x),
      [=] {
        float* to = runtime::in_kernel(sum);
        const float* from = runtime::in_kernel(added);
        for (int64_t i = 0; i < count; ++i) to[i] += static_cast<float>(a) * from[i];
      },
      "axpy_");
}

STABLE_TORCH_LIBRARY(privateuse1_test, m) { m.def("axpy_(Tensor(a!) x, Tensor y, float a) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(privateuse1_test, PrivateUse1, m) { m.impl("axpy_", TORCH_BOX(&axpy_)); }
