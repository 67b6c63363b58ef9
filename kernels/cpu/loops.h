// What a family's loops need besides their maths: how they are called, the loop for a dtype, sharing work among threads.
//
// A family's <family>.cpp defines, for each kind of work that <ds_kernels/<family>.h> has,
//
//   template <> void compute(const NormRows& work, Dtype dtype, const Threads& threads) { ... }
#pragma once

#include <ds_kernels/tensor_lists.h>

#include "threads.h"

namespace ds_kernels::cpu {
inline namespace DS_KERNELS_CPU_LEVEL {

// Does a piece of work at this instruction-set level. The binding takes the best level that the CPU has (levels.h).
template <class Work>
void compute(const Work& work, Dtype dtype, const Threads& threads);

// For a binding with code of its own: the loops that it shares among threads itself, as a struct of function pointers.
template <class Loops>
const Loops& loops();

// ---- from dtypes to a loop -----------------------------------------------------------------------------------------
//
// A loop's name must be the family's own: it is part of these functions' names, and the linker merges functions of one
// name.

// `Loop<Element>::run` for elements of `dtype`.
template <template <class> class Loop>
decltype(&Loop<float>::run) by_dtype(Dtype dtype) {
  switch (dtype) {
    case Dtype::BFloat16: return Loop<BFloat16>::run;
    case Dtype::Float16: return Loop<Float16>::run;
    default: return Loop<float>::run;
  }
}

template <template <class, class, class> class Update>
using UpdateLoop = decltype(&Update<float, float, float>::run);

template <template <class, class, class> class Update, class Param>
UpdateLoop<Update> by_dtypes_of(bool float_grads, bool float_states) {
  if (float_grads) return float_states ? Update<Param, float, float>::run : Update<Param, float, Param>::run;
  return float_states ? Update<Param, Param, float>::run : Update<Param, Param, Param>::run;
}

// `Update<Param, Grad, State>::run` for lists of parameters, gradients and states, the last two of the parameters' dtype
// or float.
template <template <class, class, class> class Update>
UpdateLoop<Update> by_dtypes(const TensorLists& tensors) {
  const bool float_grads = tensors.is_float(1), float_states = tensors.is_float(2);
  switch (tensors.dtypes[0]) {
    case Dtype::BFloat16: return by_dtypes_of<Update, BFloat16>(float_grads, float_states);
    case Dtype::Float16: return by_dtypes_of<Update, Float16>(float_grads, float_states);
    default: return Update<float, float, float>::run;
  }
}

// ---- sharing work among threads ------------------------------------------------------------------------------------

// Calls `body(first, last)` on shares of `items` items, at least `grain` of them in each if it can be helped.
template <class Body>
void share(const Threads& threads, int64_t items, int64_t grain, const Body& body) {
  const auto call = [](const void* context, int64_t first, int64_t last, void*) {
    (*static_cast<const Body*>(context))(first, last);
  };
  threads.run(items, grain, 0, call, &body);
}

// Calls `loop(work, first, last)` on shares of the work's rows.
template <class Loop, class Work>
void share_rows(const Threads& threads, Loop loop, const Work& work) {
  share(threads, work.rows, grain_of(work.columns),
        [loop, &work](int64_t first, int64_t last) { loop(work, first, last); });
}

// Calls `body(first, last, scratch)`; `scratch` has room for so many elements of type T, zeros at first.
template <class T, class Body>
void share_with_scratch(const Threads& threads, int64_t items, int64_t grain, int64_t room, const Body& body) {
  const auto call = [](const void* context, int64_t first, int64_t last, void* scratch) {
    (*static_cast<const Body*>(context))(first, last, static_cast<T*>(scratch));
  };
  threads.run(items, grain, room * static_cast<int64_t>(sizeof(T)), call, &body);
}

// Calls `loop(work, first, last, scratch)` on shares of the work's rows; `scratch` is one row of floats.
template <class Loop, class Work>
void share_rows_with_scratch(const Threads& threads, Loop loop, const Work& work) {
  share_with_scratch<float>(threads, work.rows, grain_of(work.columns), work.columns,
                            [loop, &work](int64_t first, int64_t last, float* scratch) {
                              loop(work, first, last, scratch);
                            });
}

// Calls `body(at, tensor, count)` on slices of `count` elements of one tensor; `at[list]` is where the slice begins in
// each list.
template <size_t lists, class Body>
void share_elements(const Threads& threads, const TensorLists& tensors, const Body& body) {
  const auto one = [&](size_t tensor, int64_t begin, int64_t end) {
    void* at[lists];
    for (size_t list = 0; list < lists; ++list) {
      const int64_t size = tensors.is_float(list) ? sizeof(float) : sizeof(BFloat16);
      at[list] = static_cast<char*>(tensors.at(list, tensor)) + begin * size;
    }
    body(at, tensor, end - begin);
  };
  using One = decltype(one);
  const auto call = [](const void* context, size_t tensor, int64_t begin, int64_t end) {
    (*static_cast<const One*>(context))(tensor, begin, end);
  };
  threads.run_slices(tensors.numels, tensors.size, call, &one);
}

}  // namespace DS_KERNELS_CPU_LEVEL
}  // namespace ds_kernels::cpu
