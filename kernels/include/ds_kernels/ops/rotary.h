// ds_plugin::rotary and rotary_, on any device.
#pragma once

#include <ds_kernels/arguments.h>
#include <ds_kernels/rotary.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for Rotation.
template <class Device>
struct RotaryOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("rotary", TORCH_BOX(&rotary));
    m.impl("rotary_", DS_KERNELS_BOX(&rotary_));
  }

  static Tensor rotary(const Tensor& input, const Tensor& cos, const Tensor& sin, bool interleaved) {
    const char* op = "rotary";
    const Arguments arguments(op, "input", input);
    const Device device(arguments.device_index());
    const Angles angles(arguments, input, cos, sin);
    const NoGrad guard;
    const Tensor from = input.stride(3) == 1 ? input : torch::stable::contiguous(input);
    Tensor output = input.is_contiguous() ? new_tensor(input, input.sizes()) : torch::stable::empty_like(input);
    const Tensor to = output.stride(3) == 1 ? output : new_tensor(input, input.sizes());
    device.run(op, angles.turn(from, to, interleaved), arguments.dtype());
    if (output.stride(3) != 1) torch::stable::copy_(output, to);
    return output;
  }

  static void rotary_(const Tensor& input, const Tensor& cos, const Tensor& sin, bool interleaved) {
    const char* op = "rotary_";
    Arguments arguments(op, "input", input);
    const Device device(arguments.device_index());
    arguments.check_elements("input", input);
    arguments.write_in_place(input);
    const Angles angles(arguments, input, cos, sin);
    const NoGrad guard;
    const Tensor heads = input.stride(3) == 1 ? input : torch::stable::contiguous(input);
    device.run(op, angles.turn(heads, heads, interleaved), arguments.dtype());
    if (input.stride(3) != 1) {
      Tensor original = input;
      torch::stable::copy_(original, heads);
    }
  }

 private:
  // Cosines and sines, [batch or 1, tokens, rotary_dim / 2] in float32, checked against the input.
  class Angles {
   public:
    Angles(const Arguments& arguments, const Tensor& input, const Tensor& cos, const Tensor& sin) {
      const char* op = arguments.op();
      DS_KERNELS_CHECK(input.dim() == 4, op, "input has shape ", text_of(input.sizes()),
                       "; expected [batch, heads, tokens, head_dim]");
      DS_KERNELS_CHECK(cos.sizes() == sin.sizes(), op, "sin has shape ", text_of(sin.sizes()), "; expected ",
                       text_of(cos.sizes()), ", that of cos");
      cos_ = table(arguments, "cos", cos, input);
      sin_ = table(arguments, "sin", sin, input);
    }

    Rotation turn(const Tensor& from, const Tensor& to, bool interleaved) const {
      Rotation rotation{};
      rotation.input = heads_of(from);
      rotation.output = heads_of(to);
      rotation.cos = static_cast<const float*>(cos_.data_ptr());
      rotation.sin = static_cast<const float*>(sin_.data_ptr());
      rotation.cos_batch = rotation.sin_batch = cos_.size(0) == 1 ? 0 : cos_.size(1) * cos_.size(2);
      rotation.batch = from.size(0);
      rotation.tokens = from.size(2);
      rotation.heads = static_cast<int>(from.size(1));
      rotation.head_dim = static_cast<int>(from.size(3));
      rotation.rotary_dim = static_cast<int>(2 * cos_.size(2));
      rotation.interleaved = interleaved;
      return rotation;
    }

   private:
    static Tensor table(const Arguments& arguments, const char* name, const Tensor& tensor, const Tensor& input) {
      const char* op = arguments.op();
      arguments.check_device(name, tensor);
      DS_KERNELS_CHECK(TensorRef(tensor.get()).dtype_code() == aoti_torch_dtype_float32(), op, name,
                       " has another dtype; expected float32");
      DS_KERNELS_CHECK(tensor.dim() == 3 && (tensor.size(0) == 1 || tensor.size(0) == input.size(0)) &&
                           tensor.size(1) == input.size(2) && 2 * tensor.size(2) <= input.size(3),
                       op, name, " has shape ", text_of(tensor.sizes()), " for input ", text_of(input.sizes()),
                       "; expected [batch or 1, tokens, rotary_dim / 2]");
      return arguments.apart(without_gaps(tensor));
    }

    static Heads heads_of(const Tensor& tensor) {
      return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
    }

    Tensor cos_, sin_;
  };
};

}  // namespace ds_kernels
