// The ops of <ds_kernels/ops/attention.h> for tensors on CUDA devices.
#include "attention_launch.h"

#include <ds_kernels/ops/attention.h>

#include "device.h"
#include "new_tensors.h"

namespace ds_kernels::cuda {
namespace {

// From this many queries of a head on torch's attention is faster.
constexpr int64_t kManyTokens = 8;

struct CacheAttention : Device {
  using Device::Device;

  bool takes(const Attention& a) const { return a.tokens < kManyTokens && a.head_dim <= kMostHeadDim; }

  void attend(const char* op, const Attention& attention, Dtype dtype) const {
    const Room partial(*this, attention_partial(attention));
    launch_attention(op, attention, partial.data(), dtype, stream());
  }

  // What torch's attention makes of queries that may attend to nothing differs between its kernels: masks go to the
  // op's reference, in torch's matrix products.
  Tensor attend_by_torch(AttentionCall& call) const {
    if (!call.needs_no_bias()) return call.reference();
    call.append();
    return call.torch_attention({});
  }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { AttentionOps<CacheAttention>::implement(m); }

}  // namespace ds_kernels::cuda
