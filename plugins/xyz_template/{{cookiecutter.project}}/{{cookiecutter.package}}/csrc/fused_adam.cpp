// ds_plugin::adam_ on {{ cookiecutter.prefix }} devices. Registering it is all that it takes: torch prefers a device's own kernel
// to the reference.
#include <ds_kernels/multi_tensor.h>

#include <ds_kernels/adam.h>
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
void launch(const MultiTensor& tensors, size_t i, const AdamStep& step, runtime::Stream stream) {
  auto* p = static_cast<Param*>(tensors.data(0, i));
  auto* g = static_cast<const Grad*>(tensors.data(1, i));
  auto* m = static_cast<State*>(tensors.data(2, i));
  auto* v = static_cast<State*>(tensors.data(3, i));
  const int64_t count = tensors.numels()[i];
  runtime::launch(stream, [=] { update(p, g, m, v, count, step); }, "adam");
}

template <class Param>
void launch_for(const MultiTensor& tensors, size_t i, const AdamStep& step, runtime::Stream stream) {
  const bool float_grads = tensors.dtype(1) == Dtype::Float32, float_states = tensors.dtype(2) == Dtype::Float32;
  if (float_grads && float_states) return launch<Param, float, float>(tensors, i, step, stream);
  if (float_grads) return launch<Param, float, Param>(tensors, i, step, stream);
  if (float_states) return launch<Param, Param, float>(tensors, i, step, stream);
  return launch<Param, Param, Param>(tensors, i, step, stream);
}

void adam_(const TensorList& params, const TensorList& grads, const TensorList& exp_avgs, const TensorList& exp_avg_sqs,
           const std::vector<int64_t>& steps, double lr, double beta1, double beta2, double eps, double weight_decay,
           bool adamw, bool bias_correction) {
  const char* op = "adam_";
  const std::initializer_list<ListArgument> lists = {
      {"params", params, true},
      {"grads", grads, false},
      {"exp_avgs", exp_avgs, true},
      {"exp_avg_sqs", exp_avg_sqs, true},
  };
  MultiTensor tensors(op, lists);
  tensors.check_dtypes();
  const AdamOptions options{lr, beta1, beta2, eps, weight_decay, adamw, bias_correction};
  const auto constants = steps_of(op, steps, tensors.size(), [&](int64_t step) { return adam_step(options, step); });
  if (tensors.size() == 0) return;
  const runtime::Stream stream = runtime::current_stream(params[0].tensor());
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (tensors.numels()[i] == 0) continue;  // an empty tensor has no address in the device's memory
    const AdamStep& step = constants[steps.size() == 1 ? 0 : i];
    switch (tensors.dtype(0)) {
      case Dtype::BFloat16: launch_for<BFloat16>(tensors, i, step, stream); break;
      case Dtype::Float16: launch_for<Float16>(tensors, i, step, stream); break;
      default: launch<float, float, float>(tensors, i, step, stream);
    }
  }
  tensors.write_back();
}

}  // namespace

DS_KERNELS_IMPL(PrivateUse1, m) { m.impl("adam_", DS_KERNELS_BOX(&adam_)); }
