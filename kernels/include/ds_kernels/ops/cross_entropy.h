// ds_plugin::cross_entropy_, on any device.
#pragma once

#include <ds_kernels/arguments.h>
#include <ds_kernels/cross_entropy.h>

namespace ds_kernels {

// Asks its Device, see binding.h, for TargetCheck and CrossEntropyRows.
template <class Device>
struct CrossEntropyOps {
  template <class Library>
  static void implement(Library& m) {
    m.impl("cross_entropy_", TORCH_BOX(&cross_entropy_));
  }

  static Tensor cross_entropy_(const Tensor& logits, const Tensor& target, int64_t ignore_index, double label_smoothing,
                               double z_loss, double softcap, bool gradient) {
    const char* op = "cross_entropy_";
    Arguments arguments(op, "logits", logits);
    const Device device(arguments.device_index());
    const Shape shape = logits.sizes();
    DS_KERNELS_CHECK(shape.size() == 2, op, "logits has shape ", text_of(shape), "; expected [rows, columns]");
    arguments.check_device("target", target);
    DS_KERNELS_CHECK(TensorRef(target.get()).dtype_code() == aoti_torch_dtype_int64(), op,
                     "target has another dtype; expected int64");
    DS_KERNELS_CHECK(target.sizes() == vector_of(shape[0]), op, "target has shape ", text_of(target.sizes()),
                     "; expected [", shape[0], "], one for each row");
    DS_KERNELS_CHECK(label_smoothing >= 0 && label_smoothing <= 1, op, "label_smoothing is out of range; expected at "
                     "least 0 and at most 1");
    DS_KERNELS_CHECK(softcap >= 0 && softcap <= kLargest, op, "softcap is out of range; expected a bound above 0, or 0 "
                     "for none");
    const Tensor places = without_gaps(target);
    const auto* first = static_cast<const int64_t*>(places.data_ptr());
    const int64_t* wrong = nullptr;
    device.run(op, TargetCheck{first, shape[0], shape[1], ignore_index, &wrong}, kAnyDtype);
    DS_KERNELS_CHECK(!wrong, op, "target has an entry ", *wrong, "; expected at least 0 and less than ", shape[1],
                     ", or ", ignore_index, ", which is ignored");
    const Tensor losses = new_float_tensor(logits, vector_of(shape[0]));
    const CrossEntropyRows rows{arguments.write("logits", logits, shape),
                                first,
                                static_cast<float*>(losses.data_ptr()),
                                shape[0],
                                shape[1],
                                ignore_index,
                                static_cast<float>(label_smoothing),
                                static_cast<float>(z_loss),
                                static_cast<float>(softcap),
                                gradient};
    if (rows.rows > 0) device.run(op, rows, arguments.dtype());
    if (gradient) arguments.write_back();
    return losses;
  }

 private:
  static constexpr double kLargest = 3e38;
};

}  // namespace ds_kernels
