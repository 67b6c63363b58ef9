// LAMB over many tensors, without torch: moments and sums of squares of each chunk; the ratio of each tensor; the
// parameters. Ratios stay on the device. Sums are added in one order, whatever runs first.
#include <algorithm>
#include <vector>

#include <ds_kernels/lamb.h>

#include "multi_tensor.cuh"
#include "reduce.cuh"

namespace ds_kernels::cuda {
namespace {

// What differs between tensors.
struct Own {
  float first, second;
  double step_size;
  int64_t first_part;
  int64_t tensor;
};

using LambTable = Table<kLambLists, Own>;

__device__ __forceinline__ LambStep step_of(LambStep common, const Own& own) {
  common.first = own.first;
  common.second = own.second;
  common.step_size = own.step_size;
  return common;
}

// x as memory of the element's type holds it.
template <class Element>
__device__ __forceinline__ float rounded(float x) {
  Element element;
  narrow(x, element);
  return widen(element);
}

template <class Param, class Grad, class State>
__global__ void __launch_bounds__(kThreads)
    moments_kernel(const __grid_constant__ LambTable table, const LambStep common, LambSums* parts) {
  const Chunk chunk = table.chunk(static_cast<int>(blockIdx.x));
  const Own own = table.extra[chunk.tensor];
  const LambStep step = step_of(common, own);
  const auto* p = static_cast<const Param*>(table.data[kParams][chunk.tensor]) + chunk.begin;
  const auto* g = static_cast<const Grad*>(table.data[kGrads][chunk.tensor]) + chunk.begin;
  auto* m = static_cast<State*>(table.data[kExpAvgs][chunk.tensor]) + chunk.begin;
  auto* v = static_cast<State*>(table.data[kExpAvgSqs][chunk.tensor]) + chunk.begin;
  const bool aligned = is_aligned(p) && is_aligned(g) && is_aligned(m) && is_aligned(v);
  Two<double> sums{};  // of the parameter's squares, of its update's
  for_each_pack<kWidestPack<Param, Grad, State>>(aligned, chunk.count, [&](auto pack, int i) {
    float params[pack], grads[pack], first[pack], second[pack];
    load<pack>(p + i, params);
    load<pack>(g + i, grads);
    load<pack>(m + i, first);
    load<pack>(v + i, second);
#pragma unroll
    for (int j = 0; j < pack; ++j) {
      lamb_moments(grads[j], first[j], second[j], step);
      const double param = params[j];
      const double update = lamb_direction(params[j], rounded<State>(first[j]), rounded<State>(second[j]), step);
      sums.first += param * param;
      sums.second += update * update;
    }
    store<pack>(m + i, first);
    store<pack>(v + i, second);
  });
  sums = over_block<Sum>(sums);
  if (threadIdx.x == 0) parts[own.first_part + chunk.number] = {sums.first, sums.second};
}

// A block for each tensor.
__global__ void __launch_bounds__(kThreads)
    ratios_kernel(const __grid_constant__ LambTable table, const LambStep common, const LambSums* parts,
                  float* ratios) {
  const int tensor = static_cast<int>(blockIdx.x);
  const Own own = table.extra[tensor];
  const int chunks = table.first_chunk[tensor + 1] - table.first_chunk[tensor];
  Two<double> total{};
  for (int i = static_cast<int>(threadIdx.x); i < chunks; i += kThreads) {
    total.first += parts[own.first_part + i].param;
    total.second += parts[own.first_part + i].update;
  }
  total = over_block<Sum>(total);
  if (threadIdx.x == 0) ratios[own.tensor] = static_cast<float>(lamb_ratio({total.first, total.second}, common));
}

template <class Param, class State, class Copy>
__global__ void __launch_bounds__(kThreads)
    params_kernel(const __grid_constant__ LambTable table, const LambStep common, const float* ratios) {
  const Chunk chunk = table.chunk(static_cast<int>(blockIdx.x));
  const Own own = table.extra[chunk.tensor];
  const LambStep step = step_of(common, own);
  const float size = static_cast<float>(step.step_size * ratios[own.tensor]);
  auto* p = static_cast<Param*>(table.data[kParams][chunk.tensor]) + chunk.begin;
  const auto* m = static_cast<const State*>(table.data[kExpAvgs][chunk.tensor]) + chunk.begin;
  const auto* v = static_cast<const State*>(table.data[kExpAvgSqs][chunk.tensor]) + chunk.begin;
  auto* copies = static_cast<Copy*>(table.data[kCopies][chunk.tensor]);
  if (copies) copies += chunk.begin;
  const bool aligned = is_aligned(p) && is_aligned(m) && is_aligned(v) && is_aligned(copies);
  for_each_pack<kWidestPack<Param, State, Copy>>(aligned, chunk.count, [&](auto pack, int i) {
    float params[pack], first[pack], second[pack];
    load<pack>(p + i, params);
    load<pack>(m + i, first);
    load<pack>(v + i, second);
#pragma unroll
    for (int j = 0; j < pack; ++j) params[j] -= size * lamb_direction(params[j], first[j], second[j], step);
    store<pack>(p + i, params);
    if (copies) store<pack>(copies + i, params);
  });
}

struct LambDtypes {
  Dtype params, grads, states, copies;
};

using MomentsKernel = void (*)(LambTable, LambStep, LambSums*);
using ParamsKernel = void (*)(LambTable, LambStep, const float*);

MomentsKernel moments_for(const LambDtypes& dtypes) {
  MomentsKernel kernel = nullptr;
  const bool float_grads = dtypes.grads == Dtype::Float32, float_states = dtypes.states == Dtype::Float32;
  if (dtypes.params == Dtype::Float32 && !float_grads) {
    return dtypes.grads == Dtype::BFloat16 ? moments_kernel<float, BFloat16, float>
                                           : moments_kernel<float, Float16, float>;
  }
  with_types(dtypes.params, float_grads, float_states, [&](auto param, auto grad, auto state) {
    kernel = moments_kernel<decltype(param), decltype(grad), decltype(state)>;
  });
  return kernel;
}

template <class Copy>
ParamsKernel params_for(const LambDtypes& dtypes) {
  const bool float_states = dtypes.states == Dtype::Float32;
  switch (dtypes.params) {
    case Dtype::BFloat16: return float_states ? params_kernel<BFloat16, float, Copy> : params_kernel<BFloat16, BFloat16, Copy>;
    case Dtype::Float16: return float_states ? params_kernel<Float16, float, Copy> : params_kernel<Float16, Float16, Copy>;
    default: return params_kernel<float, float, Copy>;
  }
}

ParamsKernel params_for(const LambDtypes& dtypes) {
  switch (dtypes.copies) {
    case Dtype::BFloat16: return params_for<BFloat16>(dtypes);
    case Dtype::Float16: return params_for<Float16>(dtypes);
    default: return params_for<float>(dtypes);
  }
}

int64_t chunks_of(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

}  // namespace

template <>
void compute(const LambLists& lamb, Dtype, const Stream& stream) {
  // A list of copies that is not there has null addresses.
  std::vector<void*> data(kLambLists * lamb.tensors.size, nullptr);
  std::copy_n(lamb.tensors.data, lamb.tensors.lists * lamb.tensors.size, data.begin());
  TensorLists tensors = lamb.tensors;
  tensors.lists = kLambLists, tensors.data = data.data();
  const Dtype* given = lamb.tensors.dtypes;
  const LambDtypes dtypes{given[kParams], given[kGrads], given[kExpAvgs],
                          lamb.tensors.lists > kCopies ? given[kCopies] : Dtype::Float32};
  int64_t next_part = 0, parts_of_all = 0;
  for (size_t tensor = 0; tensor < tensors.size; ++tensor) parts_of_all += chunks_of(tensors.numels[tensor]);
  auto* const parts = stream.room<LambSums>(parts_of_all);
  const auto own_of = [&](size_t tensor) {
    const LambStep& step = lamb.steps.of(tensor);
    const Own own{step.first, step.second, step.step_size, next_part, static_cast<int64_t>(tensor)};
    next_part += chunks_of(tensors.numels[tensor]);
    return own;
  };
  const LambStep& common = lamb.steps.of(0);
  const MomentsKernel moments = moments_for(dtypes);
  const ParamsKernel params = params_for(dtypes);
  for_each_launch<kLambLists>(tensors, own_of, [&](const LambTable& table) {
    const dim3 chunks(static_cast<unsigned>(table.chunks()));
    launch(stream, moments, chunks, kThreads, table, common, parts);
    launch(stream, ratios_kernel, dim3(static_cast<unsigned>(table.tensors)), kThreads, table, common, parts,
           lamb.ratios);
    launch(stream, params, chunks, kThreads, table, common, lamb.ratios);
  });
}

}  // namespace ds_kernels::cuda
