// One kernel for the elements of many tensors, in as few launches as possible.
//
// The addresses travel as a kernel parameter: no copy to the device, nothing to keep alive, and a launch can be
// captured into a graph. Tensors are cut into chunks; a block finds its tensor by bisection among the chunk numbers.
#pragma once

#include <algorithm>
#include <utility>

#include "element.cuh"
#include "launch.cuh"
#include "tensor_lists.h"

namespace ds_kernels::cuda {

constexpr int kThreads = 256;
constexpr int kChunk = 4096;             // elements; a multiple of kThreads * 8
constexpr size_t kParameterBytes = 3800;  // of the 4096 that every driver takes, what the op's constants leave

// The tensors of one launch. `Extra` is what an update needs of each tensor beyond its addresses.
template <int lists, class Extra>
struct Table {
  static constexpr int kCapacity = kParameterBytes / (lists * sizeof(void*) + sizeof(int64_t) + sizeof(int) + sizeof(Extra));

  void* data[lists][kCapacity];
  int64_t numel[kCapacity];
  int first_chunk[kCapacity + 1];
  Extra extra[kCapacity];
  int tensors = 0;

  __device__ __forceinline__ int tensor_of(int chunk) const {
    int low = 0, high = tensors;  // first_chunk[low] <= chunk < first_chunk[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_chunk[middle] <= chunk ? low : high) = middle;
    }
    return low;
  }
};

namespace detail {

// Runs `update` on `count` neighbouring elements of each list.
template <int count, class Update, class Constants, class... Elements, size_t... list>
__device__ __forceinline__ void update_elements(void* const (&data)[sizeof...(Elements)], int64_t position,
                                                const Constants& constants, std::index_sequence<list...>) {
  float x[sizeof...(Elements)][count];
  (load<count>(static_cast<const Elements*>(data[list]) + position, x[list]), ...);
#pragma unroll
  for (int i = 0; i < count; ++i) Update::run(constants, x[list][i]...);
  const auto put = [&](auto written, auto* to, const float(&values)[count]) {
    if constexpr (decltype(written)::value) store<count>(to, values);
  };
  (put(std::bool_constant<Update::written[list]>{}, static_cast<Elements*>(data[list]) + position, x[list]), ...);
}

template <class Update, class Constants, class Extra, class... Elements>
__global__ void __launch_bounds__(kThreads)
    multi_tensor_kernel(const __grid_constant__ Table<sizeof...(Elements), Extra> table, const Constants common) {
  constexpr int lists = sizeof...(Elements);
  constexpr int pack = std::max({kPack<Elements>...});
  constexpr auto each = std::make_index_sequence<lists>{};
  const int tensor = table.tensor_of(static_cast<int>(blockIdx.x));
  const int64_t begin = static_cast<int64_t>(static_cast<int>(blockIdx.x) - table.first_chunk[tensor]) * kChunk;
  const int64_t rest = table.numel[tensor] - begin;
  const int count = rest < kChunk ? static_cast<int>(rest) : kChunk;
  const Constants constants = Update::constants(common, table.extra[tensor]);

  void* data[lists];
  bool aligned = true;
#pragma unroll
  for (int list = 0; list < lists; ++list) {
    data[list] = table.data[list][tensor];
    aligned = aligned && is_aligned(data[list]);
  }
  const int thread = static_cast<int>(threadIdx.x);
  const int packed = aligned ? count / pack * pack : 0;
  for (int i = thread * pack; i < packed; i += kThreads * pack) {
    update_elements<pack, Update, Constants, Elements...>(data, begin + i, constants, each);
  }
  for (int i = packed + thread; i < count; i += kThreads) {
    update_elements<1, Update, Constants, Elements...>(data, begin + i, constants, each);
  }
}

}  // namespace detail

// Runs `Update::run(constants, element of each list...)` on all elements, where
// constants = Update::constants(common, extra(tensor)).
template <class Update, class... Elements, class Constants, class ExtraOf>
void multi_tensor(const char* op, const TensorLists& tensors, const Constants& common, const ExtraOf& extra_of,
                  Stream stream) {
  constexpr int lists = sizeof...(Elements);
  constexpr int kMaxChunks = 1 << 30;  // of one launch
  using Extra = decltype(extra_of(size_t{}));
  Table<lists, Extra> table;
  int chunks = 0;
  const auto flush = [&] {
    table.first_chunk[table.tensors] = chunks;
    launch(op, detail::multi_tensor_kernel<Update, Constants, Extra, Elements...>, dim3(static_cast<unsigned>(chunks)),
           kThreads, stream, table, common);
    table.tensors = chunks = 0;
  };
  for (size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    const int64_t numel = (*tensors.numels)[tensor];
    if (numel == 0) continue;
    const int64_t needed = (numel + kChunk - 1) / kChunk;
    if (table.tensors == table.kCapacity || chunks + needed > kMaxChunks) flush();
    const int slot = table.tensors++;
    for (int list = 0; list < lists; ++list) table.data[list][slot] = tensors.at(list, tensor);
    table.numel[slot] = numel;
    table.first_chunk[slot] = chunks;
    table.extra[slot] = extra_of(tensor);
    chunks += static_cast<int>(needed);
  }
  flush();
}

// An update that needs nothing of a tensor but its addresses has `Nothing` for extra, and derives from `SameForAll`.
struct Nothing {
  Nothing operator()(size_t) const { return {}; }
};

template <class Constants>
struct SameForAll {
  static __device__ __forceinline__ const Constants& constants(const Constants& common, Nothing) { return common; }
};

// For parameters of dtype `params`, gradients and states of that dtype or float: calls `with(param, grad, state)`, of
// whose arguments the types count.
template <class Param, class With>
void with_types_of(bool float_grads, bool float_states, const With& with) {
  if (float_grads && float_states) return with(Param{}, 0.f, 0.f);
  if (float_grads) return with(Param{}, 0.f, Param{});
  if (float_states) return with(Param{}, Param{}, 0.f);
  return with(Param{}, Param{}, Param{});
}

template <class With>
void with_types(Dtype params, bool float_grads, bool float_states, const With& with) {
  switch (params) {
    case Dtype::BFloat16: return with_types_of<BFloat16>(float_grads, float_states, with);
    case Dtype::Float16: return with_types_of<Float16>(float_grads, float_states, with);
    default: return with(0.f, 0.f, 0.f);
  }
}

}  // namespace ds_kernels::cuda
