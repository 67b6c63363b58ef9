// Loops of attention over a cache. Compiled once per instruction-set level, without torch.
#include "attention_loops.h"

#include "loops.h"

namespace ds_kernels::cpu {
namespace {

// `Cached`: the elements of the caches, `Element` or int8_t.
template <class Element, class Cached>
struct AttentionOf {
  static constexpr bool kQuantized = std::is_same_v<Cached, int8_t>;

  static Cached* key_cache(const Attention& task, int64_t b, int64_t h, int64_t position) {
    return static_cast<Cached*>(task.key_cache) + task.key_cache_strides.at(b, h, position);
  }
  static Cached* value_cache(const Attention& task, int64_t b, int64_t h, int64_t position) {
    return static_cast<Cached*>(task.value_cache) + task.value_cache_strides.at(b, h, position);
  }
  static float* key_scale(const Attention& task, int64_t b, int64_t h, int64_t position) {
    return kQuantized ? task.key_scales + task.key_scales_strides.at(b, h, position) : nullptr;
  }
  static float* value_scale(const Attention& task, int64_t b, int64_t h, int64_t position) {
    return kQuantized ? task.value_scales + task.value_scales_strides.at(b, h, position) : nullptr;
  }

  // Appends those of the new tokens whose positions are in [begin, end).
  static void append(const Attention& task, int64_t b, int64_t h, int64_t begin, int64_t end) {
    for (int64_t t = begin > task.past ? begin - task.past : 0; t < end - task.past; ++t) {
      const int64_t position = task.past + t;
      keep(static_cast<const Element*>(task.key) + task.key_strides.at(b, h, t), task.head_dim,
           key_cache(task, b, h, position), key_scale(task, b, h, position));
      keep(static_cast<const Element*>(task.value) + task.value_strides.at(b, h, t), task.head_dim,
           value_cache(task, b, h, position), value_scale(task, b, h, position));
    }
  }

  static void keep(const Element* row, int64_t head_dim, Cached* to, float* scale) {
    if constexpr (kQuantized) {
      ds_kernels::Range<true> range;
      for_each_vector(head_dim, [&](int64_t i, auto memory) { range.include(memory.load(row + i), memory); });
      const float largest = range.high();
      const Quantization q = row_quantization(largest);
      *scale = largest / 127;
      for_each_vector(head_dim, [&](int64_t i, auto memory) {
        store_levels<8>(to, i, quantized(memory.load(row + i), q), memory);
      });
    } else {
      __builtin_memcpy(to, row, head_dim * sizeof(Element));
    }
  }

  // Adds to the scores of positions [first, first + count) what one query adds there.
  template <class Bias>
  static void add_mask(const Attention& task, float* scores, int64_t offset, int64_t first, int64_t count) {
    const auto* mask = static_cast<const Bias*>(task.mask) + offset + first * task.mask_strides[3];
    if (task.mask_strides[3] == 1) {
      for_each_vector(count, [=](int64_t p, auto memory) {
        memory.store(scores + p, memory.load(scores + p) + memory.load(mask + p));
      });
    } else {
      // All positions have one value.
      float value[kLanes];
      store(value, load_one(mask));
      for (int64_t p = 0; p < count; ++p) scores[p] += value[0];
    }
  }

  template <class Bias>
  static Floats load_one(const Bias* from) {
    return PartVector{1}.load(from);
  }

  static void add_bias(const Attention& task, float* scores, int64_t b, int64_t h, int64_t t, int64_t first,
                       int64_t count) {
    const Range allowed = range(task, t);
    if (task.alibi) {
      // From the last position that counts: a row's softmax does not see the difference, and small biases are exact.
      for (int64_t p = 0; p < count; ++p) scores[p] += task.alibi[h] * static_cast<float>(first + p - allowed.end + 1);
    }
    const int64_t offset = b * task.mask_strides[0] + h * task.mask_strides[1] + t * task.mask_strides[2];
    switch (task.mask_kind) {
      case Mask::Bool: {
        const auto* mask = static_cast<const uint8_t*>(task.mask) + offset;
        for (int64_t p = 0; p < count; ++p) {
          if (!mask[(first + p) * task.mask_strides[3]]) scores[p] = kNever;
        }
        break;
      }
      case Mask::Float: add_mask<float>(task, scores, offset, first, count); break;
      case Mask::Element: add_mask<Element>(task, scores, offset, first, count); break;
      default: break;
    }
    for (int64_t p = 0; p < count && first + p < allowed.begin; ++p) scores[p] = kNever;
    for (int64_t p = count; p-- > 0 && first + p >= allowed.end;) scores[p] = kNever;
  }

  struct Range {
    int64_t begin, end;
  };

  // The positions that causality and window leave to a token's query.
  static Range range(const Attention& task, int64_t t) {
    const int64_t own = task.total - task.tokens + t;
    return {task.window && own - task.window + 1 > 0 ? own - task.window + 1 : 0, task.causal ? own + 1 : task.total};
  }

  // An item of a task: a part of the positions of one key's head, and the keys that are read after it.
  struct Item {
    int64_t b, kv, begin, end;
    const Cached* next_keys = nullptr;

    Item(const AttentionTask& task, int64_t item) {
      const int64_t row = item / task.parts, part = item % task.parts;
      b = row / task.kv_heads;
      kv = row % task.kv_heads;
      begin = part * task.part;
      end = part + 1 == task.parts ? task.total : begin + task.part;
    }
  };

  // Items [first, last), each for all queries of its key's group.
  static void attend(const AttentionTask& task, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const Item next(task, i + 1 < last ? i + 1 : i);
      Item item(task, i);
      item.next_keys = key_cache(task, next.b, next.kv, next.begin);
      attend(task, item, task.partial + i * task.partial_size());
    }
  }

  static void attend(const AttentionTask& task, const Item& item, float* partial) {
    append(task, item.b, item.kv, item.begin, item.end);  // new tokens may lie in several parts, attended to at the same time
    const int64_t group = task.group();
    int64_t g = 0;
    for (; g + 4 <= group; g += 4) attend<4>(task, item, g, partial);
    if (g + 2 <= group) {
      attend<2>(task, item, g, partial);
      g += 2;
    }
    if (g < group) attend<1>(task, item, g, partial);
  }

  // Queries of some heads of a group from `g` on, one of each at a time.
  template <int queries>
  static void attend(const AttentionTask& task, const Item& item, int64_t g, float* partial) {
    const int64_t head_dim = task.head_dim;
    for (int64_t t = 0; t < task.tokens; ++t) {
      float* to[queries];
      Running running[queries];
      for (int q = 0; q < queries; ++q) {
        to[q] = partial + ((g + q) * task.tokens + t) * (2 + head_dim);
        running[q] = {kNever, 0, to[q] + 2};
        for (int64_t i = 0; i < head_dim; ++i) running[q].result[i] = 0;
      }
      attend<queries>(task, item, item.kv * task.group() + g, t, running);
      for (int q = 0; q < queries; ++q) {
        to[q][0] = running[q].top;
        to[q][1] = running[q].sum;
      }
    }
  }

  // Queries of one token, of heads from `h` on.
  template <int queries>
  static void attend(const Attention& task, const Item& item, int64_t h, int64_t t,
                     Running (&running)[queries]) {
    constexpr int64_t kHeadDim = 1024;  // the binding sees to it
    const int64_t head_dim = task.head_dim, b = item.b, kv = item.kv;
    float query[queries][kHeadDim], scores[queries][kPositions];
    const float* of_query[queries];
    float* of_scores[queries];
    Weighted<queries> by;
    for (int q = 0; q < queries; ++q) {
      const auto* from = static_cast<const Element*>(task.query) + task.query_strides.at(b, h + q, t);
      for_each_vector(head_dim, [&](int64_t i, auto memory) {
        memory.store(query[q] + i, memory.load(from + i) * task.scale);
      });
      of_query[q] = query[q];
      by.weights[q] = of_scores[q] = scores[q];
      by.result[q] = running[q].result;
    }
    const Range allowed = range(task, t);
    const int64_t begin = item.begin > allowed.begin ? item.begin : allowed.begin;
    const int64_t end = item.end < allowed.end ? item.end : allowed.end;
    // Blocks of about one size: the last rows of one fetch the first of the next.
    const int64_t blocks = (end - begin + kPositions - 1) / kPositions;
    const int64_t least = blocks > 1 ? (end - begin + blocks - 1) / blocks : kPositions;
    const int64_t block = (least + kLanes - 1) / kLanes * kLanes;
    static_assert(kPositions % kLanes == 0);
    const int64_t key_stride = task.key_cache_strides.token, value_stride = task.value_cache_strides.token;
    for (int64_t first = begin; first < end; first += block) {
      const int64_t count = end - first < block ? end - first : block;
      const Cached* first_value = value_cache(task, b, kv, first);
      const Cached* later_key = first + block < end ? key_cache(task, b, kv, first + block) : item.next_keys;
      const CacheRows<Cached> keys(key_cache(task, b, kv, first), key_stride, count, first_value, value_stride, head_dim);
      const CacheRows<Cached> values(first_value, value_stride, count, later_key, key_stride, head_dim);
      score(of_query, keys, head_dim, of_scores);
      for (int q = 0; q < queries; ++q) {
        if constexpr (kQuantized) {
          multiply(scores[q], key_scale(task, b, kv, first), task.key_scales_strides.token, count);
        }
        add_bias(task, scores[q], b, h + q, t, first, count);
        by.faded[q] = weigh(running[q], scores[q], count);
        if constexpr (kQuantized) {
          multiply(scores[q], value_scale(task, b, kv, first), task.value_scales_strides.token, count);
        }
      }
      add_values(by, values, head_dim);
    }
  }

  static void finish(const AttentionTask& task, int64_t b, int64_t kv) {
    const int64_t head_dim = task.head_dim, group = task.group(), size = task.partial_size();
    float* first = task.partial + (b * task.kv_heads + kv) * task.parts * size;
    for (int64_t g = 0; g < group; ++g) {
      for (int64_t t = 0; t < task.tokens; ++t) {
        float* at = first + (g * task.tokens + t) * (2 + head_dim);
        Running running{at[0], at[1], at + 2};
        for (int64_t part = 1; part < task.parts; ++part) {
          float* other = at + part * size;
          merge(running, {other[0], other[1], other + 2}, head_dim);
        }
        const float scale = running.sum == 0 ? 1.f : 1.f / running.sum;
        auto* output = static_cast<Element*>(task.output) +
                       ((b * task.tokens + t) * task.heads + kv * group + g) * head_dim;
        for_each_vector(head_dim, [&](int64_t i, auto memory) {
          memory.store(output + i, memory.load(running.result + i) * scale);
        });
      }
    }
  }

  static bool finite(const Attention& task, int64_t b, int64_t kv) {
    Floats sums{};  // 0 x is NaN where x is not finite
    const auto add = [&](int64_t count, const auto* from) {
      for_each_vector(count, [&](int64_t i, auto memory) { sums += 0.f * memory.load(from + i); });
    };
    for (int64_t t = 0; t < task.tokens; ++t) {
      for (int64_t g = 0; g < task.group(); ++g) {
        const int64_t head = kv * task.group() + g;
        add(task.head_dim, static_cast<const Element*>(task.query) + task.query_strides.at(b, head, t));
      }
    }
    for (int64_t p = 0; p < task.total; ++p) {
      if constexpr (kQuantized) {
        add(1, key_scale(task, b, kv, p));
      } else {
        add(task.head_dim, key_cache(task, b, kv, p));
      }
    }
    const float sum = sum_of(sums);
    return sum == sum;
  }

  static void bias(const Attention& task, int64_t heads, float* to, int64_t row) {
    const int64_t t = row % task.tokens, h = row / task.tokens % heads, b = row / task.tokens / heads;
    auto* target = to + row * task.total;
    for (int64_t first = 0; first < task.total; first += kPositions) {
      const int64_t count = task.total - first < kPositions ? task.total - first : kPositions;
      for (int64_t p = 0; p < count; ++p) target[first + p] = 0;
      add_bias(task, target + first, b, h, t, first, count);
    }
  }
};

// Calls `body(AttentionOf<Element, Cached>{})` for elements of `dtype`, and the task's caches.
template <class Body>
void for_elements(Dtype dtype, const Attention& task, Body body) {
  const auto with = [&](auto element) {
    using Element = decltype(element);
    if (task.key_scales) return body(AttentionOf<Element, int8_t>{});
    return body(AttentionOf<Element, Element>{});
  };
  switch (dtype) {
    case Dtype::BFloat16: return with(BFloat16{});
    case Dtype::Float16: return with(Float16{});
    default: return with(float{});
  }
}

void attend(Dtype dtype, const AttentionTask& task, int64_t begin, int64_t end) {
  for_elements(dtype, task, [&](auto attention) { attention.attend(task, begin, end); });
}

void finish(Dtype dtype, const AttentionTask& task, int64_t begin, int64_t end) {
  for_elements(dtype, task, [&](auto attention) {
    for (int64_t row = begin; row < end; ++row) attention.finish(task, row / task.kv_heads, row % task.kv_heads);
  });
}

void append(Dtype dtype, const Attention& task, int64_t begin, int64_t end) {
  for_elements(dtype, task, [&](auto attention) {
    for (int64_t row = begin; row < end; ++row) {
      attention.append(task, row / task.kv_heads, row % task.kv_heads, 0, task.total);
    }
  });
}

bool finite(Dtype dtype, const Attention& task, int64_t begin, int64_t end) {
  bool result = true;
  for_elements(dtype, task, [&](auto attention) {
    for (int64_t row = begin; row < end && result; ++row) {
      result = attention.finite(task, row / task.kv_heads, row % task.kv_heads);
    }
  });
  return result;
}

void bias(Dtype dtype, const Attention& task, int64_t heads, float* to, int64_t begin, int64_t end) {
  for_elements(dtype, task, [&](auto attention) {
    for (int64_t row = begin; row < end; ++row) attention.bias(task, heads, to, row);
  });
}

}  // namespace

template <>
const AttentionLoops& loops() {
  static constexpr AttentionLoops all{attend, finish, append, finite, bias};
  return all;
}

}  // namespace ds_kernels::cpu
