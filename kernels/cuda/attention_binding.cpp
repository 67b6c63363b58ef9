// The ops of <ds_kernels/ops/attention.h> for tensors on CUDA devices.
#include <ds_kernels/ops/attention.h>

#include "attention_bias.h"
#include "device.h"

namespace ds_kernels::cuda {
namespace {

// From this many queries of a head on torch's attention is faster.
constexpr int64_t kManyTokens = 8;
// Some of torch's kernels have a row of the grid for each head of each batch row, of which a launch can have no more.
constexpr int64_t kMostRowsOfTorch = 65535;

struct CacheAttention : Device {
  using Device::Device;

  // Without tensor cores torch's attention is faster, where it needs nothing but what the caches hold.
  bool takes(const AttentionCall& call) const {
    const Attention& a = call.work();
    const bool by_torch = call.dtype() != Dtype::Float32 && !call.is_quantized() && call.needs_no_bias() &&
                          !fits_mma(a, call.dtype()) && a.batch * a.heads <= kMostRowsOfTorch;
    return a.tokens < kManyTokens && a.head_dim <= kMostHeadDim && !by_torch;
  }

  // torch's attention with a bias takes that in the query's dtype alone: where it would lose digits of a mask or of
  // alibi's slopes, the op's reference attends, in torch's matrix products.
  Tensor attend_by_torch(AttentionCall& call) const {
    const Attention& a = call.work();
    if (call.is_quantized() && a.head_dim > kMostHeadDim) return call.reference();
    if (a.batch * a.heads > kMostRowsOfTorch) return call.reference();
    if (call.needs_no_bias()) {
      append(call);
      return call.torch_attention({});
    }
    if (a.alibi || (a.mask_kind == Mask::Float && call.dtype() != Dtype::Float32)) return call.reference();
    append(call);
    AttentionBias bias = attention_bias(a);
    const int64_t shape[] = {bias.batches, bias.heads, a.tokens, bias.stride};
    const Tensor memory = call.new_like_query({shape, 4});
    const Tensor sees = call.new_floats(bias.batches * bias.heads * a.tokens);
    bias.data = memory.data_ptr();
    bias.sees = static_cast<float*>(sees.data_ptr());
    run(call.op(), bias, call.dtype());
    const Tensor output = call.torch_attention(torch::stable::narrow(const_cast<Tensor&>(memory), 3, 0, a.total), true);
    bias.attention.output = output.data_ptr();
    run(call.op(), AttentionZeros{bias}, call.dtype());
    return output;
  }

  void append(AttentionCall& call) const {
    if (!call.is_quantized()) return call.append();
    run(call.op(), AttentionAppend{call.work()}, call.dtype());
  }
};

}  // namespace

DS_KERNELS_IMPL(DS_KERNELS_CUDA_KEY, m) { AttentionOps<CacheAttention>::implement(m); }

}  // namespace ds_kernels::cuda
