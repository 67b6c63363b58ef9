// Ops without a kernel of the device: the CPU computes them on copies. Counted by name: the list of kernels to write.
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>

#include "device.h"
#include "generator.h"

namespace ds_device {
namespace {

using c10::Device, c10::DeviceIndex, c10::IValue;
using torch::jit::Stack;

// ------------------------------------------------------------------------------------------------------ counting

class Counts {
 public:
  void add(const c10::OperatorName& name) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++counts_[name];
  }
  c10::Dict<std::string, std::int64_t> read() {
    const std::lock_guard<std::mutex> lock(mutex_);
    c10::Dict<std::string, std::int64_t> result;
    for (const auto& [name, count] : counts_) result.insert(c10::toString(name), count);
    return result;
  }
  void reset() {
    const std::lock_guard<std::mutex> lock(mutex_);
    counts_.clear();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<c10::OperatorName, std::int64_t> counts_;
};

Counts& counts() {
  static auto* counts = new Counts;
  return *counts;
}

// ------------------------------------------------------------------------------------------------ random numbers

// While it lives, the CPU draws from a device's generator: the state of the device's stands in for that of the CPU's
// default one, which comes back afterwards as it was. One at a time.
class DrawFrom {
 public:
  explicit DrawFrom(const at::Generator& device)
      : lock_(mutex()), device_(impl(device)), cpu_(impl(at::detail::getDefaultCPUGenerator())) {
    const std::lock_guard<std::mutex> lock(cpu_->mutex_);  // who draws on the CPU meanwhile draws before or after it
    saved_ = cpu_->clone();
    assign(*device_, *cpu_);
  }
  DrawFrom(const DrawFrom&) = delete;
  DrawFrom& operator=(const DrawFrom&) = delete;
  ~DrawFrom() {
    move(*cpu_, *device_);
    move(*saved_, *cpu_);
  }

 private:
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static at::CPUGeneratorImpl* impl(const at::Generator& generator) {
    return static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
  }
  static void move(at::CPUGeneratorImpl& from, at::CPUGeneratorImpl& to) {
    const std::lock_guard<std::mutex> lock(to.mutex_);
    assign(from, to);
  }
  static void assign(at::CPUGeneratorImpl& from, at::CPUGeneratorImpl& to) {
    to.set_engine(from.engine());
    to.set_next_float_normal_sample(from.next_float_normal_sample());
    to.set_next_double_normal_sample(from.next_double_normal_sample());
  }

  std::lock_guard<std::mutex> lock_;
  at::CPUGeneratorImpl *device_, *cpu_;
  std::shared_ptr<at::CPUGeneratorImpl> saved_;
};

// The generator named in the arguments, taken out of them, or the device's default one.
at::Generator take_generator(const c10::OperatorHandle& op, Stack& stack, DeviceIndex device) {
  for (auto value = stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size()); value != stack.end();
       ++value) {
    if (!value->isGenerator()) continue;
    const at::Generator generator = value->toGenerator();
    TORCH_CHECK(generator.device().type() == kDevice, "expected a generator of ", Device(kDevice, device), ", not of ",
                generator.device());
    *value = IValue();
    return generator;
  }
  return default_generator(device);
}

// ------------------------------------------------------------------------------------------------------ fallback

template <class Function>
void for_each_tensor(const IValue& value, Function function) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) function(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector())
      if (tensor.defined()) function(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor && tensor->defined()) function(*tensor);
  }
}

// The device that a call is for: that of its tensors, else the one it names, else the current one.
//
// Tensors of several devices are refused as any kernel would refuse them; copying to the CPU would hide the mistake.
// Host tensors are let through where devices take them: numbers, and indices, lengths and the like, to be read.
DeviceIndex device_of_call(const c10::OperatorHandle& op, const Stack& stack) {
  std::optional<Device> device, named;
  const auto see = [&](const at::Tensor& tensor, bool is_written) {
    const bool tolerated = tensor.dim() == 0 || !(tensor.is_floating_point() || tensor.is_complex());
    if (tensor.is_cpu() && tolerated && !is_written) return;
    TORCH_CHECK(!device || *device == tensor.device(), "Expected all tensors to be on the same device, but found at ",
                "least two devices, ", *device, " and ", tensor.device(), "! (in ", op.operator_name(), ")");
    device = tensor.device();
  };
  auto value = stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  for (const c10::Argument& argument : op.schema().arguments()) {
    const bool is_written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    for_each_tensor(*value, [&](const at::Tensor& tensor) { see(tensor, is_written); });
    if (value->isDevice() && value->toDevice().has_index()) named = value->toDevice();
    ++value;
  }
  for (const auto& found : {device, named})
    if (found && found->type() == kDevice) return found->index();
  return static_cast<DeviceIndex>(runtime::current_device());
}

// torch puts results where the first tensor is, and that may be a number on the host: `1 - x`.
void bring_results_home(const c10::OperatorHandle& op, Stack* stack, DeviceIndex device) {
  const auto& returns = op.schema().returns();
  auto value = stack->end() - static_cast<std::ptrdiff_t>(returns.size());
  for (const auto& result : returns) {
    const bool is_new = value->isTensor() && result.alias_info() == nullptr && value->toTensor().defined();
    if (is_new && value->toTensor().is_cpu()) *value = value->toTensor().to(Device(kDevice, device));
    ++value;
  }
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  counts().add(op.operator_name());
  const DeviceIndex device = device_of_call(op, *stack);
  const c10::DeviceGuard guard(Device(kDevice, device));
  std::optional<DrawFrom> random;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) random.emplace(take_generator(op, *stack, device));
  at::native::cpu_fallback(op, stack);
  bring_results_home(op, stack, device);
}

// --------------------------------------------------------------------------------------------------- convolution

// torch sends convolutions of this device type to ops that exist to be overridden and that the CPU lacks. Theirs are
// the arguments of the CPU's ops, but for the backward, which also wants the sizes of the bias.
void convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  fallback(op, stack);
}

void convolution_backward(const c10::OperatorHandle&, Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  // grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups, output_mask
  const auto argument = [end = stack->end()](int index) -> const IValue& { return *(end - 10 + index); };
  const at::Tensor& weight = argument(2).toTensor();
  const std::int64_t channels = argument(6).toBool() ? weight.size(1) * argument(8).toInt() : weight.size(0);
  stack->insert(stack->end() - 7, IValue(std::vector<std::int64_t>{channels}));
  fallback(op, stack);
}

// ---------------------------------------------------------------------------------------------- recurrent networks

// torch expects fused cells of every device but the CPU, which lacks them. Here in ops that can be differentiated.

at::Tensor with_bias(const at::Tensor& gates, const std::optional<at::Tensor>& bias) {
  return bias && bias->defined() ? gates.add(*bias) : gates;
}

// i, f, g, o = gates; c' = sigmoid(f) c + sigmoid(i) tanh(g); h' = sigmoid(o) tanh(c')
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                         const at::Tensor& cx,
                                                         const std::optional<at::Tensor>& input_bias,
                                                         const std::optional<at::Tensor>& hidden_bias) {
  const at::Tensor gates = with_bias(input_gates, input_bias).add(with_bias(hidden_gates, hidden_bias));
  const auto parts = gates.chunk(4, 1);
  const at::Tensor cy = parts[1].sigmoid().mul(cx).add(parts[0].sigmoid().mul(parts[2].tanh()));
  return {parts[3].sigmoid().mul(cy.tanh()), cy, gates};
}

// r, z, n = gates; n' = tanh(n_input + sigmoid(r) n_hidden); h' = n' + sigmoid(z) (h - n')
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hx, const std::optional<at::Tensor>& input_bias,
                                            const std::optional<at::Tensor>& hidden_bias) {
  const auto input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const at::Tensor candidate = input[2].add(input[0].add(hidden[0]).sigmoid().mul(hidden[2])).tanh();
  return {candidate.add(input[1].add(hidden[1]).sigmoid().mul(hx.sub(candidate))), candidate};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// Many ops are written once, in their out= form, and torch makes the others of that: with one copy more than the
// fallback needs, and one name instead of the caller's in the counts. So the fallback takes all forms itself.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  constexpr auto kDerived = c10::DispatchKey::CompositeExplicitAutogradNonFunctional;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    if (name.getNamespace() == "aten" && op && op->hasKernelForDispatchKey(kDerived))
      m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

// For both keys: the cells are made of differentiable ops, with and without autograd.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_gru_cell", gru_cell);
}

// What Python needs beyond torch.accelerator.
TORCH_LIBRARY(ds_device, m) {
  m.def("default_generator(int device) -> Generator?", [](std::int64_t device) -> std::optional<at::Generator> {
    return default_generator(static_cast<DeviceIndex>(device));
  });
  m.def("fallback_counts() -> Dict(str, int)", [] { return counts().read(); });
  m.def("reset_fallback_counts() -> ()", [] { counts().reset(); });
}

}  // namespace ds_device
