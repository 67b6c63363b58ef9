// ds_plugin's ops of grouped quantization to small floating-point numbers, on any device.
#pragma once

#include <ds_kernels/arguments.h>
#include <ds_kernels/fp_quantizer.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for the structs ...Groups of fp_quantizer.h.
template <class Device>
struct FpQuantizerOps {
  using ScalarType = torch::headeronly::ScalarType;

  template <class Library>
  static void implement(Library& m) {
    m.impl("fp_quantize", TORCH_BOX(&fp_quantize));
    m.impl("fp_dequantize", TORCH_BOX(&fp_dequantize));
  }

  static Tensor fp_quantize(const Tensor& x, const OptionalTensor& noise, int64_t group_size, int64_t bits,
                            int64_t mantissa_bits) {
    const char* op = "fp_quantize";
    Arguments arguments(op, "x", x);
    DS_KERNELS_CHECK(x.dim() > 0, op, "x has no dimensions; expected [..., columns]");
    FpQuantizeGroups work{};
    work.format = checked(op, group_size, bits, mantissa_bits);
    DS_KERNELS_CHECK(x.numel() % group_size == 0, op, "x has ", x.numel(),
                     " elements; expected a multiple of group_size, which is ", group_size);
    if (noise) check_noise(arguments, *noise, x);
    const Device device(arguments.device_index());
    const OptionalTensor drawn = noise ? OptionalTensor(without_gaps(*noise)) : std::nullopt;
    work.x = arguments.read("x", x, x.sizes());
    work.noise = drawn ? drawn->const_data_ptr<float>() : nullptr;
    work.groups = x.numel() / group_size;
    work.size = group_size;
    Tensor stored = torch::stable::new_empty(x, {work.groups, fp_row_bytes(group_size, work.format)}, ScalarType::Byte);
    work.stored = stored.mutable_data_ptr();
    device.run(op, work, arguments.dtype());
    return stored;
  }

  static Tensor fp_dequantize(const Tensor& stored, int64_t group_size, int64_t bits, int64_t mantissa_bits,
                              ScalarType dtype) {
    const char* op = "fp_dequantize";
    DS_KERNELS_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, op,
                     "dtype is none that this kernel gives; expected float32, bfloat16 or float16");
    DS_KERNELS_CHECK(stored.scalar_type() == ScalarType::Byte, op, "stored has another dtype; expected uint8");
    FpDequantizeGroups work{};
    work.format = checked(op, group_size, bits, mantissa_bits);
    const int64_t row = fp_row_bytes(group_size, work.format);
    DS_KERNELS_CHECK(stored.dim() == 2 && stored.size(1) == row, op, "stored has shape ", text_of(stored.sizes()),
                     "; expected [groups, ", row, "]");
    const Device device(TensorRef(stored.get()).device_index());
    const Tensor from = without_gaps(stored);
    Tensor x = torch::stable::new_empty(stored, {stored.size(0), group_size}, dtype);
    work.stored = from.const_data_ptr();
    work.x = x.mutable_data_ptr();
    work.groups = stored.size(0);
    work.size = group_size;
    device.run(op, work, dtype_of(op, "x", TensorRef(x.get())));
    return x;
  }

 private:
  static constexpr int64_t kMostGroup = int64_t{1} << 30;

  static FpFormat checked(const char* op, int64_t group_size, int64_t bits, int64_t mantissa_bits) {
    const bool known = bits == 8 ? mantissa_bits == 3 || mantissa_bits == 2
                                 : (bits == 12 && mantissa_bits == 7) || (bits == 6 && mantissa_bits == 2) ||
                                       (bits == 4 && mantissa_bits == 1);
    DS_KERNELS_CHECK(known, op, "bits is ", bits, " with a mantissa of ", mantissa_bits,
                     "; expected 8 with 3, 8 with 2, 12 with 7, 6 with 2, 4 with 1");
    DS_KERNELS_CHECK(group_size > 0 && group_size % kNumbers == 0 && group_size <= kMostGroup, op, "group_size is ",
                     group_size, "; expected a multiple of ", static_cast<int64_t>(kNumbers), ", at most ", kMostGroup);
    return {static_cast<int>(bits - 1 - mantissa_bits), static_cast<int>(mantissa_bits)};
  }

  static void check_noise(const Arguments& arguments, const Tensor& noise, const Tensor& x) {
    const char* op = arguments.op();
    DS_KERNELS_CHECK(noise.scalar_type() == ScalarType::Float, op, "noise has another dtype; expected float32");
    arguments.check_device("noise", noise);
    DS_KERNELS_CHECK(noise.sizes() == x.sizes(), op, "noise has shape ", text_of(noise.sizes()), "; expected ",
                     text_of(x.sizes()), ", that of x");
  }
};

}  // namespace ds_kernels
