// Loops of random layerwise token dropping. Compiled once per instruction-set level, without torch.
#include <ds_kernels/random_ltd.h>

#include "loops.h"

namespace ds_kernels::cpu {
namespace {

// Things of `bytes` bytes each that make a share worth waking a thread for.
int64_t grain_of_bytes(int64_t bytes) { return grain_of(bytes / 4); }

// By counting: each index is a token of the sequence, so there is nothing to compare. `seen` has a zero for each token,
// before and after.
void sort(const int32_t* from, int32_t* to, int64_t count, int32_t* seen, int64_t sequence) {
  for (int64_t i = 0; i < count; ++i) ++seen[from[i]];
  for (int64_t token = 0; token < sequence; ++token) {
    for (; seen[token] > 0; --seen[token]) *to++ = static_cast<int32_t>(token);
  }
}

// By comparing, for sequences that are much longer than the rows: a heap of the rest, the largest first.
void sort(const int32_t* from, int32_t* to, int64_t count) {
  const auto sink = [to](int64_t parent, int64_t end) {
    for (int64_t child; (child = 2 * parent + 1) < end; parent = child) {
      if (child + 1 < end && to[child] < to[child + 1]) ++child;
      if (to[parent] >= to[child]) return;
      const int32_t token = to[parent];
      to[parent] = to[child];
      to[child] = token;
    }
  };
  for (int64_t i = 0; i < count; ++i) to[i] = from[i];
  for (int64_t i = count / 2; i-- > 0;) sink(i, count);
  for (int64_t end = count; end-- > 1;) {
    const int32_t token = to[0];
    to[0] = to[end];
    to[end] = token;
    sink(0, end);
  }
}

char* place(const Tokens& tokens, int64_t sequence, int64_t token) {
  return tokens.data + sequence * tokens.sequence + token * tokens.token;
}

// Tokens [first, last) of batch * reserved.
void gather(const TokenMove& m, int64_t first, int64_t last) {
  for (int64_t i = first; i < last; ++i) {
    const int64_t sequence = i / m.reserved, token = i % m.reserved;
    __builtin_memcpy(place(m.chosen, sequence, token), place(m.all, sequence, m.indices[i]), m.bytes);
  }
}

// Bytes [begin, end) of each chosen token of one sequence, in the order of the indices.
void scatter(const TokenMove& m, int64_t sequence, int64_t begin, int64_t end) {
  for (int64_t token = 0; token < m.reserved; ++token) {
    const int32_t index = m.indices[sequence * m.reserved + token];
    __builtin_memcpy(place(m.all, sequence, index) + begin, place(m.chosen, sequence, token) + begin, end - begin);
  }
}

// Rows [first, last) of layers * batch * reserved.
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

auto mask_loop(int64_t element_size) {
  switch (element_size) {
    case 1: return GatherMask<uint8_t>::run;
    case 2: return GatherMask<uint16_t>::run;
    case 4: return GatherMask<uint32_t>::run;
    default: return GatherMask<uint64_t>::run;
  }
}

}  // namespace

template <>
void compute(const TokenCheck& check, Dtype, const Threads&) {
  bool all = true;
  for (int64_t i = 0; i < check.count; ++i) all &= check.indices[i] >= 0 && check.indices[i] < check.sequence;
  *check.within = all;
}

template <>
void compute(const TokenRows& r, Dtype, const Threads& threads) {
  const int64_t counters = r.sequence / 64 <= r.reserved ? r.sequence : 0;
  share_with_scratch<int32_t>(
      threads, r.rows, grain_of_bytes(4 * (counters + r.reserved)), counters,
      [&](int64_t first, int64_t last, int32_t* seen) {
        for (int64_t row = first; row < last; ++row) {
          const int32_t* from = r.from + row * r.reserved;
          int32_t* to = r.to + row * r.reserved;
          if (counters > 0) {
            sort(from, to, r.reserved, seen, r.sequence);
          } else {
            sort(from, to, r.reserved);
          }
        }
      });
}

template <>
void compute(const TokenGather& g, Dtype, const Threads& threads) {
  share(threads, g.batch * g.reserved, grain_of_bytes(g.bytes),
        [&](int64_t first, int64_t last) { gather(g, first, last); });
}

// Shares are columns of one sequence: where an index repeats, one thread writes both, and the last one wins.
template <>
void compute(const TokenScatter& s, Dtype, const Threads& threads) {
  const int64_t columns = s.bytes < 1024 ? 1 : s.bytes / 512, width = (s.bytes + columns - 1) / columns;
  const auto least = [&](int64_t byte) { return byte < s.bytes ? byte : s.bytes; };
  share(threads, s.batch * columns, grain_of_bytes(width * s.reserved), [&](int64_t first, int64_t last) {
    for (int64_t sequence = first / columns; first < last; ++sequence) {
      const int64_t next = (sequence + 1) * columns, stop = last < next ? last : next;
      scatter(s, sequence, least((first - sequence * columns) * width), least((stop - sequence * columns) * width));
      first = stop;
    }
  });
}

template <>
void compute(const MaskGather& g, Dtype, const Threads& threads) {
  const auto loop = mask_loop(g.element_size);
  share(threads, g.layers * g.batch * g.reserved, grain_of_bytes(g.reserved * g.element_size),
        [&](int64_t first, int64_t last) { loop(g, first, last); });
}

}  // namespace ds_kernels::cpu
