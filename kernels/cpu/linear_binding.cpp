// The ops of <ds_kernels/ops/linear.h> for tensors in host memory.
#include "linear_loops.h"

#include <ds_kernels/op_functions.h>
#include <ds_kernels/ops/linear.h>

#include <atomic>
#include <memory>
#include <new>

#include "amx.h"
#include "device.h"

namespace ds_kernels::cpu {

namespace {

// From this many inputs on torch's product is faster: for bfloat16 weights sooner where the CPU is fast at their products; later
// where it is slow at 16-bit floats, for then theirs is one of floats. Tiles of weights are faster however many inputs there are:
// without AMX those of quantized weights, and of 16-bit floats where the CPU is slow at these.
constexpr int64_t kManyInputs = 24;
constexpr int64_t kManyInputsOfFast = 8;
constexpr int64_t kManyInputsToWiden = 128;
// In float32 on AMD's CPUs without AVX-512: tiles are up to 1.5 times as fast until then.
constexpr int64_t kManyInputsOnAmd = 256;  // ds_plugin_sdk/ops/_products.py has these numbers too
// Of fewer outputs torch's product is as fast on Zen 5, too: a tile has 32.
constexpr int64_t kLeastOutputs = 8;
// Inputs in bfloat16 by AMX: from this many on. With weights in bfloat16 there is a most, too, beyond which torch's product is as
// fast; ds_plugin_sdk/ops/_products.py has it.
constexpr int64_t kInputsByAmx = 16, kInputsByAmxOfPlain = 5, kMostInputsByAmxOfPlain = kFewAmxInputs;
// How much of the weights is widened at a time for that product: what then still is in the second cache, or near it.
constexpr int64_t kBlockBytes = 2 << 20;
constexpr int64_t kLeastBlock = 64;
// Outputs of one share: at least a few cache lines of them.
constexpr int64_t kShare = 16;
// Inputs at a time: what is made of them takes up to six bytes for each element.
constexpr int64_t kMostInputs = 4 * kMostTileInputs;

#if defined(__x86_64__)
// Of the CPU's features, those in EDX of leaf 7: GCC before 11 cannot be asked for them by name.
bool has_feature(int bit) {
  static const unsigned features = [] {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) ? d : 0u;
  }();
  return features >> bit & 1;
}
// Whether it has instructions for products of 16-bit floats.
bool multiplies(Dtype dtype) {
  static const bool bfloat16 = has_amx() || has_avx512_bf16();
  return dtype == Dtype::BFloat16 ? bfloat16 : has_feature(23);
}
// Whether these are as fast as those of floats. With AVX512-BF16 alone Intel's take twice as long, AMD's half as long.
// ds_plugin_sdk/ops/_products.py has the same rule for training.
bool multiplies_fast(Dtype dtype) {
  return multiplies(dtype) && !(dtype == Dtype::BFloat16 && !has_amx() && __builtin_cpu_is("intel"));
}
bool multiplies_few_fast(Dtype dtype) { return dtype == Dtype::BFloat16 && multiplies_fast(dtype); }
bool multiplies_few_floats_slowly() { return is_amd() && !__builtin_cpu_supports("avx512f"); }
#else
bool multiplies_few_fast(Dtype) { return false; }
bool multiplies_few_floats_slowly() { return false; }
bool multiplies(Dtype) { return true; }  // unknown: torch decides
bool multiplies_fast(Dtype) { return true; }
#endif

// `count` inputs of a layer from `first` on.
LinearLayer inputs_of(const LinearLayer& layer, int64_t first, int64_t count, Dtype dtype) {
  LinearLayer some = layer;
  some.inputs = count;
  some.input = static_cast<const char*>(layer.input) + first * layer.columns * size_of(dtype);
  const int64_t outputs = first * layer.outputs * size_of(dtype);
  if (layer.residual) some.residual = static_cast<const char*>(layer.residual) + outputs;
  some.output = static_cast<char*>(layer.output) + outputs;
  return some;
}

// Aligned to cache lines: where columns fill them, no vector lies in two. No std::vector: its zeros take as long to write as
// what replaces them.
constexpr std::align_val_t kLine{64};
struct Delete {
  void operator()(void* memory) const { ::operator delete(memory, kLine); }
};
template <class Element>
using Room = std::unique_ptr<Element[], Delete>;
template <class Element>
Element* room_for(Room<Element>& room, int64_t count) {
  room.reset(static_cast<Element*>(::operator new(count * sizeof(Element), kLine)));
  return room.get();
}

// A layer with its inputs in floats and, for quantized weights, in 16 bits.
class PreparedLayer {
 public:
  PreparedLayer(const LinearLoops& loops, const LinearLayer& layer, Dtype dtype)
      : task_{layer, static_cast<const float*>(layer.input), {}, nullptr, nullptr} {
    if (dtype != Dtype::Float32 || layer.scales) widen(loops, layer, dtype);
    if (!layer.offsets) return;
    task_.group_sums = room_for(group_sums_, layer.inputs * layer.groups);
    loops.sum_groups(task_, group_sums_.get());
  }

  // That of so many inputs from `first` on.
  LinearTask task(int64_t first, int64_t count, Dtype dtype) const {
    LinearTask some = task_;
    static_cast<LinearLayer&>(some) = inputs_of(task_, first, count, dtype);
    const int64_t group = first * task_.groups;
    some.widened += first * task_.columns;
    if (task_.group_sums) some.group_sums += group;
    if (const ShortInputs& all = task_.shorts; all.values) {
      some.shorts = {all.values + first * task_.columns, all.scales + group, all.eights + group, bytes_from(first)};
    }
    return some;
  }

 private:
  void widen(const LinearLoops& loops, const LinearLayer& layer, Dtype dtype) {
    const int64_t elements = layer.inputs * layer.columns, groups = layer.inputs * layer.groups;
    const bool in_floats = dtype == Dtype::Float32;
    if (!in_floats) task_.widened = room_for(widened_, elements);
    if (layer.scales) {
      room_for(shorts_, elements);
      room_for(short_scales_, groups);
      room_for(eights_, groups);
      bytes_of_input_ = loops.bytes_of_input(layer);
      if (bytes_of_input_ != 0) room_for(bytes_, layer.inputs * bytes_of_input_);
    }
    std::atomic<bool> shortened{true};
    parallel_for(0, layer.inputs, grain_of(layer.columns), [&](int64_t begin, int64_t end) {
      const int64_t first = begin * layer.columns, group = begin * layer.groups;
      LinearTask some = task_;
      some.inputs = end - begin;
      some.widened += first;
      if (!in_floats) {
        const auto* input = static_cast<const char*>(layer.input) + first * size_of(dtype);
        loops.widen(dtype)(input, widened_.get() + first, some.inputs * layer.columns);
      }
      if (!layer.scales) return;
      // All of them, also where another thread has found one that is not finite: tiles are not told which it is.
      if (!loops.shorten(some, shorts_.get() + first, short_scales_.get() + group, eights_.get() + group,
                         bytes_from(begin))) {
        shortened = false;
      }
    });
    if (!layer.scales) return;
    // A few inputs that are not finite have loops in floats; of many they shall not make the others slow.
    if (shortened || loops.uses_tiles(layer)) {
      task_.shorts = {shorts_.get(), short_scales_.get(), eights_.get(), bytes_.get()};
    }
  }

  // Those of inputs from `first` on, or null.
  uint8_t* bytes_from(int64_t first) const { return bytes_ ? bytes_.get() + first * bytes_of_input_ : nullptr; }

  Room<float> widened_, short_scales_, group_sums_;
  Room<int16_t> shorts_;
  Room<int32_t> eights_;
  Room<uint8_t> bytes_;
  int64_t bytes_of_input_ = 0;
  LinearTask task_;
};

struct Linear : Device {
  using Device::Device;
  using Device::run;

  bool takes(const LinearLayer& layer, Dtype dtype) const {
    if (uses_amx(layer, dtype)) return true;
    const auto has_tiles = [&] { return loops_for<LinearLoops>("linear").has_tiles(layer); };
    if (is_slower_by_torch(layer, dtype) && has_tiles()) return true;
    const bool to_widen = is_slow(dtype) && (layer.scales || !multiplies(dtype));
    const bool fast = !layer.scales && multiplies_few_fast(dtype);
    const bool slow = !layer.scales && dtype == Dtype::Float32 && multiplies_few_floats_slowly() && has_tiles();
    const int64_t many = fast ? kManyInputsOfFast : to_widen ? kManyInputsToWiden : slow ? kManyInputsOnAmd : kManyInputs;
    return layer.inputs < many || layer.columns == 0;
  }

  void run(const char* op, const LinearLayer& layer, Dtype dtype) const {
    if (uses_amx(layer, dtype)) return run_by_amx(op, layer);
    for (int64_t first = 0; first < layer.inputs; first += kMostInputs) {
      run_some(op, inputs_of(layer, first, std::min(layer.inputs - first, kMostInputs), dtype), dtype);
    }
  }

  // To make the weights floats takes its time too.
  bool widens(const LinearLayer& layer, Dtype dtype) const {
    return is_slow(dtype) && layer.inputs >= kManyInputsToWiden;
  }

  int64_t rows_at_once(int64_t rows, int64_t columns, Dtype dtype) const {
    const int64_t fit = kBlockBytes / (columns * size_of(dtype));
    return std::min(rows, std::max(fit / kLeastBlock * kLeastBlock, kLeastBlock));
  }

 private:
  static bool uses_amx(const LinearLayer& layer, Dtype dtype) {
    const bool plain_fits = layer.inputs >= kInputsByAmxOfPlain && layer.inputs <= kMostInputsByAmxOfPlain && layer.stride != 0;
    const bool inputs_fit = layer.scales ? layer.inputs >= kInputsByAmx : plain_fits;
    return dtype == Dtype::BFloat16 && inputs_fit && has_amx() &&
           loops_for<LinearLoops>("linear").has_amx(layer);
  }

  // What pair_inputs() makes of inputs takes as much memory again: that of a few parts, which threads share, is there at a time.
  void run_by_amx(const char* op, const LinearLayer& layer) const {
    const int64_t most = amx_part(layer.inputs, 4 * kMostAmxInputs);
    for (int64_t first = 0; first < layer.inputs; first += most) {
      run_some_by_amx(op, inputs_of(layer, first, std::min(layer.inputs - first, most), Dtype::BFloat16));
    }
  }

  // Inputs of one of the parts, of about one size, that have at most `most`.
  static int64_t amx_part(int64_t inputs, int64_t most) {
    const int64_t parts = (inputs + most - 1) / most;
    return (amx_blocks(inputs) + parts - 1) / parts * kAmxInputs;
  }

  void run_some_by_amx(const char* op, const LinearLayer& layer) const {
    const LinearLoops& loops = loops_for<LinearLoops>(op);
    const int64_t blocks = amx_blocks(layer.inputs), elements = kAmxInputs * layer.columns;
    Room<uint16_t> pairs;
    const LinearTask task{layer, nullptr, {}, nullptr, room_for(pairs, blocks * elements)};
    parallel_for(0, blocks, grain_of(elements),
                 [&](int64_t begin, int64_t end) { loops.pair_inputs(layer, begin, end, pairs.get()); });
    const AmxLoop loop = loops.by_amx(layer.scales != nullptr, layer.int4);
    const int64_t at_once = amx_part(layer.inputs, kMostAmxInputs);
    const int64_t work = kAmxOutputs * layer.columns * amx_blocks(at_once);
    share_layer(layer, at_once, kAmxOutputs, work, [&](int64_t first, int64_t inputs, int64_t begin, int64_t end) {
      LinearTask some = task;
      static_cast<LinearLayer&>(some) = inputs_of(layer, first, inputs, Dtype::BFloat16);
      some.pairs += first * layer.columns;
      Room<float> room;
      loop(some, begin, end, room_for(room, amx_room(inputs, layer.gated)));
    });
  }

  void run_some(const char* op, const LinearLayer& layer, Dtype dtype) const {
    const LinearLoops& loops = loops_for<LinearLoops>(op);
    const PreparedLayer prepared(loops, layer, dtype);
    const LinearLoop loop = loops.linear(dtype, layer.scales != nullptr, layer.int4);
    const int64_t work = kShare * layer.columns * std::min(layer.inputs, kMostTileInputs);
    share_layer(layer, kMostTileInputs, kShare, work, [&](int64_t first, int64_t inputs, int64_t begin, int64_t end) {
      loop(prepared.task(first, inputs, dtype), begin, end);
    });
  }

  // Threads share outputs, `share` at a time, and, of many inputs, parts of these: `with(first, inputs, begin, end)` is called for
  // so many inputs from one on, and outputs [begin, end). A share's work is as grain_of() counts it, without gates.
  template <class With>
  static void share_layer(const LinearLayer& layer, int64_t inputs_at_once, int64_t share, int64_t work, const With& with) {
    const int64_t shares = (layer.outputs + share - 1) / share;
    const int64_t parts = (layer.inputs + inputs_at_once - 1) / inputs_at_once;
    parallel_for(0, parts * shares, grain_of(layer.gated ? 2 * work : work), [&](int64_t begin, int64_t end) {
      for (int64_t next; begin < end; begin = next) {
        const int64_t part = begin / shares, first = part * inputs_at_once;
        next = std::min(end, (part + 1) * shares);
        with(first, std::min(layer.inputs - first, inputs_at_once), begin % shares * share,
             std::min((next - part * shares) * share, layer.outputs));
      }
    });
  }

  // Whether tiles are faster than torch's product, however many inputs there are.
  static bool is_slower_by_torch(const LinearLayer& layer, Dtype dtype) {
    if (layer.scales) return dtype != Dtype::BFloat16 || !has_amx();
    if (dtype != Dtype::Float32) return is_slow(dtype);
    static const bool is_faster = multiply_floats_faster(all_loops<LinearLoops>());
    return is_faster && layer.stride != 0 && layer.outputs >= kLeastOutputs;
  }

  // Whether torch's product takes two to three times as long as that of floats.
  static bool is_slow(Dtype dtype) { return dtype != Dtype::Float32 && !multiplies_fast(dtype); }
};

}  // namespace

DS_KERNELS_IMPL(CPU, m) { LinearOps<Linear>::implement(m); }
DS_KERNELS_OP_FUNCTION(linear, LinearOps<Linear>::linear)

}  // namespace ds_kernels::cpu
