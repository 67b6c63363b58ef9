// ds_plugin::bias_activation, bias_activation_ and gated_activation for tensors on CUDA devices.
#include "activation_launch.h"

#include <ds_kernels/arguments.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

Activation activation_of(const char* op, int64_t index) {
  DS_KERNELS_CHECK(0 <= index && index < kActivations, op, "activation is ", index, "; expected 0 to ",
                   int64_t{kActivations - 1});
  return static_cast<Activation>(index);
}

// Writes to `output`, or in place if that is null.
void bias_activation_to(const char* op, const Tensor& input, const OptionalTensor& bias, int64_t activation,
                        Tensor* output) {
  const Device device(TensorRef(input.get()).device_index());
  Arguments arguments(op, "input", input);
  const int64_t rows = rows_of(op, "input", input);
  const Shape shape = input.sizes();
  const int64_t& columns = shape[shape.size() - 1];
  const Activation chosen = activation_of(op, activation);
  ActivationRows work{nullptr, arguments.read("bias", bias, vector_of(columns)), nullptr, rows, columns};
  if (output) {
    work.input = arguments.read("input", input, shape);
    *output = new_tensor(input, shape);
    work.output = output->data_ptr();
  } else {
    work.input = work.output = arguments.write("input", input, shape);
  }
  launch_bias_activation(work, arguments.dtype(), chosen, device.stream());
  arguments.write_back();
}

Tensor bias_activation(const Tensor& input, const OptionalTensor& bias, int64_t activation) {
  Tensor output;
  bias_activation_to("bias_activation", input, bias, activation, &output);
  return output;
}

void bias_activation_(const Tensor& input, const OptionalTensor& bias, int64_t activation) {
  bias_activation_to("bias_activation_", input, bias, activation, nullptr);
}

Tensor gated_activation(const Tensor& input, const OptionalTensor& bias, int64_t activation) {
  const char* op = "gated_activation";
  const Device device(TensorRef(input.get()).device_index());
  Arguments arguments(op, "input", input);
  const int64_t rows = rows_of(op, "input", input);
  const Shape shape = input.sizes();
  const int64_t& both = shape[shape.size() - 1];
  DS_KERNELS_CHECK(both % 2 == 0, op, "input has ", both, " columns; expected an even number for two halves");
  const Activation chosen = activation_of(op, activation);
  std::vector<int64_t> halved(shape.begin(), shape.end());
  halved.back() /= 2;
  Tensor output = new_tensor(input, {halved.data(), halved.size()});
  const ActivationRows work{arguments.read("input", input, shape), arguments.read("bias", bias, vector_of(both)),
                            output.data_ptr(), rows, halved.back()};
  launch_gated_activation(work, arguments.dtype(), chosen, device.stream());
  return output;
}

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) {
  m.impl("bias_activation", TORCH_BOX(&bias_activation));
  m.impl("bias_activation_", DS_KERNELS_BOX(&bias_activation_));
  m.impl("gated_activation", TORCH_BOX(&gated_activation));
}

}  // namespace ds_kernels::cuda
