// A row of elements, shared by the threads of a block: a thread has every so many packs of neighbouring elements.
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

constexpr int kMaxRowThreads = 1024;
// A thread keeps so many in registers; those of rows beyond 32 KB are read again. With four, half as many blocks would
// find room on a multiprocessor.
constexpr int kHeldPacks = 2;

// Threads for rows of `packs` packs: about two packs each.
inline unsigned row_threads(int64_t packs) {
  const int64_t warps = (packs + 2 * kWarpThreads - 1) / (2 * kWarpThreads);
  return static_cast<unsigned>(std::min<int64_t>(std::max<int64_t>(warps * kWarpThreads, kWarpThreads), kMaxRowThreads));
}

// The calling thread's part of a row. `gather(position, values)` gives the values of a pack.
template <int pack, class Gather>
class Row {
 public:
  __device__ __forceinline__ Row(int64_t columns, const Gather& gather) : packs_(columns / pack), gather_(gather) {
#pragma unroll
    for (int i = 0; i < kHeldPacks; ++i) {
      if (index(i) < packs_) gather_(index(i) * pack, held_[i]);
    }
  }

  // Calls `body(position, values)` for each pack; what it changes in the values is kept where they are.
  template <class Body>
  __device__ __forceinline__ void for_each(const Body& body) {
#pragma unroll
    for (int i = 0; i < kHeldPacks; ++i) {
      if (index(i) < packs_) body(index(i) * pack, held_[i]);
    }
    for (int64_t k = index(kHeldPacks); k < packs_; k += blockDim.x) {
      float values[pack];
      gather_(k * pack, values);
      body(k * pack, values);
    }
  }

  // The sum over the row of `term(value)`.
  template <class Term>
  __device__ __forceinline__ auto sum(const Term& term) {
    decltype(term(0.f)) total{};
    for_each([&](int64_t, float(&values)[pack]) {
#pragma unroll
      for (int j = 0; j < pack; ++j) total = total + term(values[j]);
    });
    return over_block<Sum>(total);
  }

 private:
  __device__ __forceinline__ int64_t index(int i) const {
    return static_cast<int64_t>(threadIdx.x) + static_cast<int64_t>(i) * blockDim.x;
  }

  int64_t packs_;
  const Gather& gather_;
  float held_[kHeldPacks][pack];
};

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
    // In 32 bits: a division of 64 would take longer than the work. A row has no more packs than that.
    const unsigned of = blockIdx.x / blocks_of_row, block = blockIdx.x - of * blocks_of_row;
    row = of;
    column = static_cast<int64_t>(block * blockDim.x + threadIdx.x) * pack;
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

  __device__ __forceinline__ explicit Team(int size)
      : size(size),
        thread(static_cast<int>(threadIdx.x) % size),
        row(static_cast<int64_t>(blockIdx.x) * (static_cast<int>(blockDim.x) / size) +
            static_cast<int>(threadIdx.x) / size) {}

  // `x` of all its threads, combined; every thread gets it.
  template <class Operation, class T>
  __device__ __forceinline__ T over(T x) const {
    if (size > kWarpThreads) return over_block<Operation>(x);
    for (int mask = size / 2; mask > 0; mask /= 2) x = Operation::combine(x, of_other_lane(x, mask));
    return x;
  }
};

// Teams for rows of so many units of work.
struct Teams {
  int size = 1;
  unsigned threads;

  explicit Teams(int64_t units) {
    if (units > kWarpThreads) {
      const int64_t warps = (units + kWarpThreads - 1) / kWarpThreads;
      size = static_cast<int>(warps * kWarpThreads < kMaxTeam ? warps * kWarpThreads : kMaxTeam);
    } else {
      while (size < units) size *= 2;
    }
    threads = size > kWarpThreads ? static_cast<unsigned>(size) : 128;
  }

  dim3 blocks(const Stream& stream, int64_t rows) const {
    const int64_t together = static_cast<int64_t>(threads) / size;
    return grid(stream, (rows + together - 1) / together);
  }
};

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
