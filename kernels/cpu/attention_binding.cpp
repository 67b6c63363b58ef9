// The ops of <ds_kernels/ops/attention.h> for tensors in host memory.
#include "attention_loops.h"

#include <atomic>

#include <ds_kernels/op_functions.h>
#include <ds_kernels/ops/attention.h>

#include "device.h"

namespace ds_kernels::cpu {

namespace {

// From this many queries of a head on torch's attention is faster. ds_plugin_sdk/integrations/transformers/attention.py has the
// same number.
constexpr int64_t kManyTokens = 8;
// Positions of one part, the same for any number of threads, so that results are too. A few heads of keys have smaller ones:
// threads share parts, and there are no other heads for them.
constexpr int64_t kPart = 512, kLeastPart = 64, kPartsOfFewHeads = 8;
int64_t part_of(const Attention& a) {
  if (a.batch * a.kv_heads >= kPartsOfFewHeads) return kPart;
  const int64_t part = (a.total / kPartsOfFewHeads + kLeastPart - 1) / kLeastPart * kLeastPart;
  return std::min(std::max(part, kLeastPart), kPart);
}
// What the loops hold of a query.
constexpr int64_t kMostHeadDim = 1024;

struct CacheAttention : Device {
  using Device::Device;

  bool takes(const AttentionCall& call) const {
    return call.work().tokens < kManyTokens && call.work().head_dim <= kMostHeadDim;
  }

  void run(const char* op, const Attention& a, Dtype dtype) const {
    const AttentionLoops& loops = loops_for<AttentionLoops>(op);
    const int64_t part = part_of(a);
    AttentionTask task{a, part, std::max<int64_t>(1, (a.total + part - 1) / part), nullptr};
    std::vector<float> partial(task.items() * task.partial_size());
    task.partial = partial.data();
    const int64_t queries = a.group() * a.tokens, work = queries * std::min(a.total, part) * a.head_dim;
    parallel_for(0, task.items(), grain_of(work),
                 [&](int64_t begin, int64_t end) { loops.attend(dtype, task, begin, end); });
    parallel_for(0, a.batch * a.kv_heads, grain_of(queries * task.parts * a.head_dim),
                 [&](int64_t begin, int64_t end) { loops.finish(dtype, task, begin, end); });
  }

  // Without a bias torch makes zeros of a query whose scores are NaN; with one it does not.
  Tensor attend_by_torch(AttentionCall& call) const {
    const Attention& a = call.work();
    const AttentionLoops& loops = loops_for<AttentionLoops>(call.op());
    parallel_for(0, a.batch * a.kv_heads, grain_of((a.total - a.past) * a.head_dim),
                 [&](int64_t begin, int64_t end) { loops.append(call.dtype(), a, begin, end); });
    if (call.needs_no_bias() && all_finite(loops, a, call.dtype())) return call.torch_attention({});
    return call.torch_attention(bias(loops, a, call.dtype()));
  }

  static bool all_finite(const AttentionLoops& loops, const Attention& a, Dtype dtype) {
    std::atomic<bool> finite{true};
    parallel_for(0, a.batch * a.kv_heads, grain_of(a.total * a.head_dim), [&](int64_t begin, int64_t end) {
      if (!loops.finite(dtype, a, begin, end)) finite = false;
    });
    return finite;
  }

  static Tensor bias(const AttentionLoops& loops, const Attention& a, Dtype dtype) {
    const bool masked = a.mask_kind != Mask::None;
    const int64_t batches = masked && a.mask_strides[0] ? a.batch : 1;
    const int64_t heads = a.alibi || (masked && a.mask_strides[1]) ? a.heads : 1;
    const int64_t shape[] = {batches, heads, a.tokens, a.total};
    Tensor bias = torch::stable::empty({shape, 4}, torch::headeronly::ScalarType::Float);
    auto* to = static_cast<float*>(bias.data_ptr());
    parallel_for(0, batches * heads * a.tokens, grain_of(a.total),
                 [&](int64_t begin, int64_t end) { loops.bias(dtype, a, heads, to, begin, end); });
    return bias;
  }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { AttentionOps<CacheAttention>::implement(m); }
DS_KERNELS_OP_FUNCTION(cached_attention, AttentionOps<CacheAttention>::cached_attention)
DS_KERNELS_OP_FUNCTION(cached_attention_int8, AttentionOps<CacheAttention>::cached_attention_int8)

}  // namespace ds_kernels::cpu
