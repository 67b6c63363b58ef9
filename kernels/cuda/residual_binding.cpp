// ds_plugin::residual_add_bias_ and moe_res_matmul_ for tensors on CUDA devices.
#include "residual_launch.h"

#include <ds_kernels/arguments.h>

#include "device.h"

namespace ds_kernels::cuda {
namespace {

void residual_add_bias_(const Tensor& residual, const Tensor& hidden, const OptionalTensor& attention,
                        const OptionalTensor& attention_bias, const OptionalTensor& final_bias, double scale,
                        bool scale_attention) {
  const char* op = "residual_add_bias_";
  const Device device(TensorRef(residual.get()).device_index());
  Arguments arguments(op, "residual", residual);
  const int64_t rows = rows_of(op, "residual", residual);
  const Shape shape = residual.sizes();
  const int64_t& columns = shape[shape.size() - 1];
  ResidualRows work{};
  work.hidden = arguments.read("hidden", hidden, shape);
  work.attention = arguments.read("attention", attention, shape);
  work.attention_bias = arguments.read("attention_bias", attention_bias, vector_of(columns));
  work.final_bias = arguments.read("final_bias", final_bias, vector_of(columns));
  work.residual = arguments.write("residual", residual, shape);
  work.rows = rows;
  work.columns = columns;
  work.scale = static_cast<float>(scale);
  work.scale_attention = scale_attention;
  launch_add_bias(work, arguments.dtype(), device.stream());
  arguments.write_back();
}

void moe_res_matmul_(const Tensor& output, const Tensor& residual, const Tensor& coefficients) {
  const char* op = "moe_res_matmul_";
  const Device device(TensorRef(output.get()).device_index());
  Arguments arguments(op, "output", output);
  const int64_t rows = rows_of(op, "output", output);
  const Shape shape = output.sizes();
  const int64_t columns = shape[shape.size() - 1], both = 2 * columns;
  MixRows work{};
  work.residual = arguments.read("residual", residual, shape);
  const void* weights = arguments.read("coefficients", coefficients, vector_of(both));
  work.residual_weight = weights;
  work.output_weight = static_cast<const char*>(weights) + columns * size_of(arguments.dtype());
  work.output = arguments.write("output", output, shape);
  work.rows = rows;
  work.columns = columns;
  launch_mix(work, arguments.dtype(), device.stream());
  arguments.write_back();
}

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) {
  m.impl("residual_add_bias_", DS_KERNELS_BOX(&residual_add_bias_));
  m.impl("moe_res_matmul_", DS_KERNELS_BOX(&moe_res_matmul_));
}

}  // namespace ds_kernels::cuda
