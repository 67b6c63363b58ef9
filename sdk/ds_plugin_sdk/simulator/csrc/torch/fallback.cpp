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
      : lock_(mutex()), device_(impl(device)), cpu_(impl(at::detail::getDefaultCPUGenerator())), saved_(cpu_->clone()) {
    move(*device_, *cpu_);
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
    to.set_engine(from.engine());
    to.set_next_float_normal_sample(from.next_float_normal_sample());
    to.set_next_double_normal_sample(from.next_double_normal_sample());
  }

  std::lock_guard<std::mutex> lock_;
  at::CPUGeneratorImpl *device_, *cpu_;
  std::shared_ptr<at::CPUGeneratorImpl> saved_;
};

// The generator named in the arguments, taken out of them, or the device's default one.
at::Generator take_generator(Stack& stack, std::size_t arguments, DeviceIndex device) {
  for (auto value = stack.end() - static_cast<std::ptrdiff_t>(arguments); value != stack.end(); ++value) {
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

std::optional<DeviceIndex> device_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone() ? std::optional(tensor.device().index()) : std::nullopt;
}

std::optional<DeviceIndex> device_of(const IValue& value) {
  if (value.isTensor()) return device_of(value.toTensor());
  if (value.isDevice() && value.toDevice().type() == kDevice && value.toDevice().has_index())
    return value.toDevice().index();
  if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector())
      if (auto device = device_of(tensor)) return device;
  return std::nullopt;
}

DeviceIndex device_of_call(const Stack& stack, std::size_t arguments) {
  for (auto value = stack.end() - static_cast<std::ptrdiff_t>(arguments); value != stack.end(); ++value)
    if (auto device = device_of(*value)) return *device;
  return static_cast<DeviceIndex>(runtime::current_device());
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  counts().add(op.operator_name());
  const std::size_t arguments = op.schema().arguments().size();
  const DeviceIndex device = device_of_call(*stack, arguments);
  const c10::DeviceGuard guard(Device(kDevice, device));
  std::optional<DrawFrom> random;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) random.emplace(take_generator(*stack, arguments, device));
  at::native::cpu_fallback(op, stack);
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

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
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
