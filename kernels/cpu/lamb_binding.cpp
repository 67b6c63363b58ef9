// The op of <ds_kernels/ops/lamb.h> for tensors in host memory.
#include "lamb_loops.h"

#include <ds_kernels/ops/lamb.h>

#include "device.h"

namespace ds_kernels::cpu {

namespace {

// Units of tensors that pass through the first loop before the second one turns to them: 2 M elements, whose parameters
// and states a last-level cache of 32 MB still holds. A larger tensor is read from memory twice.
constexpr int64_t kBatch = 2 * 1024;

// One call's two loops over all tensors.
class LambCall {
 public:
  LambCall(const LambLoops& loops, const LambLists& lamb)
      : tensors_(lamb.tensors), steps_(lamb.steps), ratios_(lamb.ratios), slices_(tensors_.numels, tensors_.size) {
    const bool float_states = tensors_.is_float(kExpAvgs);
    moments_ = loops.moments(tensors_.dtypes[kParams], tensors_.dtypes[kGrads], float_states);
    params_ = loops.params(tensors_.dtypes[kParams], float_states);
  }

  void run() {
    for (size_t first = 0, last = 0; first < tensors_.size; first = last) {
      while (last < tensors_.size && (last == first || units(first, last + 1) <= kBatch)) ++last;
      update_moments(first, last);
      update_params(first, last);
    }
  }

 private:
  int64_t units(size_t first, size_t last) const { return slices_.first_unit(last) - slices_.first_unit(first); }

  const LambStep& step(size_t tensor) const { return steps_.of(tensor); }

  void* at(size_t list, size_t tensor, int64_t position) const {
    return static_cast<char*>(tensors_.at(list, tensor)) + position * size_of(tensors_.dtypes[list]);
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
    const bool copies = tensors_.lists > kCopies;
    parallel_for(slices_.first_unit(first), slices_.first_unit(last), kGrain, [&](int64_t begin, int64_t end) {
      slices_.visit(begin, end, [&](size_t tensor, int64_t from, int64_t to) {
        const LambCopy copy = copies ? LambCopy{at(kCopies, tensor, from), tensors_.dtypes[kCopies]}
                                     : LambCopy{nullptr, Dtype::Float32};
        params_(at(kParams, tensor, from), at(kExpAvgs, tensor, from), at(kExpAvgSqs, tensor, from), copy, to - from,
                step(tensor), static_cast<float>(step(tensor).step_size * ratios_[tensor]));
      });
    });
  }

  const TensorLists tensors_;
  const Steps<LambStep> steps_;
  float* const ratios_;
  const Slices slices_;
  LambMomentsLoop moments_;
  LambParamsLoop params_;
  std::vector<LambSums> sums_;
};

struct Lamb : Device {
  using Device::Device;

  void run(const char* op, const LambLists& lamb, Dtype) const { LambCall(loops_for<LambLoops>(op), lamb).run(); }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { LambOps<Lamb>::implement(m); }

}  // namespace ds_kernels::cpu
