// Loops of random layerwise token dropping. Compiled once per instruction-set level, without torch.
#include <ds_kernels/config.h>

#include "random_ltd_loops.h"

namespace ds_kernels::cpu {
namespace {

bool within(const int32_t* indices, int64_t count, int64_t limit) {
  bool all = true;
  for (int64_t i = 0; i < count; ++i) all &= indices[i] >= 0 && indices[i] < limit;
  return all;
}

// By counting: each index is a token of the sequence, so there is nothing to compare.
void sort(int32_t* indices, int64_t count, int32_t* seen, int64_t seq_len) {
  for (int64_t i = 0; i < count; ++i) ++seen[indices[i]];
  for (int64_t token = 0; token < seq_len; ++token) {
    for (; seen[token] > 0; --seen[token]) *indices++ = static_cast<int32_t>(token);
  }
}

char* place(const Tokens& tokens, int64_t sequence, int64_t token) {
  return tokens.data + sequence * tokens.sequence + token * tokens.token;
}

void gather(const TokenMove& m, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const int64_t sequence = i / m.reserved, token = i % m.reserved;
    __builtin_memcpy(place(m.chosen, sequence, token), place(m.all, sequence, m.indices[i]), m.bytes);
  }
}

void scatter(const TokenMove& m, int64_t sequence, int64_t begin, int64_t end) {
  for (int64_t token = 0; token < m.reserved; ++token) {
    const int32_t index = m.indices[sequence * m.reserved + token];
    __builtin_memcpy(place(m.all, sequence, index) + begin, place(m.chosen, sequence, token) + begin, end - begin);
  }
}

template <class Element>
struct GatherMask {
  static void run(const MaskGather& g, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t sequence = row / g.reserved;  // of layers * batch
      const int32_t* indices = g.indices + sequence * g.reserved;
      const int64_t token = (sequence % g.batch) * g.sequence + g.indices[row];
      const auto* from = reinterpret_cast<const Element*>(g.mask) + token * g.sequence;
      auto* to = reinterpret_cast<Element*>(g.output) + row * g.reserved;
      for (int64_t i = 0; i < g.reserved; ++i) to[i] = from[indices[i]];
    }
  }
};

void (*mask(int64_t element_size))(const MaskGather&, int64_t, int64_t) {
  switch (element_size) {
    case 1: return GatherMask<uint8_t>::run;
    case 2: return GatherMask<uint16_t>::run;
    case 4: return GatherMask<uint32_t>::run;
    case 8: return GatherMask<uint64_t>::run;
    default: return nullptr;
  }
}

}  // namespace

inline namespace DS_KERNELS_CPU_LEVEL {
extern const RandomLTDLoops random_ltd_loops{within, sort, gather, scatter, mask};
}

}  // namespace ds_kernels::cpu
