// ds_plugin's quantizer ops, on any device.
#pragma once

#include <tuple>

#include <ds_kernels/arguments.h>
#include <ds_kernels/quantizer.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for the structs ...Groups of quantizer.h.
template <class Device>
struct QuantizerOps {
  using ScalarType = torch::headeronly::ScalarType;
  using Quantized = std::tuple<Tensor, Tensor>;  // levels and params

  template <class Library>
  static void implement(Library& m) {
    m.impl("quantize", TORCH_BOX(&quantize));
    m.impl("swizzle_quantize", TORCH_BOX(&swizzle_quantize));
    m.impl("dequantize", TORCH_BOX(&dequantize));
    m.impl("quantized_reduce", TORCH_BOX(&quantized_reduce));
    m.impl("dequantize_range", TORCH_BOX(&dequantize_range));
    m.impl("fake_quantize_", DS_KERNELS_BOX(&fake_quantize_));
  }

  static Quantized quantize(const Tensor& x, int64_t groups, int64_t bits, bool symmetric) {
    const char* op = "quantize";
    check_values(op, x, groups, bits);
    return run(op, x, shape_with_last(x, last_of(x) * bits / 8), groups, levels_of(bits, symmetric), {});
  }

  static Quantized swizzle_quantize(const Tensor& x, int64_t groups, int64_t bits, bool symmetric, int64_t pipeline,
                                    int64_t nodes, int64_t devices_per_node) {
    const char* op = "swizzle_quantize";
    check_values(op, x, groups, bits);
    int64_t parts = 0;
    if (__builtin_mul_overflow(pipeline, nodes, &parts) || __builtin_mul_overflow(parts, devices_per_node, &parts)) {
      parts = INT64_MAX;  // of which no number of groups is a multiple
    }
    DS_KERNELS_CHECK(pipeline > 0 && nodes > 0 && devices_per_node > 0 && groups % parts == 0, op, "groups is ", groups,
                     "; expected a multiple of pipeline * nodes * devices_per_node, which is ", parts);
    const Swizzle swizzle{pipeline, nodes, devices_per_node, groups / parts};
    return run(op, x, {x.numel() * bits / 8}, groups, levels_of(bits, symmetric), swizzle);
  }

  static Tensor dequantize(const Tensor& levels, const Tensor& params, int64_t bits, bool symmetric, ScalarType dtype) {
    const char* op = "dequantize";
    DS_KERNELS_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, op,
                     "dtype is none that this kernel gives; expected float32, bfloat16 or float16");
    const int64_t groups = check_levels(op, levels, params, bits, symmetric);
    const Device device(device_index(levels));
    const Tensor from = without_gaps(levels), numbers = without_gaps(params);
    Tensor x = torch::stable::new_empty(levels, shape_with_last(levels, last_of(levels) * 8 / bits), dtype);
    DequantizeGroups work{};
    work.levels = from.const_data_ptr();
    work.params = numbers.const_data_ptr<float>();
    work.x = x.mutable_data_ptr();
    work.groups = groups;
    work.size = x.numel() / groups;
    work.as = levels_of(bits, symmetric);
    device.run(op, work, dtype_of(op, "x", TensorRef(x.get())));
    return x;
  }

  static Quantized quantized_reduce(const Tensor& levels, const Tensor& params, int64_t out_groups, int64_t devices,
                                    int64_t bits, bool symmetric) {
    const char* op = "quantized_reduce";
    const int64_t groups = check_levels(op, levels, params, bits, symmetric), last = last_of(levels);
    DS_KERNELS_CHECK(devices > 0, op, "devices is ", devices, "; expected a positive number");
    DS_KERNELS_CHECK(groups % devices == 0 && last % devices == 0, op, "params has ", groups,
                     " groups, the last dimension of levels ", last,
                     " elements; expected multiples of devices, which is ", devices);
    const int64_t bytes = levels.numel() / devices;  // of each device
    const int64_t out_bytes = check_groups(op, "the sum", bytes, "out_groups", out_groups);
    const Device device(device_index(levels));
    const Tensor from = without_gaps(levels), numbers = without_gaps(params);
    ReduceGroups work{};
    work.received = from.const_data_ptr();
    work.received_params = numbers.const_data_ptr<float>();
    work.devices = devices;
    work.received_size = std::max<int64_t>(bytes * 8 / bits / (groups / devices), 1);  // it is divided by
    work.groups = out_groups;
    work.size = out_bytes * 8 / bits;
    work.as = levels_of(bits, symmetric);
    Tensor out = torch::stable::new_empty(levels, shape_with_last(levels, last / devices), ScalarType::Char);
    Tensor out_params = new_params(levels, out_groups, work.as);
    work.levels = out.mutable_data_ptr();
    work.params = out_params.mutable_data_ptr<float>();
    device.run(op, work, kAnyDtype);
    return {out, out_params};
  }

  static Tensor dequantize_range(const Tensor& levels, const Tensor& scale, const Tensor& minimum, int64_t group_size,
                                 int64_t bits) {
    const char* op = "dequantize_range";
    check_bits(op, bits);
    check_dtype(op, "levels", levels, ScalarType::Byte, "uint8");
    const Dtype dtype = dtype_of(op, "scale", TensorRef(scale.get()));
    check_dtype(op, "minimum", minimum, scale.scalar_type(), name_of(dtype));
    DS_KERNELS_CHECK(scale.device() == levels.device() && minimum.device() == levels.device(), op,
                     "scale or minimum is on another device; expected that of levels");
    const int64_t groups = scale.numel(), values = levels.numel() * 8 / bits;
    DS_KERNELS_CHECK(minimum.numel() == groups, op, "minimum has ", minimum.numel(), " elements; expected ", groups,
                     ", as many as scale");
    DS_KERNELS_CHECK(group_size > 0 && group_size * bits % 8 == 0 && values == groups * group_size, op, "levels has ",
                     values, " values; expected ", groups, " groups of ", group_size);
    const Device device(device_index(levels));
    const Tensor from = without_gaps(levels), scales = without_gaps(scale), minima = without_gaps(minimum);
    const int64_t shape[] = {groups, group_size};
    Tensor x = new_tensor(scale, {shape, 2});
    DequantizeRangeGroups work{};
    work.levels = from.const_data_ptr();
    work.scale = scales.const_data_ptr();
    work.minimum = minima.const_data_ptr();
    work.x = x.mutable_data_ptr();
    work.groups = groups;
    work.size = group_size;
    work.bits = static_cast<int>(bits);
    device.run(op, work, dtype);
    return x;
  }

  static void fake_quantize_(const Tensor& x, const OptionalTensor& noise, int64_t groups, int64_t bits,
                             bool symmetric) {
    const char* op = "fake_quantize_";
    Arguments arguments(op, "x", x);
    DS_KERNELS_CHECK(2 <= bits && bits <= 16, op, "bits is ", bits, "; expected 2 to 16");
    const int64_t size = check_groups(op, "x", x.numel(), "groups", groups);
    if (noise) check_noise(op, x, *noise);
    if (size == 0) return;  // however many groups
    const Device device(arguments.device_index());
    FakeQuantizeGroups work{};
    work.x = arguments.write("x", x, x.sizes());
    const OptionalTensor drawn = noise ? OptionalTensor(arguments.apart(without_gaps(*noise))) : std::nullopt;
    work.noise = drawn ? drawn->const_data_ptr<float>() : nullptr;
    work.groups = groups;
    work.size = size;
    work.bits = static_cast<int>(bits);
    work.symmetric = symmetric;
    device.run(op, work, arguments.dtype());
    arguments.write_back();
  }

 private:
  // Quantizes the groups of `x` to levels of this shape.
  static Quantized run(const char* op, const Tensor& x, const std::vector<int64_t>& shape, int64_t groups, Levels as,
                       const Swizzle& swizzle) {
    const Device device(device_index(x));
    const Tensor from = without_gaps(x);
    Tensor levels = torch::stable::new_empty(x, shape, ScalarType::Char), params = new_params(x, groups, as);
    QuantizeGroups work{};
    work.x = from.const_data_ptr();
    work.levels = levels.mutable_data_ptr();
    work.params = params.mutable_data_ptr<float>();
    work.groups = groups;
    work.size = x.numel() / groups;
    work.as = as;
    work.swizzle = swizzle;
    device.run(op, work, dtype_of(op, "x", TensorRef(x.get())));
    return {levels, params};
  }

  // ---- checks ------------------------------------------------------------------------------------------------------

  static void check_dtype(const char* op, const char* argument, const Tensor& tensor, ScalarType expected,
                          const char* name) {
    DS_KERNELS_CHECK(tensor.scalar_type() == expected, op, argument, " has another dtype; expected ", name);
  }

  static void check_bits(const char* op, int64_t bits) {
    DS_KERNELS_CHECK(bits == 8 || bits == 4, op, "bits is ", bits, "; expected 8 or 4");
  }

  // Gives the number of elements in a group.
  static int64_t check_groups(const char* op, const char* argument, int64_t numel, const char* name, int64_t groups) {
    DS_KERNELS_CHECK(groups > 0, op, name, " is ", groups, "; expected a positive number");
    DS_KERNELS_CHECK(numel % groups == 0, op, argument, " has ", numel, " elements; expected a multiple of ", name,
                     ", which is ", groups);
    return numel / groups;
  }

  static void check_values(const char* op, const Tensor& x, int64_t groups, int64_t bits) {
    dtype_of(op, "x", TensorRef(x.get()));
    check_bits(op, bits);
    DS_KERNELS_CHECK(x.dim() > 0, op, "x has no dimension; expected at least one");
    const int64_t size = check_groups(op, "x", x.numel(), "groups", groups), last = last_of(x);
    DS_KERNELS_CHECK(bits == 8 || (size % 2 == 0 && last % 2 == 0), op, "groups of ", size,
                     " elements, a last dimension of ", last, "; expected even numbers with 4 bits");
  }

  // Gives the number of groups.
  static int64_t check_levels(const char* op, const Tensor& levels, const Tensor& params, int64_t bits,
                              bool symmetric) {
    check_bits(op, bits);
    check_dtype(op, "levels", levels, ScalarType::Char, "int8");
    check_dtype(op, "params", params, ScalarType::Float, "float32");
    DS_KERNELS_CHECK(params.device() == levels.device(), op, "params is on another device; expected that of levels");
    DS_KERNELS_CHECK(levels.dim() > 0, op, "levels has no dimension; expected at least one");
    const int64_t columns = symmetric ? 1 : 2;
    DS_KERNELS_CHECK(params.dim() == 2 && params.size(0) > 0 && params.size(1) == columns, op, "params has shape ",
                     text_of(params.sizes()), "; expected [groups, ", columns, "]");
    check_groups(op, "levels", levels.numel(), "groups", params.size(0));
    return params.size(0);
  }

  static void check_noise(const char* op, const Tensor& x, const Tensor& noise) {
    check_dtype(op, "noise", noise, ScalarType::Float, "float32");
    DS_KERNELS_CHECK(noise.device() == x.device(), op, "noise is on another device; expected that of x");
    DS_KERNELS_CHECK(noise.sizes() == x.sizes(), op, "noise has shape ", text_of(noise.sizes()), "; expected ",
                     text_of(x.sizes()), ", that of x");
  }

  // ---- tensors -----------------------------------------------------------------------------------------------------

  static int32_t device_index(const Tensor& tensor) { return TensorRef(tensor.get()).device_index(); }
  static int64_t last_of(const Tensor& tensor) { return tensor.size(tensor.dim() - 1); }
  static Levels levels_of(int64_t bits, bool symmetric) { return {static_cast<int>(bits), symmetric}; }

  static std::vector<int64_t> shape_with_last(const Tensor& tensor, int64_t last) {
    const Shape sizes = tensor.sizes();
    std::vector<int64_t> shape(sizes.begin(), sizes.end());
    shape.back() = last;
    return shape;
  }

  static Tensor new_params(const Tensor& like, int64_t groups, Levels as) {
    return torch::stable::new_empty(like, {groups, as.symmetric ? 1 : 2}, ScalarType::Float);
  }
};

}  // namespace ds_kernels
