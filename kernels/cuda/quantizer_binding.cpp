// ds_plugin's quantizer ops for tensors on CUDA devices.
#include "quantizer_launch.h"

#include <optional>
#include <tuple>

#include <ds_kernels/arguments.h>

#include "device.h"

namespace ds_kernels::cuda {

namespace {

using torch::headeronly::ScalarType;
using Quantized = std::tuple<Tensor, Tensor>;

// ---- checks ----------------------------------------------------------------------------------------------------------

Dtype values_dtype(const char* op, const char* argument, const Tensor& x) {
  return dtype_of(op, argument, TensorRef(x.get()));
}

void check_dtype(const char* op, const char* argument, const Tensor& x, ScalarType expected, const char* name) {
  DS_KERNELS_CHECK(x.scalar_type() == expected, op, argument, " has another dtype; expected ", name);
}

void check_bits(const char* op, int64_t bits) {
  DS_KERNELS_CHECK(bits == 8 || bits == 4, op, "bits is ", bits, "; expected 8 or 4");
}

// The number of elements in a group.
int64_t check_groups(const char* op, const char* argument, int64_t numel, const char* name, int64_t groups) {
  DS_KERNELS_CHECK(groups > 0, op, name, " is ", groups, "; expected a positive number");
  DS_KERNELS_CHECK(numel % groups == 0, op, argument, " has ", numel, " elements; expected a multiple of ", name,
                   ", which is ", groups);
  return numel / groups;
}

int64_t check_quantize(const char* op, const Tensor& x, int64_t groups, int64_t bits) {
  check_bits(op, bits);
  DS_KERNELS_CHECK(x.dim() > 0, op, "x has no dimension; expected at least one");
  const int64_t size = check_groups(op, "x", x.numel(), "groups", groups), last = x.size(x.dim() - 1);
  DS_KERNELS_CHECK(bits == 8 || (size % 2 == 0 && last % 2 == 0), op, "groups of ", size,
                   " elements, a last dimension of ", last, "; expected even numbers with 4 bits");
  return size;
}

// The number of groups.
int64_t check_params(const char* op, const Tensor& levels, const Tensor& params, int64_t bits, bool symmetric) {
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

// ---- tensors ---------------------------------------------------------------------------------------------------------

// A tensor of the shape of `x`, whose last dimension becomes `last`.
Tensor new_like(const Tensor& x, int64_t last, ScalarType dtype) {
  const auto sizes = x.sizes();
  std::vector<int64_t> shape(sizes.begin(), sizes.end());
  shape.back() = last;
  return torch::stable::new_empty(x, shape, dtype);
}

Tensor new_params(const Tensor& x, int64_t groups, bool symmetric) {
  return torch::stable::new_empty(x, {groups, symmetric ? 1 : 2}, ScalarType::Float);
}

ScalarType scalar_type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::BFloat16: return ScalarType::BFloat16;
    case Dtype::Float16: return ScalarType::Half;
    default: return ScalarType::Float;
  }
}

// ---- ops -------------------------------------------------------------------------------------------------------------

Levels levels_of(int64_t bits, bool symmetric) { return {static_cast<int>(bits), symmetric}; }

int32_t device_index(const Tensor& x) { return TensorRef(x.get()).device_index(); }

// Quantizes the groups of `x`.
void quantize_into(const char* op, const Tensor& x, Tensor& levels, Tensor& params, int64_t groups, Levels as,
                   const Swizzle& swizzle, Stream stream) {
  const Tensor values = torch::stable::contiguous(x);
  launch_quantize(op,
                  {values.data_ptr(), levels.data_ptr(), static_cast<float*>(params.data_ptr()), groups,
                   x.numel() / groups, as, swizzle},
                  values_dtype(op, "x", x), stream);
}

Quantized quantize(const Tensor& x, int64_t groups, int64_t bits, bool symmetric) {
  const char* op = "quantize";
  values_dtype(op, "x", x);
  check_quantize(op, x, groups, bits);
  const Device device(device_index(x));
  Tensor levels = new_like(x, x.size(x.dim() - 1) * bits / 8, ScalarType::Char);
  Tensor params = new_params(x, groups, symmetric);
  quantize_into(op, x, levels, params, groups, levels_of(bits, symmetric), {}, device.stream());
  return {levels, params};
}

Quantized swizzle_quantize(const Tensor& x, int64_t groups, int64_t bits, bool symmetric, int64_t pipeline,
                           int64_t nodes, int64_t devices_per_node) {
  const char* op = "swizzle_quantize";
  values_dtype(op, "x", x);
  check_quantize(op, x, groups, bits);
  const int64_t parts = pipeline * nodes * devices_per_node;
  DS_KERNELS_CHECK(pipeline > 0 && nodes > 0 && devices_per_node > 0 && groups % parts == 0, op, "groups is ", groups,
                   "; expected a multiple of pipeline * nodes * devices_per_node, which is ", parts);
  const Device device(device_index(x));
  Tensor levels = torch::stable::new_empty(x, {x.numel() * bits / 8}, ScalarType::Char);
  Tensor params = new_params(x, groups, symmetric);
  quantize_into(op, x, levels, params, groups, levels_of(bits, symmetric),
                {pipeline, nodes, devices_per_node, groups / parts}, device.stream());
  return {levels, params};
}

Tensor dequantize(const Tensor& levels, const Tensor& params, int64_t bits, bool symmetric, ScalarType dtype) {
  const char* op = "dequantize";
  DS_KERNELS_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, op,
                   "dtype is none that this kernel gives; expected float32, bfloat16 or float16");
  const int64_t groups = check_params(op, levels, params, bits, symmetric);
  const Device device(device_index(levels));
  Tensor x = new_like(levels, levels.size(levels.dim() - 1) * 8 / bits, dtype);
  const Tensor packed = torch::stable::contiguous(levels), numbers = torch::stable::contiguous(params);
  launch_dequantize(op,
                    {packed.data_ptr(), static_cast<const float*>(numbers.data_ptr()), x.data_ptr(), groups,
                     x.numel() / groups, levels_of(bits, symmetric)},
                    values_dtype(op, "x", x), device.stream());
  return x;
}

Quantized quantized_reduce(const Tensor& levels, const Tensor& params, int64_t out_groups, int64_t devices,
                           int64_t bits, bool symmetric) {
  const char* op = "quantized_reduce";
  const int64_t groups = check_params(op, levels, params, bits, symmetric), last = levels.size(levels.dim() - 1);
  DS_KERNELS_CHECK(devices > 0, op, "devices is ", devices, "; expected a positive number");
  DS_KERNELS_CHECK(groups % devices == 0 && last % devices == 0, op, "params has ", groups,
                   " groups, the last dimension of levels ", last, " elements; expected multiples of devices, which is ",
                   devices);
  const int64_t packed_size = check_groups(op, "the sum", levels.numel() / devices, "out_groups", out_groups);
  const Device device(device_index(levels));
  Tensor out = new_like(levels, last / devices, ScalarType::Char), out_params = new_params(levels, out_groups, symmetric);
  const Tensor packed = torch::stable::contiguous(levels), numbers = torch::stable::contiguous(params);
  const int64_t size = packed_size * 8 / bits, received = std::max<int64_t>(size * out_groups / (groups / devices), 1);
  launch_quantized_reduce(op,
                          {packed.data_ptr(), static_cast<const float*>(numbers.data_ptr()), devices, received,
                           out.data_ptr(), static_cast<float*>(out_params.data_ptr()), out_groups, size,
                           levels_of(bits, symmetric)},
                          device.stream());
  return {out, out_params};
}

Tensor dequantize_range(const Tensor& levels, const Tensor& scale, const Tensor& minimum, int64_t group_size,
                        int64_t bits) {
  const char* op = "dequantize_range";
  check_bits(op, bits);
  check_dtype(op, "levels", levels, ScalarType::Byte, "uint8");
  const Dtype dtype = values_dtype(op, "scale", scale);
  check_dtype(op, "minimum", minimum, scale.scalar_type(), name_of(dtype));
  DS_KERNELS_CHECK(scale.device() == levels.device() && minimum.device() == levels.device(), op,
                   "scale or minimum is on another device; expected that of levels");
  const int64_t groups = scale.numel(), values = levels.numel() * 8 / bits;
  DS_KERNELS_CHECK(minimum.numel() == groups, op, "minimum has ", minimum.numel(), " elements; expected ", groups,
                   ", as many as scale");
  DS_KERNELS_CHECK(group_size > 0 && group_size * bits % 8 == 0 && values == groups * group_size, op, "levels has ",
                   values, " values; expected ", groups, " groups of ", group_size);
  const Device device(device_index(levels));
  Tensor x = torch::stable::new_empty(scale, {groups, group_size}, scalar_type_of(dtype));
  const Tensor packed = torch::stable::contiguous(levels), scales = torch::stable::contiguous(scale),
               minima = torch::stable::contiguous(minimum);
  launch_dequantize_range(op,
                          {packed.data_ptr(), scales.data_ptr(), minima.data_ptr(), x.data_ptr(), groups, group_size,
                           static_cast<int>(bits)},
                          dtype, device.stream());
  return x;
}

void check_noise(const char* op, const Tensor& x, const Tensor& noise) {
  check_dtype(op, "noise", noise, ScalarType::Float, "float32");
  DS_KERNELS_CHECK(noise.device() == x.device(), op, "noise is on another device; expected that of x");
  DS_KERNELS_CHECK(noise.sizes() == x.sizes(), op, "noise has shape ", text_of(noise.sizes()), "; expected ",
                   text_of(x.sizes()), ", that of x");
}

void fake_quantize_(const Tensor& x, const std::optional<Tensor>& noise, int64_t groups, int64_t bits,
                    bool symmetric) {
  const char* op = "fake_quantize_";
  const Dtype dtype = values_dtype(op, "x", x);
  DS_KERNELS_CHECK(2 <= bits && bits <= 16, op, "bits is ", bits, "; expected 2 to 16");
  const int64_t size = check_groups(op, "x", x.numel(), "groups", groups);
  if (noise) check_noise(op, x, *noise);
  DS_KERNELS_CHECK(x.is_contiguous() || !detail::may_overlap_itself(x.sizes(), x.strides()), op,
                   "x has elements that share memory (is it expanded?); expected one element at each index");
  const NoGrad guard;
  const Device device(device_index(x));
  Tensor original = x, values = torch::stable::contiguous(x);
  const std::optional<Tensor> drawn = noise ? std::optional(torch::stable::contiguous(*noise)) : std::nullopt;
  const auto* random = drawn ? static_cast<const float*>(drawn->data_ptr()) : nullptr;
  launch_fake_quantize(op, {values.data_ptr(), random, groups, size, static_cast<int>(bits), symmetric}, dtype,
                       device.stream());
  if (!x.is_contiguous()) torch::stable::copy_(original, values);
}

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) {
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("swizzle_quantize", TORCH_BOX(&swizzle_quantize));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("quantized_reduce", TORCH_BOX(&quantized_reduce));
  m.impl("dequantize_range", TORCH_BOX(&dequantize_range));
  m.impl("fake_quantize_", TORCH_BOX(&fake_quantize_));
}

}  // namespace ds_kernels::cuda
