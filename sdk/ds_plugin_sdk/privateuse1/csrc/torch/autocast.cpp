// Autocast: which ops compute in the low-precision type, which in float32, which in the widest type of their inputs.
//
// One boxed kernel a policy; torch's own templates would take longer to compile than all other files together.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <functional>

#include "device.h"

// Declared in ATen/autocast_mode.h, which includes all of ATen's ops.
namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
}  // namespace at::autocast

namespace ds_device {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

enum class Policy { LowPrecision, Float32, Widest };

void for_each_argument(const c10::OperatorHandle& op, Stack& stack,
                       const std::function<void(const std::string&, IValue&)>& function) {
  const auto& arguments = op.schema().arguments();
  const std::size_t first = stack.size() - arguments.size();
  for (std::size_t i = 0; i < arguments.size(); ++i) function(arguments[i].name(), stack[first + i]);
}

// Replaces the tensors in a value by what `function` makes of them.
void map_tensors(IValue& value, const std::function<Tensor(const Tensor&)>& function) {
  if (value.isTensor() && value.toTensor().defined()) {
    value = function(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) mapped.push_back(function(tensor));
    value = std::move(mapped);
  }
}

// softmax(x, dtype=...) and its like: the caller has said what to compute in.
bool names_dtype(const c10::OperatorHandle& op, Stack& stack) {
  bool named = false;
  for_each_argument(op, stack, [&](const std::string& name, const IValue& value) {
    named = named || (name == "dtype" && !value.isNone());
  });
  return named;
}

c10::ScalarType widest(const c10::OperatorHandle& op, Stack& stack) {
  c10::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  for_each_argument(op, stack, [&](const std::string&, IValue& value) {
    map_tensors(value, [&](const Tensor& tensor) {
      if (tensor.is_privateuseone() && tensor.scalar_type() == at::kFloat) dtype = at::kFloat;
      return tensor;
    });
  });
  return dtype;
}

void cast_and_call(Policy policy, const c10::OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  if (policy != Policy::Float32 || !names_dtype(op, *stack)) {
    const c10::ScalarType dtype = policy == Policy::Float32 ? at::kFloat
                                  : policy == Policy::Widest ? widest(op, *stack)
                                                             : at::autocast::get_autocast_dtype(kDevice);
    for_each_argument(op, *stack, [&](const std::string&, IValue& value) {
      map_tensors(value, [&](const Tensor& tensor) { return at::autocast::cached_cast(dtype, tensor, kDevice); });
    });
  }
  op.callBoxed(stack);
}

template <Policy policy>
void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
  cast_and_call(policy, op, stack);
}

template <Policy policy>
void register_ops(torch::Library& library, std::initializer_list<const char*> names) {
  for (const char* name : names)
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&kernel<policy>>());
}

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// The lists are those of torch's documentation of autocast for accelerators.
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  register_ops<Policy::LowPrecision>(
      m, {"_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d.input",
          "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv",
          "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
          "scaled_dot_product_attention"});
  register_ops<Policy::Float32>(
      m, {"acos", "asin", "cosh", "sinh", "tan", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt",
          "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
          "rms_norm", "group_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss",
          "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss",
          "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
          "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
          "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList",
          "norm.Scalar", "norm.ScalarOpt_dim"});
  register_ops<Policy::Widest>(m, {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler",
                                   "index_put", "index_copy", "tensordot", "scatter_add", "stack", "cat"});
}

}  // namespace ds_device
