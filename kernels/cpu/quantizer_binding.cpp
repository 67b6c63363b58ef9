// The ops of <ds_kernels/ops/quantizer.h> for tensors in host memory.
#include "quantizer_loops.h"

#include <ds_kernels/ops/quantizer.h>

#include "run.h"

namespace ds_kernels::cpu {

DS_KERNELS_CPU_LEVELS(QuantizerLoops, quantizer_loops)

namespace {

// Values that a thread is worth waking for.
constexpr int64_t kGrainValues = 1 << 15;

const QuantizerLoops& loops(const char* op) { return loops_for(op, all_quantizer_loops()); }

// Calls `body(group)` for every group, on torch's threads.
template <class Body>
void for_each_group(int64_t groups, int64_t size, const Body& body) {
  parallel_for(0, groups, kGrainValues / (size + 1) + 1, [&](int64_t first, int64_t last) {
    for (int64_t group = first; group < last; ++group) body(group);
  });
}

// Where group number `group` begins, of so many bytes each.
const char* at(const void* groups, int64_t group, int64_t bytes) {
  return static_cast<const char*>(groups) + group * bytes;
}
char* at(void* groups, int64_t group, int64_t bytes) { return static_cast<char*>(groups) + group * bytes; }

struct Quantizer : Host {
  using Host::Host;

  void quantize(const char* op, const QuantizeGroups& g, Dtype dtype) const {
    const QuantizeLoop loop = loops(op).quantize(dtype, g.as.bits, g.as.symmetric);
    const int64_t values = g.size * size_of(dtype), levels = g.size * g.as.bits / 8, params = g.as.symmetric ? 1 : 2;
    for_each_group(g.groups, g.size, [&](int64_t group) {
      const int64_t place = place_of(g.swizzle, group);
      loop(at(g.x, group, values), at(g.levels, place, levels), g.params + place * params, g.size);
    });
  }

  void dequantize(const char* op, const DequantizeGroups& g, Dtype dtype) const {
    const DequantizeLoop loop = loops(op).dequantize(dtype, g.as.bits, g.as.symmetric);
    const int64_t values = g.size * size_of(dtype), levels = g.size * g.as.bits / 8, params = g.as.symmetric ? 1 : 2;
    for_each_group(g.groups, g.size, [&](int64_t group) {
      loop(at(g.levels, group, levels), g.params + group * params, at(g.x, group, values), g.size);
    });
  }

  void reduce(const char* op, const ReduceGroups& g) const {
    const ReduceLoop loop = loops(op).reduce(g.as.bits, g.as.symmetric);
    const Received received{static_cast<const char*>(g.received), g.received_params, g.devices, g.groups * g.size,
                            g.received_size};
    const int64_t levels = g.size * g.as.bits / 8, params = g.as.symmetric ? 1 : 2;
    for_each_group(g.groups, g.size * g.devices, [&](int64_t group) {
      loop(received, group * g.size, (group + 1) * g.size, at(g.levels, group, levels), g.params + group * params);
    });
  }

  void dequantize_range(const char* op, const DequantizeRangeGroups& g, Dtype dtype) const {
    const DequantizeRangeLoop loop = loops(op).dequantize_range(dtype, g.bits);
    const int64_t one = size_of(dtype);
    for_each_group(g.groups, g.size, [&](int64_t group) {
      loop(at(g.levels, group, g.size * g.bits / 8), at(g.scale, group, one), at(g.minimum, group, one),
           at(g.x, group, g.size * one), g.size);
    });
  }

  void fake_quantize(const char* op, const FakeQuantizeGroups& g, Dtype dtype) const {
    const FakeQuantizeLoop loop = loops(op).fake_quantize(dtype, g.symmetric);
    for_each_group(g.groups, g.size, [&](int64_t group) {
      loop(at(g.x, group, g.size * size_of(dtype)), g.noise ? g.noise + group * g.size : nullptr, g.size, g.bits);
    });
  }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { QuantizerOps<Quantizer>::implement(m); }

}  // namespace ds_kernels::cpu
