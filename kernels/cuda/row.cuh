// A row of elements, shared by threads: a thread has every so many packs of neighbouring elements.
#pragma once

#include <algorithm>
#include <type_traits>

#include "element.cuh"
#include "launch.cuh"
#include "reduce.cuh"

namespace ds_kernels::cuda {

// Where a row of `columns` elements begins; null where there are no rows.
template <class Element>
__device__ __forceinline__ const Element* row_of(const void* rows, int64_t row, int64_t columns) {
  return rows ? static_cast<const Element*>(rows) + row * columns : nullptr;
}
template <class Element>
__device__ __forceinline__ Element* row_of(void* rows, int64_t row, int64_t columns) {
  return rows ? static_cast<Element*>(rows) + row * columns : nullptr;
}

// ---- rows without reductions: a thread for each pack -------------------------------------------------------------

// How rows of so many packs are shared among blocks: each block has a part of one row.
struct Share {
  unsigned threads, blocks_of_row;

  explicit Share(int64_t packs)
      : threads(static_cast<unsigned>(std::min<int64_t>((packs + kWarpThreads - 1) / kWarpThreads * kWarpThreads, 256))),
        blocks_of_row(static_cast<unsigned>((packs + threads - 1) / threads)) {}

  dim3 blocks(const Stream& stream, int64_t rows) const { return grid(stream, rows * blocks_of_row); }
};

// The calling thread's pack.
struct Place {
  int64_t row, column;

  __device__ __forceinline__ Place(unsigned blocks_of_row, int pack) {
    // In 32 bits: a division of 64 would take longer than the work.
    const unsigned of = blockIdx.x / blocks_of_row, block = blockIdx.x - of * blocks_of_row;
    row = of;
    column = (static_cast<int64_t>(block) * blockDim.x + threadIdx.x) * pack;
  }
};

// sum += elements at `from`, which may be null.
template <class Element, int pack>
__device__ __forceinline__ void add(const void* from, int64_t position, float (&sum)[pack]) {
  if (!from) return;
  float more[pack];
  load<pack>(static_cast<const Element*>(from) + position, more);
#pragma unroll
  for (int j = 0; j < pack; ++j) sum[j] += more[j];
}

// ---- rows with reductions, several in a block if they are short --------------------------------------------------

constexpr int kMaxTeam = 512;

// The threads that share a row: the block, or a part of a warp whose size is a power of two. All threads of a block make
// one, also those whose row is beyond the last.
struct Team {
  int size, thread;
  int64_t row;

  __device__ __forceinline__ explicit Team(int size) : size(size), thread(static_cast<int>(threadIdx.x)) {
    if (size <= kWarpThreads) {  // without divisions, which would take as long as a short row
      const int shift = __ffs(size) - 1;
      first_ = thread >> shift;
      together_ = static_cast<int>(blockDim.x) >> shift;
      thread &= size - 1;
    }
    row = static_cast<int64_t>(blockIdx.x) * together_ + first_;
  }

  // Whether some team of the block has a row, so that all take part in its reductions.
  __device__ __forceinline__ bool block_has_row(int64_t rows) const { return row - first_ < rows; }
  // From one row to the next in a grid that has fewer teams than there are rows.
  __device__ __forceinline__ int64_t stride() const { return static_cast<int64_t>(gridDim.x) * together_; }

  // `x` of all its threads, combined; every thread gets it. All of the block's threads must call it.
  template <class Operation, class T>
  __device__ __forceinline__ T over(T x) const {
    if (size > kWarpThreads) return block_.combine<Operation>(x);
    for (int mask = size / 2; mask > 0; mask /= 2) x = Operation::combine(x, of_other_lane(x, mask));
    return x;
  }

 private:
  int together_ = 1, first_ = 0;  // the block's teams, those before this one
  mutable OverBlock block_;
};

// Teams for rows of so many units of work.
struct Teams {
  int size = 1;
  unsigned threads;

  explicit Teams(int64_t units, int most = kMaxTeam) {
    if (units > kWarpThreads) {
      const int64_t warps = (units + kWarpThreads - 1) / kWarpThreads;
      size = static_cast<int>(std::min<int64_t>(warps * kWarpThreads, most));
    } else {
      while (size < units) size *= 2;
    }
    threads = size > kWarpThreads ? static_cast<unsigned>(size) : 128;
  }

  dim3 blocks(const Stream& stream, int64_t rows) const { return grid(stream, blocks_of(rows)); }

  // Blocks that are all on the device at once, at no more than 64 registers a thread: each loops over its rows.
  dim3 resident_blocks(const Stream& stream, int64_t rows) const {
    return grid(stream, std::min<int64_t>(blocks_of(rows), multiprocessors(stream) * (1024 / threads)));
  }

 private:
  int64_t blocks_of(int64_t rows) const {
    const int64_t together = static_cast<int64_t>(threads) / size;
    return (rows + together - 1) / together;
  }
};

// ---- rows that stay in registers ---------------------------------------------------------------------------------

constexpr int kMaxRowThreads = 1024;
// A thread keeps so many packs in registers; those of rows beyond 32 KB are read again. With four, half as many blocks
// would find room on a multiprocessor.
constexpr int kHeldPacks = 2;

// Teams for rows of `packs` packs: about two packs for each thread.
inline Teams row_teams(int64_t packs) { return Teams((packs + kHeldPacks - 1) / kHeldPacks, kMaxRowThreads); }

// The packs of a row that a thread keeps, as they lie in memory.
template <class Element, int pack>
struct HeldWords {
  Words<Element, pack> packs[kHeldPacks];

  __device__ __forceinline__ void load_from(const Element* row, const Team& team, int64_t columns) {
#pragma unroll
    for (int i = 0; i < kHeldPacks; ++i) {
      const int index = team.thread + i * team.size;
      if (index < static_cast<int>(columns / pack)) packs[i].load_from(row + static_cast<int64_t>(index) * pack);
    }
  }
};

// In place of what gathers packs, for a row that fits in registers: what gathering needs does not have to stay there.
struct Fits {
  Fits() = default;
  template <class Gather>
  __device__ __forceinline__ explicit Fits(const Gather&) {}
};

// The calling thread's part of its team's row, which has no columns where the team has no row. `gather(position,
// values)` reads the values of a pack that is not in registers.
template <int pack, class Gather = Fits>
class Row {
 public:
  __device__ __forceinline__ Row(const Team& team, int64_t columns, const Gather& gather = {})
      : team_(team), packs_(static_cast<int>(columns / pack)), gather_(gather) {}

  // Calls `body(i, position, values)` for the packs that stay in registers, i being their number in the thread.
  template <class Body>
  __device__ __forceinline__ void for_each_held(const Body& body) {
#pragma unroll
    for (int i = 0; i < kHeldPacks; ++i) {
      if (index(i) < packs_) body(i, position(index(i)), held_[i]);
    }
  }

  // Gives the packs that stay in registers their values, before all that follows: by `fill(position, values)`, or those
  // of words.
  template <class Fill>
  __device__ __forceinline__ void hold(const Fill& fill) {
    for_each_held([&](int, int64_t position, float(&values)[pack]) { fill(position, values); });
  }
  template <class Element>
  __device__ __forceinline__ void hold(const HeldWords<Element, pack>& words) {
    for_each_held([&](int i, int64_t, float(&values)[pack]) { words.packs[i].widen_to(values); });
  }

  // Calls `body(position, values)` for each pack. What it changes in the values is kept where they are in registers;
  // others are gathered, and `again(values)` changes them as the bodies before this one did.
  template <class Again, class Body>
  __device__ __forceinline__ void for_each(const Again& again, const Body& body) {
    for_each_held([&](int, int64_t position, float(&values)[pack]) { body(position, values); });
    if constexpr (!std::is_same_v<Gather, Fits>) {
#pragma unroll 1
      for (int k = index(kHeldPacks); k < packs_; k += team_.size) {
        float values[pack];
        gather_(position(k), values);
        again(values);
        body(position(k), values);
      }
    }
  }
  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) {
    for_each([](float(&)[pack]) {}, body);
  }

  // The sum over the row of `term(value)`.
  template <class Term>
  __device__ __forceinline__ auto sum(const Term& term) {
    decltype(term(0.f)) total{};
    for_each([&](int64_t, float(&values)[pack]) {
#pragma unroll
      for (int j = 0; j < pack; ++j) total = total + term(values[j]);
    });
    return team_.template over<Sum>(total);
  }

 private:
  __device__ __forceinline__ int index(int i) const { return team_.thread + i * team_.size; }
  static __device__ __forceinline__ int64_t position(int index) { return static_cast<int64_t>(index) * pack; }

  const Team& team_;
  int packs_;  // no row has more than 2^31: 64 bits would take two registers, for what is compared to it too
  const Gather gather_;
  float held_[kHeldPacks][pack];
};

// Calls `with(pack, fits)`, of whose arguments the types count, for rows of `columns`: in packs of more than one
// element if these can be read so, and where they fit in registers without what rows need that do not. Those may have
// other packs.
template <class Element, int long_pack = kPack<Element>, class With>
void with_row(int64_t columns, bool in_packs, const With& with) {
  if (!in_packs) return with(Constant<1>{}, std::false_type{});
  if (columns / kPack<Element> > kHeldPacks * kMaxRowThreads) return with(Constant<long_pack>{}, std::false_type{});
  with(Constant<kPack<Element>>{}, std::true_type{});
}

// ---- on the host -------------------------------------------------------------------------------------------------

// Whether rows of `columns` elements can be read in packs from these addresses (null ones do not matter).
template <class Element, class... Pointers>
bool in_packs(int64_t columns, Pointers... pointers) {
  return columns % kPack<Element> == 0 && (is_aligned(pointers) && ...);
}

// Calls `with(element)` for a dtype, of whose argument the type counts.
template <class With>
void with_element(Dtype dtype, const With& with) {
  switch (dtype) {
    case Dtype::BFloat16: return with(BFloat16{});
    case Dtype::Float16: return with(Float16{});
    default: return with(0.f);
  }
}

// Launches `kernel_of(element, pack)`, of whose arguments the types count, with a thread for each pack of `rows`: in
// packs of more than one element if these can be read so from `pointers`.
template <class Rows, class KernelOf, class... Pointers>
void launch_in_packs(const Stream& stream, const Rows& rows, Dtype dtype, const KernelOf& kernel_of,
                     Pointers... pointers) {
  if (rows.columns == 0) return;
  with_element(dtype, [&](auto element) {
    const auto with_pack = [&](auto pack) {
      const Share share(rows.columns / pack);
      launch(stream, kernel_of(element, pack), share.blocks(stream, rows.rows), share.threads, rows,
             share.blocks_of_row);
    };
    using Element = decltype(element);
    if (in_packs<Element>(rows.columns, pointers...)) {
      with_pack(Constant<kPack<Element>>{});
    } else {
      with_pack(Constant<1>{});
    }
  });
}

}  // namespace ds_kernels::cuda
