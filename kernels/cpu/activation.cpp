// Activations with their bias. Compiled once per instruction-set level, without torch.
#include "activation_loops.h"
#include "by_dtype.h"

#include <ds_kernels/activation.h>

namespace ds_kernels::cpu {
namespace {

template <Activation activation>
struct Bias {
  template <class Element>
  struct Loop {
    static void run(const ActivationRows& rows, int64_t first, int64_t last) {
      const int64_t columns = rows.columns;
      const auto* bias = static_cast<const Element*>(rows.bias);
      for (int64_t row = first; row < last; ++row) {
        const auto* input = static_cast<const Element*>(rows.input) + row * columns;
        auto* output = static_cast<Element*>(rows.output) + row * columns;
        for_each_vector(columns, [=](int64_t i, auto memory) {
          Floats x = memory.load(input + i);
          if (bias) x += memory.load(bias + i);
          memory.store(output + i, activate<activation>(x));
        });
      }
    }
  };
};

template <Activation activation>
struct Gated {
  template <class Element>
  struct Loop {
    static void run(const ActivationRows& rows, int64_t first, int64_t last) {
      const int64_t columns = rows.columns;
      const auto* bias = static_cast<const Element*>(rows.bias);
      for (int64_t row = first; row < last; ++row) {
        const auto* values = static_cast<const Element*>(rows.input) + row * 2 * columns;
        const auto* gates = values + columns;
        auto* output = static_cast<Element*>(rows.output) + row * columns;
        for_each_vector(columns, [=](int64_t i, auto memory) {
          Floats value = memory.load(values + i), gate = memory.load(gates + i);
          if (bias) value += memory.load(bias + i), gate += memory.load(bias + columns + i);
          memory.store(output + i, value * activate<activation>(gate));
        });
      }
    }
  };
};

template <template <Activation> class Kind>
ActivationLoop choose(Dtype dtype, Activation activation) {
  switch (activation) {
    case Activation::Relu: return by_dtype<Kind<Activation::Relu>::template Loop>(dtype);
    case Activation::Gelu: return by_dtype<Kind<Activation::Gelu>::template Loop>(dtype);
    case Activation::GeluTanh: return by_dtype<Kind<Activation::GeluTanh>::template Loop>(dtype);
    case Activation::Silu: return by_dtype<Kind<Activation::Silu>::template Loop>(dtype);
    default: return by_dtype<Kind<Activation::Identity>::template Loop>(dtype);
  }
}

}  // namespace

inline namespace DS_KERNELS_CPU_LEVEL {
extern const ActivationLoops activation_loops{choose<Bias>, choose<Gated>};
}

}  // namespace ds_kernels::cpu
