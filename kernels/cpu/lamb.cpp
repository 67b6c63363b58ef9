// LAMB's loops. Compiled once per instruction-set level, without torch.
#include "lamb_loops.h"

#include "loops.h"

namespace ds_kernels::cpu {
namespace {

typedef double Doubles __attribute__((vector_size(kVectorBytes)));
typedef float HalfFloats __attribute__((vector_size(kVectorBytes / 2)));

// The sum of the squares of floats, in double.
class SumOfSquares {
 public:
  DS_KERNELS_INLINE void add(Floats x) {
    HalfFloats halves[2];
    __builtin_memcpy(halves, &x, sizeof x);
    const Doubles low = __builtin_convertvector(halves[0], Doubles), high = __builtin_convertvector(halves[1], Doubles);
    low_ += low * low;
    high_ += high * high;
  }
  DS_KERNELS_INLINE double total() const {
    const Doubles both = low_ + high_;
    double total = 0;
    for (int lane = 0; lane < kLanes / 2; ++lane) total += both[lane];
    return total;
  }

 private:
  Doubles low_{}, high_{};
};

// x as memory of the element's type holds it.
template <class Element>
DS_KERNELS_INLINE Floats rounded(Floats x) {
  Element elements[kLanes];
  store(elements, x);
  return load(elements);
}
template <>
DS_KERNELS_INLINE Floats rounded<float>(Floats x) {
  return x;
}

// x, with zero in the lanes beyond the end of an array.
DS_KERNELS_INLINE Floats kept(WholeVector, Floats x) { return x; }
DS_KERNELS_INLINE Floats kept(PartVector part, Floats x) {
  float lanes[kLanes];
  store(lanes, x);
  return part.load(lanes);
}

template <class Param, class Grad, class State>
LambSums update_unit(const Param* p, const Grad* g, State* m, State* v, int64_t count, const LambStep& step) {
  const LambStep s = step;  // a copy, which the compiler knows the stores do not change
  SumOfSquares params, updates;
  for_each_vector<StreamedVector>(count, [&](int64_t i, auto memory) {
    const Floats param = memory.load(p + i);
    Floats first = memory.load(m + i), second = memory.load(v + i);
    lamb_moments(memory.load(g + i), first, second, s);
    memory.store(m + i, first);
    memory.store(v + i, second);
    params.add(param);
    updates.add(kept(memory, lamb_direction(param, rounded<State>(first), rounded<State>(second), s)));
  });
  return {params.total(), updates.total()};
}

template <class Param, class Grad, class State>
struct LambMoments {
  static void run(const void* params, const void* grads, void* exp_avgs, void* exp_avg_sqs, int64_t count,
                  const LambStep& step, LambSums* sums) {
    for (int64_t begin = 0; begin < count; begin += Slices::kUnit) {
      const int64_t size = count - begin < Slices::kUnit ? count - begin : Slices::kUnit;
      *sums++ = update_unit(static_cast<const Param*>(params) + begin, static_cast<const Grad*>(grads) + begin,
                            static_cast<State*>(exp_avgs) + begin, static_cast<State*>(exp_avg_sqs) + begin, size,
                            step);
    }
  }
};

template <class Param, class State>
struct LambParams {
  static void run(void* params, const void* exp_avgs, const void* exp_avg_sqs, LambCopy copy, int64_t count,
                  const LambStep& step, float step_size) {
    if (!copy.data) {
      return update(params, exp_avgs, exp_avg_sqs, count, step, step_size, [](int64_t, Floats, auto) {});
    }
    switch (copy.dtype) {
      case Dtype::BFloat16: return update_both<BFloat16>(params, exp_avgs, exp_avg_sqs, copy, count, step, step_size);
      case Dtype::Float16: return update_both<Float16>(params, exp_avgs, exp_avg_sqs, copy, count, step, step_size);
      default: return update_both<float>(params, exp_avgs, exp_avg_sqs, copy, count, step, step_size);
    }
  }

  template <class Element>
  static void update_both(void* params, const void* exp_avgs, const void* exp_avg_sqs, LambCopy copy, int64_t count,
                          const LambStep& step, float step_size) {
    auto* c = static_cast<Element*>(copy.data);
    update(params, exp_avgs, exp_avg_sqs, count, step, step_size,
           [c](int64_t i, Floats param, auto memory) { memory.store(c + i, param); });
  }

  // Calls `also(position, params, memory)` on what was stored.
  template <class Also>
  DS_KERNELS_INLINE static void update(void* params, const void* exp_avgs, const void* exp_avg_sqs, int64_t count,
                                       const LambStep& step, float step_size, Also also) {
    auto* p = static_cast<Param*>(params);
    auto* m = static_cast<const State*>(exp_avgs);
    auto* v = static_cast<const State*>(exp_avg_sqs);
    const LambStep s = step;
    for_each_vector<StreamedVector>(count, [=](int64_t i, auto memory) {
      Floats param = memory.load(p + i);
      param -= step_size * lamb_direction(param, memory.load(m + i), memory.load(v + i), s);
      memory.store(p + i, param);
      also(i, param, memory);
    });
  }
};

template <class Param, class Grad>
LambMomentsLoop moments_for(bool float_states) {
  return float_states ? LambMoments<Param, Grad, float>::run : LambMoments<Param, Grad, Param>::run;
}

LambMomentsLoop choose_moments(Dtype params, Dtype grads, bool float_states) {
  const bool float_grads = grads == Dtype::Float32;
  if (params == Dtype::Float32) {
    if (grads == Dtype::BFloat16) return LambMoments<float, BFloat16, float>::run;
    return float_grads ? LambMoments<float, float, float>::run : LambMoments<float, Float16, float>::run;
  }
  if (grads != params && !float_grads) return nullptr;
  if (params == Dtype::BFloat16) {
    return float_grads ? moments_for<BFloat16, float>(float_states) : moments_for<BFloat16, BFloat16>(float_states);
  }
  return float_grads ? moments_for<Float16, float>(float_states) : moments_for<Float16, Float16>(float_states);
}

LambParamsLoop choose_params(Dtype params, bool float_states) {
  switch (params) {
    case Dtype::BFloat16: return float_states ? LambParams<BFloat16, float>::run : LambParams<BFloat16, BFloat16>::run;
    case Dtype::Float16: return float_states ? LambParams<Float16, float>::run : LambParams<Float16, Float16>::run;
    default: return LambParams<float, float>::run;
  }
}

}  // namespace

template <>
const LambLoops& loops() {
  static constexpr LambLoops all{choose_moments, choose_params};
  return all;
}

}  // namespace ds_kernels::cpu
