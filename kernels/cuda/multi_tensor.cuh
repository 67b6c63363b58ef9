// One kernel for the elements of many tensors, in as few launches as possible.
//
// The addresses travel as a kernel parameter: no copy to the device, nothing to keep alive, and a launch can be
// captured into a graph. Tensors are cut into chunks; a block finds its tensor by bisection among the chunk numbers.
#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include <ds_kernels/tensor_lists.h>

#include "element.cuh"
#include "launch.cuh"

namespace ds_kernels::cuda {

constexpr int kThreads = 256;
constexpr int kChunk = 4096;             // elements; a multiple of kThreads * 8
constexpr size_t kParameterBytes = 3800;  // of the 4096 that every driver takes, what the op's constants leave

// Elements of one tensor that a block works on.
struct Chunk {
  int tensor, number;  // of the launch; of the tensor
  int64_t begin;
  int count;
};

// The tensors of one launch. `Extra` is what an update needs of each tensor beyond its addresses.
template <int lists, class Extra>
struct Table {
  static constexpr int kCapacity =
      kParameterBytes / (lists * sizeof(void*) + sizeof(int64_t) + sizeof(int) + sizeof(Extra));

  void* data[lists][kCapacity];
  int64_t numel[kCapacity];
  Extra extra[kCapacity];
  int first_chunk[kCapacity + 1];
  int tensors = 0;

  int chunks() const { return tensors ? first_chunk[tensors] : 0; }

  __device__ __forceinline__ Chunk chunk(int index) const {
    int low = 0, high = tensors;  // first_chunk[low] <= index < first_chunk[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (first_chunk[middle] <= index ? low : high) = middle;
    }
    const int number = index - first_chunk[low];
    const int64_t begin = static_cast<int64_t>(number) * kChunk, rest = numel[low] - begin;
    return {low, number, begin, rest < kChunk ? static_cast<int>(rest) : kChunk};
  }
};

// Calls `body(pack, i)` so that positions [i, i + pack) are the calling thread's, `pack` being a constant: the given one
// if all addresses are aligned, 1 otherwise and at the end.
template <int pack, class Body>
__device__ __forceinline__ void for_each_pack(bool aligned, int count, const Body& body) {
  const int thread = static_cast<int>(threadIdx.x), packed = aligned ? count / pack * pack : 0;
  for (int i = thread * pack; i < packed; i += kThreads * pack) body(Constant<pack>{}, i);
  for (int i = packed + thread; i < count; i += kThreads) body(Constant<1>{}, i);
}

// Cuts the tensors into launches: calls `body(table)` for each. `extra_of(tensor)` gives what a table has of a tensor.
template <int lists, class ExtraOf, class Body>
void for_each_launch(const TensorLists& tensors, const ExtraOf& extra_of, const Body& body) {
  constexpr int64_t kMaxChunks = 1 << 30;
  Table<lists, decltype(extra_of(size_t{}))> table;
  for (size_t tensor = 0; tensor < tensors.size; ++tensor) {
    const int64_t numel = tensors.numels[tensor], needed = (numel + kChunk - 1) / kChunk;
    if (table.tensors == table.kCapacity || table.chunks() + needed > kMaxChunks) {
      body(table);
      table.tensors = 0;
    }
    const int slot = table.tensors, first = table.chunks();
    for (int list = 0; list < lists; ++list) table.data[list][slot] = tensors.at(list, tensor);
    table.numel[slot] = numel;
    table.extra[slot] = extra_of(tensor);
    table.first_chunk[slot] = first;
    table.first_chunk[slot + 1] = first + static_cast<int>(needed);
    ++table.tensors;
  }
  if (table.tensors) body(table);
}

namespace detail {

// Runs `Update` on `count` neighbouring elements of each list.
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
  const Chunk chunk = table.chunk(static_cast<int>(blockIdx.x));
  const Constants constants = Update::constants(common, table.extra[chunk.tensor]);
  void* data[lists];
  bool aligned = true;
#pragma unroll
  for (int list = 0; list < lists; ++list) {
    data[list] = table.data[list][chunk.tensor];
    aligned = aligned && is_aligned(data[list]);
  }
  for_each_pack<kWidestPack<Elements...>>(aligned, chunk.count, [&](auto pack, int i) {
    update_elements<pack, Update, Constants, Elements...>(data, chunk.begin + i, constants,
                                                          std::make_index_sequence<lists>{});
  });
}

}  // namespace detail

// Runs `Update::run(constants, element of each list...)` on all elements, where
// constants = Update::constants(common, extra_of(tensor)).
template <class Update, class... Elements, class Constants, class ExtraOf>
void multi_tensor(const Stream& stream, const TensorLists& tensors, const Constants& common, const ExtraOf& extra_of) {
  using Extra = decltype(extra_of(size_t{}));
  for_each_launch<sizeof...(Elements)>(tensors, extra_of, [&](const auto& table) {
    launch(stream, detail::multi_tensor_kernel<Update, Constants, Extra, Elements...>,
           dim3(static_cast<unsigned>(table.chunks())), kThreads, table, common);
  });
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

template <class With>
void with_types(const TensorLists& tensors, const With& with) {
  with_types(tensors.dtypes[0], tensors.is_float(1), tensors.is_float(2), with);
}

}  // namespace ds_kernels::cuda
