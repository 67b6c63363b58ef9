// Linear layers on a few inputs, bound by the reading of weights. On tensor cores, if shapes and addresses allow it, a
// block has 16 rows and up to 32 inputs; else a warp has two rows, the two halves of an output if it is gated, and four
// inputs.

#include "linear_tiles.h"

#include <ds_kernels/linear.h>

#include "mma.cuh"
#include "pairs.cuh"
#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / kWarpThreads;
constexpr int kRows = 2;  // of a warp

// ---- weights -----------------------------------------------------------------------------------------------------

// What a thread takes of a row of weights at once: `kCount` words, 16 bytes if `packed`. A word is one weight; `get`
// makes floats of them.
template <class Weight, bool packed>
struct Words {
  static constexpr int kColumns = 1, kSize = 1;  // of a word: its columns, and how many of `Weight` it takes
  static constexpr int kCount = packed ? 16 / sizeof(Weight) : 1;
  static constexpr int kAtOnce = 4;  // turns whose loads are under way together

  static __device__ __forceinline__ int64_t column_of(int64_t word) { return word; }

  __device__ __forceinline__ Words(const Weight* row, int64_t word) : from_(row + word) {}
  __device__ __forceinline__ void get(int, float (&to)[kCount]) const { load<kCount>(from_, to); }

 private:
  const Weight* from_;
};

// A word has the int4 weights of four columns, a quarter of a block apart; `get` makes floats of one in each word.
template <bool packed>
struct Words<Int4Pair, packed> {
  static constexpr int kColumns = 4, kSize = 2;
  static constexpr int kCount = packed ? 8 : 1;
  static constexpr int kAtOnce = 2;

  static __device__ __forceinline__ int64_t column_of(int64_t word) { return word / 16 * kInt4Block + word % 16; }

  __device__ __forceinline__ Words(const Int4Pair* row, int64_t word) {
    const Int4Pair* from = row + word * kSize;
    if constexpr (packed) {
      load_words(reinterpret_cast<const uint32_t*>(from), two_);
    } else {
      two_[0] = from[0].bits | from[1].bits << 8;  // a view may begin at any byte
    }
  }

  // As int8 weights by way of the mantissa of 2^23, but without moving the bits: a step of them is worth 16^k there.
  __device__ __forceinline__ void get(int k, float (&to)[kCount]) const {
    const float step = 1.f / static_cast<float>(1 << 4 * k);
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const uint32_t word = __byte_perm(two_[j / 2], 0x4b00u, j % 2 ? 0x5432u : 0x5410u);  // below the exponent of 2^23
      to[j] = __uint_as_float(word & (0xff000000u | 15u << 4 * k)) * step - (0x1p23f * step + 8.f);
    }
  }

 private:
  uint32_t two_[packed ? kCount / 2 : 1];  // words, the first one lowest
};

// From one column of a word to the next.
constexpr int64_t kColumnsApart = kInt4Block / 4;

// What levels of a group stand for: level * scale + offset.
template <class Weight>
struct Steps {
  static constexpr bool kQuantized = sizeof(Weight) == 1;
  float scale = 1, offset = 0;

  template <class Layer>
  __device__ __forceinline__ Steps(const Layer& t, int64_t group) {  // one of all rows' groups
    if constexpr (kQuantized) {
      scale = t.scales[group];
      if (std::is_same_v<Weight, Int4Pair> && t.offsets) offset = t.offsets[group];
    }
  }
  template <int count>
  __device__ __forceinline__ void apply(float (&levels)[count]) const {
    if constexpr (kQuantized) {
#pragma unroll
      for (int j = 0; j < count; ++j) levels[j] = levels[j] * scale + offset;
    }
  }
};

// ---- the product -------------------------------------------------------------------------------------------------

__device__ __forceinline__ float activated(Activation activation, float x) {
  switch (activation) {
    case Activation::Relu: return activate<Activation::Relu>(x);
    case Activation::Gelu: return activate<Activation::Gelu>(x);
    case Activation::GeluTanh: return activate<Activation::GeluTanh>(x);
    case Activation::Silu: return activate<Activation::Silu>(x);
    default: return x;
  }
}

// What becomes of the sums of an output before the residual: of both halves if it is gated.
__device__ __forceinline__ float without_residual(const LinearLayer& t, float first, float second) {
  return t.gated ? first * activated(t.activation, second) : activated(t.activation, first);
}
template <class Element>
__device__ __forceinline__ float finished(const LinearLayer& t, int64_t input, int64_t output, float first,
                                          float second) {
  const float result = without_residual(t, first, second);
  return t.residual ? result + widen(static_cast<const Element*>(t.residual)[input * t.outputs + output]) : result;
}

// Adds the products of the columns that the calling thread has of two rows.
template <class Weight, bool packed, int inputs, class Element>
__device__ __forceinline__ void add_products(const LinearLayer& t, const int64_t (&rows)[kRows],
                                             const Element* const (&x)[inputs], float (&sums)[kRows][inputs]) {
  using Taken = Words<Weight, packed>;
  constexpr int count = Taken::kCount;
  const auto* weights = static_cast<const Weight*>(t.weight);
  const auto width = static_cast<uint32_t>(t.columns / t.groups);
#pragma unroll Taken::kAtOnce
  for (int64_t word = threadIdx.x % kWarpThreads * count; word < t.columns / Taken::kColumns;
       word += kWarpThreads * count) {
    const Taken taken[kRows] = {{weights + rows[0] * t.stride, word}, {weights + rows[1] * t.stride, word}};
    const int64_t first = Taken::column_of(word), group = static_cast<uint32_t>(first) / width;
    const Steps<Weight> steps[kRows] = {{t, rows[0] * t.groups + group}, {t, rows[1] * t.groups + group}};
#pragma unroll
    for (int k = 0; k < Taken::kColumns; ++k) {
      float weight[kRows][count];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        taken[r].get(k, weight[r]);
        steps[r].apply(weight[r]);
      }
#pragma unroll
      for (int m = 0; m < inputs; ++m) {
        float values[count];
        load<count>(x[m] + first + k * kColumnsApart, values);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int j = 0; j < count; ++j) sums[r][m] += weight[r][j] * values[j];
        }
      }
    }
  }
}

template <class Weight, class Element, int inputs, bool packed>
__global__ void __launch_bounds__(kThreads) linear_kernel(const LinearLayer t) {
  const int64_t pair = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarpThreads;
  // Two neighbouring outputs, or the halves of one.
  const int64_t begin = t.gated ? pair : pair * kRows, distance = t.gated ? t.outputs : 1;
  const int64_t first_input = static_cast<int64_t>(blockIdx.y) * inputs;
  if (begin >= t.outputs) return;  // a whole warp
  const bool has_second = t.gated || begin + 1 < t.outputs;
  const int64_t rows[kRows] = {begin, has_second ? begin + distance : begin};
  const Element* x[inputs];
#pragma unroll
  for (int m = 0; m < inputs; ++m) {  // where there are fewer inputs, the last one again
    const int64_t input = first_input + m < t.inputs ? first_input + m : t.inputs - 1;
    x[m] = static_cast<const Element*>(t.input) + input * t.columns;
  }
  float sums[kRows][inputs] = {};
  add_products<Weight, packed>(t, rows, x, sums);
  const auto* bias = static_cast<const Element*>(t.bias);
#pragma unroll
  for (int m = 0; m < inputs; ++m) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      sums[r][m] = over_warp<Sum>(sums[r][m]);
      if (bias) sums[r][m] += widen(bias[rows[r]]);
    }
    const int64_t input = first_input + m;
    if (input >= t.inputs || static_cast<int>(threadIdx.x) % kWarpThreads != m) continue;
    auto* output = static_cast<Element*>(t.output) + input * t.outputs;
    narrow(finished<Element>(t, input, begin, sums[0][m], sums[1][m]), output[begin]);
    if (!t.gated && has_second) narrow(finished<Element>(t, input, begin + 1, sums[1][m], 0), output[begin + 1]);
  }
}

#ifndef __HIPCC__
// ---- the product on tensor cores ---------------------------------------------------------------------------------

// Rows of weights are the rows of a tile of 16, inputs the columns of tiles of 8, and columns of weights what is summed
// over. In which order these are does not matter as long as both sides have the same: so a thread takes 16 neighbouring
// bytes of a row as they lie in memory, the four threads that share a row a chunk of 64, and of each input the elements
// that belong to its bytes.
constexpr int kTileRows = 16, kTileInputs = 8, kChunkBytes = 64;
constexpr int kTileWarp = 32;
// By tiles of inputs: warps of a block at most; chunks of a row that a warp has at once, of which two are a line of the
// L2 cache; and how many blocks ptxas leaves room for on a multiprocessor: as it likes (0), or one where that spills.
template <int across>
constexpr int kMostTileWarps = across > 2 ? 8 : 16;
template <int across>
constexpr int kChunksAtOnce = across > 2 ? 1 : 2;
template <int across>
constexpr int kTileBlocks = across > 2 ? 1 : 0;
constexpr int64_t kMostTileColumns = int64_t{1} << 20;  // so that group_of divides exactly

// Sixteen bytes of a row of weights, as elements. Its pieces belong to 8 neighbouring elements of an input each: to
// `column(q, piece)` of the chunk and on. `pairs` gives those of half a piece.
template <class Weight>
struct Bytes {  // elements themselves
  static constexpr int kColumns = kChunkBytes / sizeof(Weight), kPieces = 1;

  static __device__ __forceinline__ int column(int q, int) { return 8 * q; }

  template <class Element>
  static __device__ __forceinline__ void pairs(const uint32_t (&words)[4], int, int half, uint32_t& low,
                                               uint32_t& high) {
    low = words[2 * half], high = words[2 * half + 1];
  }
};

template <>
struct Bytes<int8_t> {
  static constexpr int kColumns = kChunkBytes, kPieces = 2;

  static __device__ __forceinline__ int column(int q, int piece) { return 16 * q + 8 * piece; }

  template <class Element>
  static __device__ __forceinline__ void pairs(const uint32_t (&words)[4], int piece, int half, uint32_t& low,
                                               uint32_t& high) {
    const uint32_t word = words[2 * piece + half];
    low = pair_of_levels<Element>(__byte_perm(word, 0, 0x4140));
    high = pair_of_levels<Element>(__byte_perm(word, 0, 0x4342));
  }
};

// Two blocks of a row: a thread has eight words of one of them, and a piece has a level of each.
template <>
struct Bytes<Int4Pair> {
  static constexpr int kColumns = 2 * kChunkBytes, kPieces = 4;

  static __device__ __forceinline__ int column(int q, int piece) {
    return q / 2 * static_cast<int>(kInt4Block) + 16 * piece + q % 2 * 8;
  }

  template <class Element>
  static __device__ __forceinline__ void pairs(const uint32_t (&words)[4], int piece, int half, uint32_t& low,
                                               uint32_t& high) {
    low = levels<Element>(words[2 * half] >> 4 * piece), high = levels<Element>(words[2 * half + 1] >> 4 * piece);
  }

 private:
  // By way of the mantissa of 128, or of 1024.
  template <class Element>
  static __device__ __forceinline__ uint32_t levels(uint32_t shifted) {
    const uint32_t above = masked_with(shifted, 0x000f000fu, twice<Element>(0x4300, 0x6400));
    return add_pairs<Element>(above, twice<Element>(0xc308, 0xe408));  // - (128 + 8), - (1024 + 8)
  }
};

// Sixteen bytes that are read once: the L1 cache is for inputs.
__device__ __forceinline__ void load_once(const unsigned char* from, uint32_t (&words)[4]) {
#ifdef __CUDA_ARCH__
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(from));
#else
  load_words(reinterpret_cast<const uint32_t*>(from), words);
#endif
}

// How the columns of a layer are taken.
struct Chunks {
  int count;
  uint32_t inverse;  // of a group's chunks: 2^31 / chunks, rounded up

  __device__ __forceinline__ int group_of(int chunk) const { return static_cast<int>(__umulhi(2u * chunk, inverse)); }
};

// What a thread takes of a chunk: of two rows, and what levels of their group stand for.
struct Taken {
  uint32_t words[2][4];
  float scales[2], offsets[2];
};

// The calling thread's two rows, the `across` tiles of inputs, and its sums.
template <class Weight, class Element, int across, bool has_offsets>
class TileSums {
  static constexpr bool kQuantized = sizeof(Weight) == 1;
  static constexpr int kAtOnce = kChunksAtOnce<across>;
  using Kind = Bytes<Weight>;

 public:
  float total[across][4] = {};

  __device__ __forceinline__ TileSums(const LinearLayer& t, Chunks chunks, int64_t begin, int64_t first_input)
      : t_(t),
        chunks_(chunks),
        q_(static_cast<int>(threadIdx.x) % 4),
        x_(static_cast<const Element*>(t.input) + first_input * t.columns) {
    const int g = static_cast<int>(threadIdx.x) % kTileWarp / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Beyond the last row, that again. The second half of a tile is of the second halves of outputs if gated.
      const int64_t output = begin + (t.gated ? 0 : r * kTileRows / 2) + g;
      const int64_t row = (output < t.outputs ? output : t.outputs - 1) + (t.gated ? r * t.outputs : 0);
      from_[r] = static_cast<const unsigned char*>(t.weight) + row * t.stride * static_cast<int64_t>(sizeof(Weight)) +
                 16 * q_;
      groups_[r] = static_cast<int>(row * t.groups);
    }
#pragma unroll
    for (int n = 0; n < across; ++n) {
      const int64_t input = n * kTileInputs + g, last = t.inputs - 1 - first_input;
      inputs_[n] = static_cast<int>((input < last ? input : last) * t.columns);
    }
  }

  // Adds the products of the chunks that a warp has: every so many neighbouring ones. What it has done with is replaced
  // by the next at once, so that loads are always under way.
  __device__ __forceinline__ void add(int warp, int warps) {
    const int step = warps * kAtOnce;
    int first = warp * kAtOnce;
    Taken taken[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) take(first, u, taken[u]);
    for (; first < chunks_.count; first += step) {
      float part[across][4] = {}, ones[across][4] = {};
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        multiply(clamped(first + u), taken[u].words, part, ones);
        if (ends(first, u)) add_part(taken[u], part, ones);
        if (first + step < chunks_.count) take(first + step, u, taken[u]);
      }
    }
  }

 private:
  // Beyond the last chunk, that again: its products are thrown away.
  __device__ __forceinline__ int clamped(int chunk) const { return chunk < chunks_.count ? chunk : chunks_.count - 1; }

  // Whether the products up to a chunk are to be added to the total: the next one is another group's, or none of this
  // turn.
  __device__ __forceinline__ bool ends(int first, int u) const {
    const int chunk = first + u;
    if (u + 1 == kAtOnce || chunk + 1 >= chunks_.count) return chunk < chunks_.count;
    return kQuantized && chunks_.group_of(chunk) != chunks_.group_of(chunk + 1);
  }

  __device__ __forceinline__ void take(int first, int u, Taken& to) const {
    const int chunk = clamped(first + u);
#pragma unroll
    for (int r = 0; r < 2; ++r) load_once(from_[r] + static_cast<int64_t>(chunk) * kChunkBytes, to.words[r]);
    if (!kQuantized || !ends(first, u)) return;
    const int group = chunks_.group_of(chunk);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      to.scales[r] = t_.scales[groups_[r] + group];
      if constexpr (has_offsets) to.offsets[r] = t_.offsets[groups_[r] + group];
    }
  }

  // Adds the products of a chunk to `part`, and with offsets the inputs themselves to `ones`.
  __device__ __forceinline__ void multiply(int chunk, const uint32_t (&words)[2][4], float (&part)[across][4],
                                           float (&ones)[across][4]) const {
#pragma unroll
    for (int piece = 0; piece < Kind::kPieces; ++piece) {
      uint32_t inputs[across][4];
#pragma unroll
      for (int n = 0; n < across; ++n) {
        const Element* from = x_ + (inputs_[n] + chunk * Kind::kColumns + Kind::column(q_, piece));
        load_words(reinterpret_cast<const uint32_t*>(from), inputs[n]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t a[4];
        Kind::template pairs<Element>(words[0], piece, half, a[0], a[2]);
        Kind::template pairs<Element>(words[1], piece, half, a[1], a[3]);
#pragma unroll
        for (int n = 0; n < across; ++n) {
          const uint32_t b[2] = {inputs[n][2 * half], inputs[n][2 * half + 1]};
          mma(a, b, part[n], Element{});
          if constexpr (has_offsets) {
            constexpr uint32_t one = twice<Element>(0x3f80, 0x3c00);
            const uint32_t a_of_ones[4] = {one, one, one, one};
            mma(a_of_ones, b, ones[n], Element{});
          }
        }
      }
    }
  }

  // Adds what a group has to the total, and begins again.
  __device__ __forceinline__ void add_part(const Taken& taken, float (&part)[across][4], float (&ones)[across][4]) {
#pragma unroll
    for (int n = 0; n < across; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        total[n][i] += kQuantized ? taken.scales[i / 2] * part[n][i] : part[n][i];
        if constexpr (has_offsets) total[n][i] += taken.offsets[i / 2] * ones[n][i];
        part[n][i] = ones[n][i] = 0;
      }
    }
  }

  const LinearLayer& t_;
  const Chunks chunks_;
  const int q_;
  const unsigned char* from_[2];
  int groups_[2];  // the first of each row
  const Element* x_;
  int inputs_[across];  // where they begin from there
};

// Warps share the columns; their sums are added in their order.
template <class Weight, class Element, int across, bool has_offsets>
__global__ void __launch_bounds__(kMostTileWarps<across>* kTileWarp, kTileBlocks<across>)
    tile_kernel(const LinearLayer t, const Chunks chunks) {
  if constexpr (kCompilesMma) {
    constexpr int inputs = across * kTileInputs, half = kTileRows / 2;
    __shared__ float sums[kMostTileWarps<across>][inputs][kTileRows + 4];  // no two threads of a warp write to one bank
    const int thread = static_cast<int>(threadIdx.x), lane = thread % kTileWarp;
    const int warp = thread / kTileWarp, warps = static_cast<int>(blockDim.x) / kTileWarp;
    const int64_t begin = static_cast<int64_t>(blockIdx.x) * (t.gated ? half : kTileRows);
    const int64_t first_input = static_cast<int64_t>(blockIdx.y) * inputs;
    TileSums<Weight, Element, across, has_offsets> mine(t, chunks, begin, first_input);
    mine.add(warp, warps);
#pragma unroll
    for (int n = 0; n < across; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums[warp][n * kTileInputs + lane % 4 * 2 + i % 2][i / 2 * half + lane / 4] = mine.total[n][i];
      }
    }
    __syncthreads();
    const auto* bias = static_cast<const Element*>(t.bias);
    const auto sum_of = [&](int n, int tile_row, int64_t row) {
      float sum = sums[0][n][tile_row];
      for (int w = 1; w < warps; ++w) sum += sums[w][n][tile_row];
      return bias ? sum + widen(bias[row]) : sum;
    };
    for (int k = thread; k < inputs * kTileRows; k += static_cast<int>(blockDim.x)) {
      const int n = k / kTileRows, tile_row = k % kTileRows;
      const int64_t input = first_input + n, output = begin + tile_row;
      if (input >= t.inputs || output >= t.outputs || (t.gated && tile_row >= half)) continue;
      const float first = sum_of(n, tile_row, output);
      const float second = t.gated ? sum_of(n, tile_row + half, t.outputs + output) : 0;
      narrow(finished<Element>(t, input, output, first, second),
             static_cast<Element*>(t.output)[input * t.outputs + output]);
    }
  }
}
#endif

// ---- around torch's product --------------------------------------------------------------------------------------

template <class Weight, class Element, bool packed>
__global__ void dequantize_kernel(const QuantizedRows q, const unsigned blocks_of_row) {
  using Taken = Words<Weight, packed>;
  const auto [row, word] = Place(blocks_of_row, Taken::kCount);
  const int64_t words = q.columns / Taken::kColumns;
  if (word >= words) return;
  const Taken taken(static_cast<const Weight*>(q.weight) + row * words * Taken::kSize, word);
  const int64_t first = Taken::column_of(word);
  const Steps<Weight> steps(q, row * q.groups + first / (q.columns / q.groups));
  auto* to = static_cast<Element*>(q.to) + row * q.columns + first;
#pragma unroll
  for (int k = 0; k < Taken::kColumns; ++k) {
    float weight[Taken::kCount];
    taken.get(k, weight);
    steps.apply(weight);
    store<Taken::kCount>(to + k * kColumnsApart, weight);
  }
}

template <class Element, int pack>
__global__ void finish_kernel(const LinearLayer t, const Element* sums, const unsigned blocks_of_row) {
  const auto [input, output] = Place(blocks_of_row, pack);
  if (output >= t.outputs) return;
  const Element* from = sums + input * (t.gated ? 2 * t.outputs : t.outputs) + output;
  float first[pack], second[pack] = {};
  load<pack>(from, first);
  if (t.gated) load<pack>(from + t.outputs, second);
#pragma unroll
  for (int j = 0; j < pack; ++j) first[j] = without_residual(t, first[j], second[j]);
  add<Element>(t.residual, input * t.outputs + output, first);
  store<pack>(static_cast<Element*>(t.output) + input * t.outputs + output, first);
}

// ---- launches ----------------------------------------------------------------------------------------------------

#ifndef __HIPCC__
// Whether tiles have whole chunks of every group, at aligned addresses.
template <class Weight>
bool in_tiles(const LinearLayer& t) {
  return t.columns > 0 && t.columns <= kMostTileColumns && 2 * t.outputs <= INT32_MAX / t.groups &&
         t.columns / t.groups % Bytes<Weight>::kColumns == 0 &&
         t.stride * static_cast<int64_t>(sizeof(Weight)) % 16 == 0 && is_aligned(t.weight) && is_aligned(t.input) &&
         has_mma();
}

// More warps share the columns of few rows: so many in all are some sixteen on each multiprocessor of a large GPU.
constexpr int64_t kManyWarps = 2048;

template <class Weight, class Element, int across>
void launch_tiles(const LinearLayer& t, const Stream& stream) {
  constexpr int inputs = across * kTileInputs;
  const int64_t columns = Bytes<Weight>::kColumns, of_group = t.columns / t.groups / columns;
  const Chunks chunks{static_cast<int>(t.columns / columns),
                      static_cast<uint32_t>(((int64_t{1} << 31) + of_group - 1) / of_group)};
  const int64_t rows = t.gated ? kTileRows / 2 : kTileRows;  // of a block, or pairs of them
  dim3 blocks = grid(stream, (t.outputs + rows - 1) / rows);
  blocks.y = static_cast<unsigned>((t.inputs + inputs - 1) / inputs);
  const int turns = chunks.count / kChunksAtOnce<across>;
  int warps = 4;
  while (warps < kMostTileWarps<across> && blocks.x * warps < kManyWarps && turns >= 4 * warps) warps *= 2;
  const auto run = [&](auto kernel) { launch(stream, kernel, blocks, warps * kTileWarp, t, chunks); };
  if constexpr (std::is_same_v<Weight, Int4Pair>) {
    if (t.offsets) return run(tile_kernel<Weight, Element, across, true>);
  }
  run(tile_kernel<Weight, Element, across, false>);
}

// The fewest tiles of inputs that are enough, for quantized weights: others are for few inputs only.
template <class Weight, class Element>
void launch_tiles(const LinearLayer& t, const Stream& stream) {
  if constexpr (sizeof(Weight) == 1) {
    if (t.inputs > 2 * kTileInputs) return launch_tiles<Weight, Element, 4>(t, stream);
    if (t.inputs > kTileInputs) return launch_tiles<Weight, Element, 2>(t, stream);
  }
  launch_tiles<Weight, Element, 1>(t, stream);
}
#endif

template <class Weight, class Element>
void launch_linear(const LinearLayer& t, const Stream& stream) {
  if (t.inputs == 0 || t.outputs == 0) return;
#ifndef __HIPCC__
  if constexpr (sizeof(Element) == 2) {
    if (in_tiles<Weight>(t)) return launch_tiles<Weight, Element>(t, stream);
  }
#endif
  constexpr int count = 16 / sizeof(Weight);
  const int64_t width = t.columns / t.groups;
  const bool packed = width % count == 0 && t.stride % count == 0 && is_aligned(t.weight) && is_aligned(t.input);
  const auto run = [&](auto inputs) {
    const int64_t pairs = t.gated ? t.outputs : (t.outputs + kRows - 1) / kRows;
    dim3 blocks = grid(stream, (pairs + kWarps - 1) / kWarps);
    blocks.y = static_cast<unsigned>((t.inputs + inputs - 1) / inputs);
    const auto kernel =
        packed ? linear_kernel<Weight, Element, inputs, true> : linear_kernel<Weight, Element, inputs, false>;
    launch(stream, kernel, blocks, kThreads, t);
  };
  t.inputs == 1 ? run(Constant<1>{}) : run(Constant<4>{});
}

template <class Weight, class Element>
void launch_dequantize(const QuantizedRows& q, const Stream& stream) {
  const auto run = [&](auto packed) {
    using Taken = Words<Weight, packed != 0>;
    const Share share(q.columns / Taken::kColumns / Taken::kCount);
    launch(stream, dequantize_kernel<Weight, Element, packed != 0>, share.blocks(stream, q.rows), share.threads, q,
           share.blocks_of_row);
  };
  const bool packed = q.columns / q.groups % 16 == 0 && is_aligned(q.weight) && is_aligned(q.to);
  packed ? run(Constant<1>{}) : run(Constant<0>{});
}

}  // namespace

bool fits_tiles(const LinearLayer& t, Dtype dtype) {
#ifdef __HIPCC__
  (void)t;
  return false;
#else
  return dtype != Dtype::Float32 && t.scales && (t.int4 ? in_tiles<Int4Pair>(t) : in_tiles<int8_t>(t));
#endif
}

// For few inputs: on tensor cores each weight is read once for up to 32 of them, else for four.
template <>
void compute(const LinearLayer& t, Dtype dtype, const Stream& stream) {
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    if (t.int4) return launch_linear<Int4Pair, Element>(t, stream);
    return t.scales ? launch_linear<int8_t, Element>(t, stream) : launch_linear<Element, Element>(t, stream);
  });
}

template <>
void compute(const QuantizedRows& q, Dtype dtype, const Stream& stream) {
  if (q.columns == 0) return;
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    return q.int4 ? launch_dequantize<Int4Pair, Element>(q, stream) : launch_dequantize<int8_t, Element>(q, stream);
  });
}

template <>
void compute(const LinearFinish& finish, Dtype dtype, const Stream& stream) {
  const LinearLayer& t = finish.layer;
  if (t.outputs == 0) return;
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const auto run = [&](auto pack) {
      const Share share(t.outputs / pack);
      launch(stream, finish_kernel<Element, pack>, share.blocks(stream, t.inputs), share.threads, t,
             static_cast<const Element*>(finish.sums), share.blocks_of_row);
    };
    const bool packed = in_packs<Element>(t.outputs, finish.sums, t.residual, t.output);
    packed ? run(Constant<kPack<Element>>{}) : run(Constant<1>{});
  });
}

}  // namespace ds_kernels::cuda
