// ds_plugin::bias_activation, bias_activation_ and gated_activation, on any device.
#pragma once

#include <ds_kernels/activation.h>
#include <ds_kernels/arguments.h>

namespace ds_kernels {

// An op's argument, an index into the activations.
inline Activation activation_of(const char* op, int64_t index) {
  DS_KERNELS_CHECK(0 <= index && index < kActivations, op, "activation is ", index, "; expected 0 to ",
                   int64_t{kActivations - 1});
  return static_cast<Activation>(index);
}

// Asks its Device, see binding.h, for ActivationRows.
template <class Device>
struct ActivationOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("bias_activation", TORCH_BOX(&bias_activation));
    m.impl("bias_activation_", DS_KERNELS_BOX(&bias_activation_));
    m.impl("gated_activation", TORCH_BOX(&gated_activation));
  }

  static Tensor bias_activation(const Tensor& input, const OptionalTensor& bias, int64_t activation) {
    Tensor output;
    run("bias_activation", input, bias, activation, &output);
    return output;
  }

  static void bias_activation_(const Tensor& input, const OptionalTensor& bias, int64_t activation) {
    run("bias_activation_", input, bias, activation, nullptr);
  }

  static Tensor gated_activation(const Tensor& input, const OptionalTensor& bias, int64_t activation) {
    const char* op = "gated_activation";
    Arguments arguments(op, "input", input);
    const Device device(arguments.device_index());
    const int64_t rows = rows_of(op, "input", input);
    const Shape shape = input.sizes();
    const int64_t& both = shape[shape.size() - 1];
    DS_KERNELS_CHECK(both % 2 == 0, op, "input has ", both, " columns; expected an even number for two halves");
    const Activation chosen = activation_of(op, activation);
    std::vector<int64_t> halved(shape.begin(), shape.end());
    halved.back() /= 2;
    Tensor output = new_tensor(input, {halved.data(), halved.size()});
    const ActivationRows work{arguments.read("input", input, shape), arguments.read("bias", bias, vector_of(both)),
                              output.data_ptr(), rows, halved.back(), chosen, true};
    device.run(op, work, arguments.dtype());
    return output;
  }

 private:
  // Writes to `output`, or in place if that is null.
  static void run(const char* op, const Tensor& input, const OptionalTensor& bias, int64_t activation, Tensor* output) {
    Arguments arguments(op, "input", input);
    const Device device(arguments.device_index());
    const Shape shape = input.sizes();
    ActivationRows work{};
    work.rows = rows_of(op, "input", input);
    work.columns = shape[shape.size() - 1];
    work.activation = activation_of(op, activation);
    if (output) {
      work.input = arguments.read("input", input, shape);
      *output = new_tensor(input, shape);
      work.output = output->data_ptr();
    } else {
      work.input = work.output = arguments.write("input", input, shape);
    }
    work.bias = arguments.read("bias", bias, vector_of(work.columns));
    device.run(op, work, arguments.dtype());
    arguments.write_back();
  }
};

}  // namespace ds_kernels
