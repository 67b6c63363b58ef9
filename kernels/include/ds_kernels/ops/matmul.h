// ds_plugin::addmm_, on any device: by the device's own loops where these are faster than torch's product.
#pragma once

#include <ds_kernels/arguments.h>
#include <ds_kernels/matmul.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for Matmul. It also has
//   // Whether its own loops are the way to do it.
//   bool takes(const Matmul& product) const;
//   // torch's product: sums = beta sums + a b.
//   void add_by_torch(const Tensor& sums, const Tensor& a, const Tensor& b, double beta) const;
template <class Device>
struct MatmulOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("addmm_", TORCH_BOX(&addmm_));
  }

  static void addmm_(const Tensor& sums, const Tensor& a, const Tensor& b, double beta) {
    const NoGrad guard;
    Arguments arguments("addmm_", "sums", sums);
    const Device device(arguments.device_index());
    DS_KERNELS_CHECK(arguments.dtype() == Dtype::Float32, op, "sums is ", name_of(arguments.dtype()), "; expected float32");
    const Shape shape = sums.sizes();
    DS_KERNELS_CHECK(shape.size() == 2, op, "sums has shape ", text_of(shape), "; expected [rows, columns]");
    DS_KERNELS_CHECK(a.dim() == 2, op, "a has shape ", text_of(a.sizes()), "; expected [", shape[0], ", depth]");
    const int64_t shape_of_a[] = {shape[0], a.size(1)}, shape_of_b[] = {a.size(1), shape[1]};
    arguments.check("a", a, {shape_of_a, 2});
    arguments.check("b", b, {shape_of_b, 2});
    Matmul product{shape[0], shape[1], a.size(1), {}, {}, nullptr, static_cast<float>(beta)};
    if (product.rows == 0 || product.columns == 0) return;
    if (!device.takes(product)) {
      arguments.check_elements("sums", sums);
      arguments.write_in_place(sums);
      return device.add_by_torch(sums, arguments.apart(a), arguments.apart(b), beta);
    }
    product.c = static_cast<float*>(arguments.write("sums", sums, shape));
    const Tensor rows = laid_out(arguments.apart(a)), columns = laid_out(arguments.apart(b));
    product.a = matrix_of(rows);
    product.b = matrix_of(columns);
    device.run(op, product, Dtype::Float32);
    arguments.write_back();
  }

 private:
  static constexpr const char* op = "addmm_";

  static bool is_along(const Tensor& tensor, int64_t along, int64_t across) {
    return (tensor.stride(along) == 1 || tensor.size(along) <= 1) &&
           (tensor.stride(across) >= tensor.size(along) || tensor.size(across) <= 1);
  }

  // The tensor, or a copy where neither its rows nor its columns are contiguous.
  static Tensor laid_out(const Tensor& tensor) {
    return is_along(tensor, 1, 0) || is_along(tensor, 0, 1) ? tensor : torch::stable::contiguous(tensor);
  }

  static Matrix matrix_of(const Tensor& tensor) {
    const bool transposed = !is_along(tensor, 1, 0);
    return {static_cast<const float*>(tensor.data_ptr()), tensor.stride(transposed ? 1 : 0), transposed};
  }
};

}  // namespace ds_kernels
