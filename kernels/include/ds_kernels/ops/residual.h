// ds_plugin::residual_add_bias_ and moe_res_matmul_, on any device.
#pragma once

#include <ds_kernels/arguments.h>
#include <ds_kernels/residual.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for ResidualRows and MixRows.
template <class Device>
struct ResidualOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("residual_add_bias_", DS_KERNELS_BOX(&residual_add_bias_));
    m.impl("moe_res_matmul_", DS_KERNELS_BOX(&moe_res_matmul_));
  }

  static void residual_add_bias_(const Tensor& residual, const Tensor& hidden, const OptionalTensor& attention,
                                 const OptionalTensor& attention_bias, const OptionalTensor& final_bias, double scale,
                                 bool scale_attention) {
    const char* op = "residual_add_bias_";
    Arguments arguments(op, "residual", residual);
    const Device device(arguments.device_index());
    const Shape shape = residual.sizes();
    ResidualRows work{};
    work.rows = rows_of(op, "residual", residual);
    work.columns = shape[shape.size() - 1];
    work.residual = arguments.write("residual", residual, shape);
    work.hidden = arguments.read("hidden", hidden, shape);
    work.attention = arguments.read("attention", attention, shape);
    work.attention_bias = arguments.read("attention_bias", attention_bias, vector_of(work.columns));
    work.final_bias = arguments.read("final_bias", final_bias, vector_of(work.columns));
    work.scale = static_cast<float>(scale);
    work.scale_attention = scale_attention;
    device.run(op, work, arguments.dtype());
    arguments.write_back();
  }

  static void moe_res_matmul_(const Tensor& output, const Tensor& residual, const Tensor& coefficients) {
    const char* op = "moe_res_matmul_";
    Arguments arguments(op, "output", output);
    const Device device(arguments.device_index());
    const Shape shape = output.sizes();
    MixRows work{};
    work.rows = rows_of(op, "output", output);
    work.columns = shape[shape.size() - 1];
    const int64_t both = 2 * work.columns;
    work.output = arguments.write("output", output, shape);
    work.residual = arguments.read("residual", residual, shape);
    work.residual_weight = arguments.read("coefficients", coefficients, vector_of(both));
    work.output_weight =
        static_cast<const char*>(work.residual_weight) + work.columns * size_of(arguments.dtype());
    device.run(op, work, arguments.dtype());
    arguments.write_back();
  }
};

}  // namespace ds_kernels
