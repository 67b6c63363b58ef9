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

// Where an op has a generator among its arguments; null where it has none.
IValue* generator_of(const c10::OperatorHandle& op, Stack& stack) {
  static const auto type = c10::OptionalType::create(c10::GeneratorType::get());
  auto value = stack.end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  for (const c10::Argument& argument : op.schema().arguments()) {
    if (argument.type()->isSubtypeOf(*type)) return &*value;
    ++value;
  }
  return nullptr;
}

// The generator that an argument names, or the device's default one.
at::Generator named_generator(const IValue& argument, DeviceIndex device) {
  if (!argument.isGenerator()) return default_generator(device);
  const at::Generator generator = argument.toGenerator();
  TORCH_CHECK(generator.device().type() == kDevice, "expected a generator of ", Device(kDevice, device), ", not of ",
              generator.device());
  return generator;
}

// While it lives, the CPU draws for one call from a device's generator: by a generator of its own with that one's state,
// which takes the place of the argument. One call at a time.
//
// For an op without such an argument the state stands in for that of the CPU's default generator, which comes back
// afterwards as it was: who draws on the CPU in another thread meanwhile takes part in it. torch has few.
class DrawFrom {
 public:
  DrawFrom(const c10::OperatorHandle& op, Stack& stack, DeviceIndex device) : lock_(mutex()) {
    IValue* argument = generator_of(op, stack);
    generator_ = argument ? named_generator(*argument, device) : default_generator(device);
    drawing_ = argument ? at::detail::createCPUGenerator() : at::detail::getDefaultCPUGenerator();
    if (!argument) saved_ = drawing_.clone();
    move(generator_, drawing_);
    if (argument) *argument = IValue(drawing_);
  }
  DrawFrom(const DrawFrom&) = delete;
  DrawFrom& operator=(const DrawFrom&) = delete;
  ~DrawFrom() {
    move(drawing_, generator_);
    if (saved_.defined()) move(saved_, drawing_);
  }

 private:
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static at::CPUGeneratorImpl* impl(const at::Generator& generator) {
    return static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
  }
  static void move(const at::Generator& from, const at::Generator& to) {
    const std::scoped_lock lock(impl(from)->mutex_, impl(to)->mutex_);
    auto *source = impl(from), *target = impl(to);
    target->set_engine(source->engine());
    target->set_next_float_normal_sample(source->next_float_normal_sample());
    target->set_next_double_normal_sample(source->next_double_normal_sample());
  }

  std::lock_guard<std::mutex> lock_;
  at::Generator generator_, drawing_, saved_;
};

// aten::native_dropout has no argument for a generator: the mask is drawn by an op that has.
void dropout(Stack* stack) {
  const bool is_training = torch::jit::pop(*stack).toOptional<bool>().value_or(true);
  const double kept = 1 - torch::jit::pop(*stack).toDouble();
  const at::Tensor input = torch::jit::pop(*stack).toTensor();
  const at::Tensor mask = input.new_ones(input.sizes(), input.options().dtype(at::kBool));
  const at::Tensor output =
      is_training ? input.mul(mask.bernoulli_(kept)).mul_(kept == 0 ? 0. : 1. / kept) : input.clone();
  torch::jit::push(*stack, output, mask);
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
  if (op.operator_name().name == "aten::native_dropout") return dropout(stack);
  std::optional<DrawFrom> random;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) random.emplace(op, *stack, device);
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
