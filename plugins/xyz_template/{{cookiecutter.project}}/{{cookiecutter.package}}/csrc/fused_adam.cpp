// ds_plugin::adam_ on {{ cookiecutter.prefix }} devices. Registering it is all that it takes: torch prefers a device's own kernel
// to the reference.
#include <ds_kernels/ops/adam.h>
#include <launch.h>

namespace {

using namespace ds_kernels;

// The kernel: updates one tensor's elements. It runs on the device, when the stream gets there, so it holds addresses
// and numbers alone. On hardware this function is written in the device's language.
template <class Param, class Grad, class State>
void update(Param* params, const Grad* grads, State* exp_avgs, State* exp_avg_sqs, int64_t count, AdamStep step) {
  Param* p = runtime::in_kernel(params);
  const Grad* g = runtime::in_kernel(grads);
  State* m = runtime::in_kernel(exp_avgs);
  State* v = runtime::in_kernel(exp_avg_sqs);
  for_each_vector(count, [=](int64_t i, auto memory) {
    Floats param = memory.load(p + i), first = memory.load(m + i), second = memory.load(v + i);
    adam_update(param, memory.load(g + i), first, second, step);
    memory.store(p + i, param);
    memory.store(m + i, first);
    memory.store(v + i, second);
  });
}

// Puts the kernel for tensor `i` into the stream.
template <class Param, class Grad, class State>
void launch(const TensorLists& tensors, size_t i, const AdamStep& step, runtime::Stream stream) {
  auto* p = static_cast<Param*>(tensors.at(0, i));
  auto* g = static_cast<const Grad*>(tensors.at(1, i));
  auto* m = static_cast<State*>(tensors.at(2, i));
  auto* v = static_cast<State*>(tensors.at(3, i));
  const int64_t count = tensors.numels[i];
  runtime::launch(stream, [=] { update(p, g, m, v, count, step); }, "adam");
}

template <class Param>
void launch_for(const TensorLists& tensors, size_t i, const AdamStep& step, runtime::Stream stream) {
  const bool float_grads = tensors.is_float(1), float_states = tensors.is_float(2);
  if (float_grads && float_states) return launch<Param, float, float>(tensors, i, step, stream);
  if (float_grads) return launch<Param, float, Param>(tensors, i, step, stream);
  if (float_states) return launch<Param, Param, float>(tensors, i, step, stream);
  return launch<Param, Param, Param>(tensors, i, step, stream);
}

// What AdamOps asks of a device. It has checked the tensors: equal lengths and shapes, one dtype in a list, no overlaps.
class Adam {
 public:
  explicit Adam(int32_t device) : stream_(runtime::current_stream(device)) {}

  void run(const char*, const AdamLists& adam, Dtype dtype) const {
    for (size_t i = 0; i < adam.tensors.size; ++i) {
      if (adam.tensors.numels[i] == 0) continue;  // an empty tensor has no address in the device's memory
      const AdamStep& step = adam.steps.of(i);
      switch (dtype) {
        case Dtype::BFloat16: launch_for<BFloat16>(adam.tensors, i, step, stream_); break;
        case Dtype::Float16: launch_for<Float16>(adam.tensors, i, step, stream_); break;
        default: launch<float, float, float>(adam.tensors, i, step, stream_);
      }
    }
  }

 private:
  runtime::Stream stream_;
};

}  // namespace

DS_KERNELS_IMPL(PrivateUse1, m) { m.impl("adam_", DS_KERNELS_BOX(&AdamOps<Adam>::adam_)); }
