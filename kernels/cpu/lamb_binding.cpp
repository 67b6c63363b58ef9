// ds_plugin::lamb_ for tensors in host memory.
#include "lamb_loops.h"
#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(LambLoops, lamb_loops)

namespace {

constexpr const char* kOp = "lamb_";
enum Lists { kParams, kGrads, kExpAvgs, kExpAvgSqs, kCopies };

// Units of tensors that pass through the first loop before the second one turns to them: 2 M elements, whose parameters
// and states a last-level cache of 32 MB still holds. A larger tensor is read from memory twice.
constexpr int64_t kBatch = 2 * 1024;

MultiTensor checked(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
                    const TensorList& exp_avg_sqs, const TensorList& copies) {
  const ListArgument p{"params", params, true}, g{"grads", grads, false}, m{"exp_avgs", exp_avgs, true},
      v{"exp_avg_sqs", exp_avg_sqs, true}, c{"copies", copies, true};
  return copies.size() == 0 ? MultiTensor(kOp, {p, g, m, v}) : MultiTensor(kOp, {p, g, m, v, c});
}

// One call's two loops over all tensors.
class LambCall {
 public:
  LambCall(const MultiTensor& tensors, std::vector<LambStep> steps, bool copies, float* ratios)
      : tensors_(tensors), steps_(std::move(steps)), copies_(copies), ratios_(ratios), slices_(tensors.numels()) {
    const LambLoops& loops = loops_for(kOp, all_lamb_loops());
    const bool float_states = tensors.dtype(kExpAvgs) == Dtype::Float32;
    moments_ = loops.moments(tensors.dtype(kParams), tensors.dtype(kGrads), float_states);
    params_ = loops.params(tensors.dtype(kParams), float_states);
  }

  void run() {
    for (size_t first = 0, last = 0; first < tensors_.size(); first = last) {
      while (last < tensors_.size() && (last == first || units(first, last + 1) <= kBatch)) ++last;
      update_moments(first, last);
      update_params(first, last);
    }
  }

 private:
  int64_t units(size_t first, size_t last) const { return slices_.first_unit(last) - slices_.first_unit(first); }

  const LambStep& step(size_t tensor) const { return steps_[steps_.size() == 1 ? 0 : tensor]; }

  void* at(size_t list, size_t tensor, int64_t position) const {
    return static_cast<char*>(tensors_.data(list, tensor)) + position * size_of(tensors_.dtype(list));
  }

  // The sums of each unit are kept apart and added in one order, so that a result does not depend on the number of
  // threads.
  void update_moments(size_t first, size_t last) {
    sums_.resize(units(first, last));
    const int64_t start = slices_.first_unit(first);
    parallel_for(start, slices_.first_unit(last), kGrain, [&](int64_t begin, int64_t end) {
      LambSums* sums = sums_.data() + (begin - start);
      slices_.visit(begin, end, [&](size_t tensor, int64_t from, int64_t to) {
        moments_(at(kParams, tensor, from), at(kGrads, tensor, from), at(kExpAvgs, tensor, from),
                 at(kExpAvgSqs, tensor, from), to - from, step(tensor), sums);
        sums += (to - from + Slices::kUnit - 1) / Slices::kUnit;
      });
    });
    const LambSums* sums = sums_.data();
    for (size_t tensor = first; tensor < last; ++tensor) {
      const int64_t count = units(tensor, tensor + 1);
      ratios_[tensor] = static_cast<float>(lamb_ratio(lamb_total(sums, count), step(tensor)));
      sums += count;
    }
  }

  void update_params(size_t first, size_t last) const {
    parallel_for(slices_.first_unit(first), slices_.first_unit(last), kGrain, [&](int64_t begin, int64_t end) {
      slices_.visit(begin, end, [&](size_t tensor, int64_t from, int64_t to) {
        const LambCopy copy = copies_ ? LambCopy{at(kCopies, tensor, from), tensors_.dtype(kCopies)}
                                      : LambCopy{nullptr, Dtype::Float32};
        params_(at(kParams, tensor, from), at(kExpAvgs, tensor, from), at(kExpAvgSqs, tensor, from), copy, to - from,
                step(tensor), static_cast<float>(step(tensor).step_size * ratios_[tensor]));
      });
    });
  }

  const MultiTensor& tensors_;
  const std::vector<LambStep> steps_;
  const bool copies_;
  float* const ratios_;
  const Slices slices_;
  LambMomentsLoop moments_;
  LambParamsLoop params_;
  std::vector<LambSums> sums_;
};

Tensor new_floats(size_t count) {
  const int64_t size = static_cast<int64_t>(count), stride = 1;
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_float32(),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

Tensor lamb_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs,
             const TensorList& exp_avg_sqs, const TensorList& copies, const std::vector<int64_t>& steps, double lr,
             double beta1, double beta2, double eps, double weight_decay, double min_coeff, double max_coeff,
             double grad_scale, bool eps_inside_sqrt, bool bias_correction, bool correct_inside) {
  MultiTensor tensors = checked(params, grads, exp_avgs, exp_avg_sqs, copies);
  tensors.check_dtypes(2, true);
  const LambOptions options{lr,         beta1,      beta2,           eps,             weight_decay,  min_coeff,
                            max_coeff,  grad_scale, eps_inside_sqrt, bias_correction, correct_inside};
  auto constants = steps_of(kOp, steps, tensors.size(), [&](int64_t step) { return lamb_step(options, step); });
  Tensor ratios = new_floats(tensors.size());
  LambCall(tensors, std::move(constants), copies.size() > 0, static_cast<float*>(ratios.data_ptr())).run();
  tensors.write_back();
  return ratios;
}

}  // namespace

DS_KERNELS_IMPL(CPU, m) { m.impl("lamb_", DS_KERNELS_BOX(&lamb_)); }

}  // namespace ds_kernels::cpu
