// What a transformer layer does between its matrix products, forward and backward.
//
// A row that sums are taken of belongs to a team of threads, which keeps it in registers; gradients of weights and
// biases are summed by strips of columns, parts of the rows first, and those in one order: the same call gives the same
// bits.

#include <type_traits>

#include <ds_kernels/transformer.h>

#include "dropout.cuh"
#include "row.cuh"

namespace ds_kernels::cuda {
namespace {

constexpr float kInfinity = __builtin_huge_valf();

// x as memory of the element's type holds it.
template <class Element, int pack>
__device__ __forceinline__ void round_to(float (&x)[kPacks][pack]) {
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
#pragma unroll
    for (int j = 0; j < pack; ++j) {
      Element element;
      narrow(x[k][j], element);
      x[k][j] = widen(element);
    }
  }
}

// Calls `body(quad, is_first)` for all quads of a team's row that the calling thread has.
template <int pack, class Body>
__device__ __forceinline__ void for_each_quad(const Team& team, int64_t columns, const Body& body) {
  const int64_t quads = quads_of<pack>(columns);
  if (team.thread < quads) body(Quad<pack>(team.thread, columns), std::true_type{});
  for (int64_t i = team.thread + team.size; i < quads; i += team.size) body(Quad<pack>(i, columns), std::false_type{});
}

// ---- dropout and sum ---------------------------------------------------------------------------------------------

template <class Element, int pack>
__device__ __forceinline__ void gather_sum(const SumRows& s, int64_t row, const Quad<pack>& quad,
                                           float (&x)[kPacks][pack]) {
  quad.load_from(row_of<Element>(s.input, row, s.columns), x);
  float residual[kPacks][pack] = {};
  quad.add_from(row_of<Element>(s.residual, row, s.columns), residual);
  quad.add_from(row_of<Element>(s.bias, 0, 0), x);
  Kept<pack>(s.dropout, row, quad).apply(x);
  quad.for_each_value([](float& to, float from) { to += from; }, x, residual);
}

template <class Element, int pack>
__global__ void sum_kernel(const SumRows s, const unsigned blocks_of_row) {
  const auto [row, index] = Place(blocks_of_row, 1);
  const Quad<pack> quad(index, s.columns);
  float x[kPacks][pack] = {};
  gather_sum<Element>(s, row, quad, x);
  quad.store_to(row_of<Element>(s.sum, row, s.columns), x);
}

template <class Element, int pack>
__global__ void drop_gradient_kernel(const DropoutGradRows g, const unsigned blocks_of_row) {
  const auto [row, index] = Place(blocks_of_row, 1);
  const Quad<pack> quad(index, g.columns);
  float x[kPacks][pack] = {};
  quad.load_from(row_of<Element>(g.grad_output, row, g.columns), x);
  Kept<pack>(g.dropout, row, quad).apply(x);
  quad.store_to(row_of<Element>(g.grad_input, row, g.columns), x);
}

// ---- norms -------------------------------------------------------------------------------------------------------

template <class Element, int pack>
__global__ void __launch_bounds__(kMaxTeam) norm_kernel(const TrainingNormRows n, const int team_size) {
  const Team team(team_size);
  const bool has_row = team.row < n.sum.rows;
  const int64_t columns = has_row ? n.sum.columns : 0;
  auto* sum = row_of<Element>(n.sum.sum, team.row, columns);
  const auto* known = sum ? sum : row_of<Element>(n.sum.input, team.row, columns);
  float held[kPacks][pack] = {};
  // The first quad stays in registers; others are read again from what was summed.
  const auto for_each_kept = [&](const auto& body) {
    for_each_quad<pack>(team, columns, [&](const Quad<pack>& quad, auto is_first) {
      if constexpr (decltype(is_first)::value) {
        body(quad, held);
      } else {
        float x[kPacks][pack] = {};
        quad.load_from(known, x);
        body(quad, x);
      }
    });
  };
  for_each_quad<pack>(team, columns, [&](const Quad<pack>& quad, auto is_first) {
    float x[kPacks][pack] = {};
    if (sum) {
      gather_sum<Element>(n.sum, team.row, quad, x);
      round_to<Element>(x);
      quad.store_to(sum, x);
    } else if (decltype(is_first)::value) {
      quad.load_from(known, x);
    }
    if constexpr (decltype(is_first)::value) {
#pragma unroll
      for (int k = 0; k < kPacks; ++k) {
#pragma unroll
        for (int j = 0; j < pack; ++j) held[k][j] = x[k][j];
      }
    }
  });
  const auto total = [&](const auto& term) {
    float part = 0;
    for_each_kept([&](const Quad<pack>& quad, float(&x)[kPacks][pack]) {
      quad.for_each_value([&](float value) { part += term(value); }, x);
    });
    return team.over<Sum>(part);
  };
  const float count = static_cast<float>(columns > 0 ? columns : 1);
  const float mean = n.rms ? 0.f : total([](float x) { return x; }) / count;
  const float variance = total([=](float x) { return (x - mean) * (x - mean); }) / count;
  const float rstd = 1.f / sqrtf(variance + n.eps);
  if (has_row && team.thread == 0) {
    n.rstd[team.row] = rstd;
    if (!n.rms) n.mean[team.row] = mean;
  }
  auto* output = row_of<Element>(n.output, team.row, columns);
  for_each_kept([&](const Quad<pack>& quad, float(&x)[kPacks][pack]) {
    quad.for_each([&](int k, int64_t column) {
      float weight[pack], bias[pack] = {};
      load<pack>(static_cast<const Element*>(n.weight) + column, weight);
      if (n.bias) load<pack>(static_cast<const Element*>(n.bias) + column, bias);
#pragma unroll
      for (int j = 0; j < pack; ++j) x[k][j] = (x[k][j] - mean) * rstd * weight[j] + bias[j];
    });
    quad.store_to(output, x);
  });
}

// The norm of rows that fit in registers and have nothing dropped. A team has one row after the other and loads the next
// one before it waits for the sums of this one, so that the memory is busy all the time.
template <class Element, int pack, bool is_sum>
__global__ void __launch_bounds__(kMaxRowThreads) held_norm_kernel(const TrainingNormRows n, const int team_size) {
  Team team(team_size);
  const int64_t rows = n.sum.rows, columns = n.sum.columns, stride = team.stride();
  const float share = 1.f / static_cast<float>(columns);
  const bool has_residual = is_sum && n.sum.residual;
  HeldWords<Element, pack> next, next_residual;
  const auto load_next = [&](int64_t of) {
    if (of >= rows) return;
    next.load_from(row_of<Element>(n.sum.input, of, columns), team, columns);
    if (has_residual) next_residual.load_from(row_of<Element>(n.sum.residual, of, columns), team, columns);
  };
  load_next(team.row);
  for (; team.block_has_row(rows); team.row += stride) {
    const int packs = team.row < rows ? static_cast<int>(columns / pack) : 0;
    // As memory holds them: half the registers that floats take.
    HeldWords<Element, pack> held = next;
    // Calls `body(i, position, values)` for the thread's packs.
    const auto for_each_pack = [&](const auto& body) {
#pragma unroll
      for (int i = 0; i < kHeldPacks; ++i) {
        const int index = team.thread + i * team.size;
        if (index >= packs) continue;
        float x[pack];
        held.packs[i].widen_to(x);
        body(i, static_cast<int64_t>(index) * pack, x);
      }
    };
    const auto total = [&](const auto& term) {
      float part = 0;
      for_each_pack([&](int, int64_t, float(&x)[pack]) {
#pragma unroll
        for (int j = 0; j < pack; ++j) part += term(x[j]);
      });
      return team.over<Sum>(part);
    };
    if constexpr (is_sum) {
      auto* sum = row_of<Element>(n.sum.sum, team.row, columns);
      for_each_pack([&](int i, int64_t position, float(&x)[pack]) {
        add<Element>(n.sum.bias, position, x);
        if (has_residual) {
          float residual[pack];
          next_residual.packs[i].widen_to(residual);
#pragma unroll
          for (int j = 0; j < pack; ++j) x[j] += residual[j];
        }
        held.packs[i].narrow_from(x);
        store_words(reinterpret_cast<uint32_t*>(sum + position), held.packs[i].words);
      });
    }
    load_next(team.row + stride);
    const float mean = n.rms ? 0.f : total([](float x) { return x; }) * share;
    const float variance = total([=](float x) { return (x - mean) * (x - mean); }) * share;
    const float rstd = rsqrtf(variance + n.eps);
    if (packs > 0 && team.thread == 0) {
      n.rstd[team.row] = rstd;
      if (!n.rms) n.mean[team.row] = mean;
    }
    auto* output = row_of<Element>(n.output, team.row, columns);
    for_each_pack([&](int, int64_t position, float(&x)[pack]) {
      float weight[pack], bias[pack] = {};
      load<pack>(static_cast<const Element*>(n.weight) + position, weight);
      add<Element>(n.bias, position, bias);
#pragma unroll
      for (int j = 0; j < pack; ++j) x[j] = (x[j] - mean) * rstd * weight[j] + bias[j];
      store<pack>(output + position, x);
    });
  }
}

// Elements as the norm had them before weight and bias.
template <class Element, int pack>
__device__ __forceinline__ void gather_normal(const NormGradRows& g, int64_t row, const Quad<pack>& quad,
                                              const float (&weight)[kPacks][pack], float (&x)[kPacks][pack]) {
  quad.load_from(row_of<Element>(g.rows_in, row, g.columns), x);
  const float rstd = g.rstd[row];
  if (g.mean || g.rms) {
    const float mean = g.rms ? 0.f : g.mean[row];
    quad.for_each_value([=](float& value) { value = (value - mean) * rstd; }, x);
    return;
  }
  float bias[kPacks][pack] = {};
  quad.load_from(static_cast<const Element*>(g.bias), bias);
  quad.for_each_value([](float& value, float w, float b) { value = (value - b) / w; }, x, weight, bias);
}

// The means of g and g n over each row, g being the gradient of the result times weight and n the normalised element.
template <class Element, int pack>
__global__ void __launch_bounds__(kMaxTeam) norm_means_kernel(const NormGradRows g, float* means,
                                                              const int team_size) {
  const Team team(team_size);
  const bool has_row = team.row < g.rows;
  Two<float> sums{};
  for_each_quad<pack>(team, has_row ? g.columns : 0, [&](const Quad<pack>& quad, auto) {
    float grad[kPacks][pack] = {}, weight[kPacks][pack] = {}, normal[kPacks][pack] = {};
    quad.load_from(row_of<Element>(g.grad_output, team.row, g.columns), grad);
    quad.load_from(static_cast<const Element*>(g.weight), weight);
    gather_normal<Element>(g, team.row, quad, weight, normal);
    quad.for_each_value(
        [&](float value, float w, float n) {
          sums.first += value * w;
          sums.second += value * w * n;
        },
        grad, weight, normal);
  });
  sums = team.over<Sum>(sums);
  const float count = static_cast<float>(g.columns > 0 ? g.columns : 1);
  if (!has_row || team.thread != 0) return;
  means[2 * team.row] = g.rms ? 0.f : sums.first / count;
  means[2 * team.row + 1] = sums.second / count;
}

// ---- sums of columns ---------------------------------------------------------------------------------------------

constexpr int kStripThreads = 256, kStripWarps = kStripThreads / kWarpThreads;

// Calls `body(row, quad, sums)` for each row of a part, with the quads of a strip: a warp has one row after the other.
// What was added to `sums` goes to the parts.
template <int arrays, int pack, class Body>
__device__ __forceinline__ void over_strip(int64_t rows, int64_t columns, float* parts, const Body& body) {
  __shared__ float shared[kStripWarps][kWarpThreads * kPacks * kQuadPack];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const int64_t part = blockIdx.y, strip = static_cast<int64_t>(blockIdx.x) * kWarpThreads;
  const int64_t end = rows * (part + 1) / gridDim.y;
  const Quad<pack> quad(strip + lane, columns);
  float sums[arrays][kPacks][pack] = {};
  for (int64_t row = rows * part / gridDim.y + warp; row < end; row += kStripWarps) body(row, quad, sums);
  if (!parts) return;
#pragma unroll
  for (int array = 0; array < arrays; ++array) {
    __syncthreads();  // the array before this one has been read
#pragma unroll
    for (int k = 0; k < kPacks; ++k) {
#pragma unroll
      for (int j = 0; j < pack; ++j) shared[warp][(k * pack + j) * kWarpThreads + lane] = sums[array][k][j];
    }
    __syncthreads();
    for (int i = thread; i < kWarpThreads * kPacks * pack; i += kStripThreads) {
      float total = 0;
      for (int w = 0; w < kStripWarps; ++w) total += shared[w][i];
      const int element = i / kWarpThreads;
      const int64_t column = Quad<pack>(strip + i % kWarpThreads, columns).column(element / pack) + element % pack;
      if (column < columns) parts[(part * arrays + array) * columns + column] = total;
    }
  }
}

constexpr int kNormSums = 3;  // of the norm's gradient, wanted or not

template <class Element, int pack>
__global__ void __launch_bounds__(kStripThreads) norm_gradient_kernel(const NormGradRows g, const float* means,
                                                                      float* parts) {
  over_strip<kNormSums, pack>(g.rows, g.columns, parts, [&](int64_t row, const Quad<pack>& quad, auto& sums) {
    float grad[kPacks][pack] = {}, weight[kPacks][pack] = {}, normal[kPacks][pack] = {}, more[kPacks][pack] = {};
    quad.load_from(row_of<Element>(g.grad_output, row, g.columns), grad);
    quad.load_from(static_cast<const Element*>(g.weight), weight);
    quad.add_from(row_of<Element>(g.grad_sum, row, g.columns), more);
    gather_normal<Element>(g, row, quad, weight, normal);
    const float mean_g = means[2 * row], mean_gn = means[2 * row + 1], rstd = g.rstd[row];
    quad.for_each_value([](float& sum, float value, float n) { sum += value * n; }, sums[0], grad, normal);
    quad.for_each_value([](float& sum, float value) { sum += value; }, sums[1], grad);
    quad.for_each_value(
        [=](float& value, float w, float n, float from) {
          value = layer_norm_slope(value * w, n, mean_g, mean_gn, rstd) + from;
        },
        grad, weight, normal, more);
    quad.store_to(row_of<Element>(g.grad_total, row, g.columns), grad);
    if (g.grad_input) {
      Kept<pack>(g.dropout, row, quad).apply(grad);
      quad.store_to(row_of<Element>(g.grad_input, row, g.columns), grad);
    }
    quad.for_each_value([](float& sum, float value) { sum += value; }, sums[2], grad);
  });
}

// The whole gradient of a norm whose rows fit in registers, with nothing dropped and statistics that are known: each row
// is read once, and the next one before this one's means are waited for, if registers suffice. A thread has the same
// columns of all its team's rows and keeps their sums, `arrays` of the three in their order; each team makes a part of
// them.
constexpr int kGradientThreads = 512;

template <class Element, int pack, int arrays>
__global__ void __launch_bounds__(kGradientThreads) held_norm_gradient_kernel(const NormGradRows g, float* parts,
                                                                              const int team_size) {
  Team team(team_size);
  constexpr bool ahead = arrays < kNormSums;
  const int packs = static_cast<int>(g.columns / pack);
  const int64_t stride = team.stride(), part = team.row;
  const float share = 1.f / static_cast<float>(g.columns);
  float sums[arrays][kHeldPacks][pack] = {};
  HeldWords<Element, pack> next_grad, next_in, weight;
  float next_mean = 0, next_rstd = 0;
  const auto load_next = [&](int64_t of) {
    if (of >= g.rows) return;
    next_grad.load_from(row_of<Element>(g.grad_output, of, g.columns), team, g.columns);
    next_in.load_from(row_of<Element>(g.rows_in, of, g.columns), team, g.columns);
    next_rstd = g.rstd[of];
    if (!g.rms) next_mean = g.mean[of];
  };
  if constexpr (ahead) {
    weight.load_from(static_cast<const Element*>(g.weight), team, g.columns);
    load_next(team.row);
  }
  for (; team.block_has_row(g.rows); team.row += stride) {
    const int here = team.row < g.rows ? packs : 0;
    if constexpr (!ahead) load_next(team.row);
    const HeldWords<Element, pack> grad = next_grad, in = next_in;
    const float mean = next_mean, rstd = next_rstd;
    HeldWords<Element, pack> more;
    if (g.grad_sum && here > 0) more.load_from(row_of<Element>(g.grad_sum, team.row, g.columns), team, g.columns);
    if constexpr (ahead) load_next(team.row + stride);
    // Calls `body(i, pack's index, gradient, weight, normalised element)` for the thread's packs.
    const auto for_each_pack = [&](const auto& body) {
#pragma unroll
      for (int i = 0; i < kHeldPacks; ++i) {
        const int index = team.thread + i * team.size;
        if (index >= here) continue;
        float value[pack], w[pack], normal[pack];
        grad.packs[i].widen_to(value);
        if constexpr (ahead) {
          weight.packs[i].widen_to(w);
        } else {
          load<pack>(static_cast<const Element*>(g.weight) + static_cast<int64_t>(index) * pack, w);
        }
        in.packs[i].widen_to(normal);
#pragma unroll
        for (int j = 0; j < pack; ++j) normal[j] = (normal[j] - mean) * rstd;
        body(i, index, value, w, normal);
      }
    };
    Two<float> means{};
    for_each_pack([&](int, int, float(&value)[pack], float(&w)[pack], float(&normal)[pack]) {
#pragma unroll
      for (int j = 0; j < pack; ++j) {
        const float weighted = value[j] * w[j];
        means.first += weighted;
        means.second += weighted * normal[j];
      }
    });
    means = team.over<Sum>(means);
    const float mean_g = g.rms ? 0.f : means.first * share, mean_gn = means.second * share;
    auto* total = row_of<Element>(g.grad_total, team.row, g.columns);
    for_each_pack([&](int i, int index, float(&value)[pack], float(&w)[pack], float(&normal)[pack]) {
      float from[pack] = {};
      if (g.grad_sum) more.packs[i].widen_to(from);
#pragma unroll
      for (int j = 0; j < pack; ++j) {
        sums[0][i][j] += value[j] * normal[j];
        if constexpr (arrays > 1) sums[1][i][j] += value[j];
        value[j] = layer_norm_slope(value[j] * w[j], normal[j], mean_g, mean_gn, rstd) + from[j];
        if constexpr (arrays > 2) sums[2][i][j] += value[j];
      }
      store<pack>(total + static_cast<int64_t>(index) * pack, value);
    });
  }
#pragma unroll
  for (int array = 0; array < arrays; ++array) {
#pragma unroll
    for (int i = 0; i < kHeldPacks; ++i) {
      const int index = team.thread + i * team.size;
      if (index < packs) {
        store<pack>(parts + (part * arrays + array) * g.columns + static_cast<int64_t>(index) * pack, sums[array][i]);
      }
    }
  }
}

template <class Element, int pack>
__global__ void __launch_bounds__(kStripThreads) drop_gradient_sums_kernel(const DropoutGradRows g, float* parts) {
  over_strip<1, pack>(g.rows, g.columns, parts, [&](int64_t row, const Quad<pack>& quad, auto& sums) {
    float grad[kPacks][pack] = {};
    quad.load_from(row_of<Element>(g.grad_output, row, g.columns), grad);
    Kept<pack>(g.dropout, row, quad).apply(grad);
    quad.store_to(row_of<Element>(g.grad_input, row, g.columns), grad);
    quad.for_each_value([](float& sum, float value) { sum += value; }, sums[0], grad);
  });
}

template <class Element, int pack>
__global__ void __launch_bounds__(kStripThreads) gelu_gradient_kernel(const GeluGradRows g, float* parts) {
  over_strip<1, pack>(g.rows, g.columns, parts, [&](int64_t row, const Quad<pack>& quad, auto& sums) {
    float grad[kPacks][pack] = {}, x[kPacks][pack] = {};
    quad.load_from(row_of<Element>(g.grad_output, row, g.columns), grad);
    quad.load_from(row_of<Element>(g.input, row, g.columns), x);
    quad.add_from(static_cast<const Element*>(g.bias), x);
    const bool tanh = g.tanh;
    quad.for_each_value([=](float& value, float s) { value *= (tanh ? gelu_tanh_slope(s) : gelu_slope(s)).slope; }, grad, x);
    quad.store_to(row_of<Element>(g.grad_input, row, g.columns), grad);
    quad.for_each_value([](float& sum, float value) { sum += value; }, sums[0], grad);
  });
}

// Where sums of columns go, a row each; null where none is wanted.
struct Totals {
  void* rows[kNormSums];
};

// Adds up the parts. Each warp of a block has the same columns of an array, a thread each.
template <class Element>
__global__ void __launch_bounds__(kStripThreads) total_kernel(const Totals totals, const float* sums,
                                                              const int64_t parts, const int arrays,
                                                              const int64_t columns) {
  __shared__ float shared[kStripWarps][kWarpThreads];
  const int thread = static_cast<int>(threadIdx.x), lane = thread % kWarpThreads, warp = thread / kWarpThreads;
  const int array = static_cast<int>(blockIdx.y);
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kWarpThreads + lane;
  if (!totals.rows[array]) return;
  float total = 0;
  if (column < columns) {
#pragma unroll 8
    for (int64_t part = warp; part < parts; part += kStripWarps) {
      total += sums[(part * arrays + array) * columns + column];
    }
  }
  shared[warp][lane] = total;
  __syncthreads();
  auto* row = static_cast<Element*>(totals.rows[array]);
  if (warp > 0 || column >= columns) return;
  for (int w = 1; w < kStripWarps; ++w) total += shared[w][lane];
  narrow(total, row[column]);
}

// ---- bias and gelu -----------------------------------------------------------------------------------------------

template <class Element, int pack>
__global__ void gelu_kernel(const GeluRows g, const unsigned blocks_of_row) {
  const auto [row, column] = Place(blocks_of_row, pack);
  if (column >= g.columns) return;
  float x[pack];
  load<pack>(row_of<Element>(g.input, row, g.columns) + column, x);
  if (g.bias) {
    float bias[pack];
    load<pack>(static_cast<const Element*>(g.bias) + column, bias);
#pragma unroll
    for (int j = 0; j < pack; ++j) x[j] += bias[j];
  }
#pragma unroll
  for (int j = 0; j < pack; ++j) {
    x[j] = g.tanh ? activate<Activation::GeluTanh>(x[j]) : activate<Activation::Gelu>(x[j]);
  }
  store<pack>(row_of<Element>(g.output, row, g.columns) + column, x);
}

// ---- gates -------------------------------------------------------------------------------------------------------

template <class Element, int pack, Activation activation>
__global__ void gate_kernel(const GateRows g, const unsigned blocks_of_row) {
  const auto [row, column] = Place(blocks_of_row, pack);
  if (column >= g.columns) return;
  float x[pack], up[pack];
  load<pack>(row_of<Element>(g.gate, row, g.columns) + column, x);
  load<pack>(row_of<Element>(g.up, row, g.columns) + column, up);
#pragma unroll
  for (int j = 0; j < pack; ++j) x[j] = activate<activation>(x[j]) * up[j];
  store<pack>(row_of<Element>(g.output, row, g.columns) + column, x);
}

template <class Element, int pack, Activation activation>
__global__ void gate_gradient_kernel(const GateGradRows g, const unsigned blocks_of_row) {
  const auto [row, column] = Place(blocks_of_row, pack);
  if (column >= g.columns) return;
  float grad[pack], x[pack], up[pack];
  load<pack>(row_of<Element>(g.grad_output, row, g.columns) + column, grad);
  load<pack>(row_of<Element>(g.gate, row, g.columns) + column, x);
  load<pack>(row_of<Element>(g.up, row, g.columns) + column, up);
#pragma unroll
  for (int j = 0; j < pack; ++j) {
    const auto [value, slope] = slope_of<activation>(x[j]);
    x[j] = grad[j] * up[j] * slope;
    up[j] = grad[j] * value;
  }
  store<pack>(row_of<Element>(g.grad_gate, row, g.columns) + column, x);
  store<pack>(row_of<Element>(g.grad_up, row, g.columns) + column, up);
}

// ---- softmax -----------------------------------------------------------------------------------------------------

template <class Index>
__device__ __forceinline__ int64_t mask_offset(const MaskedSoftmaxRows& s, Index row) {
  int64_t offset = 0;
#pragma unroll
  for (int d = kLeadingDimensions - 1; d >= 0; --d) {
    if (s.sizes[d] == 1) continue;
    const Index size = static_cast<Index>(s.sizes[d]), rest = row / size;
    offset += static_cast<int64_t>(row - rest * size) * s.mask_strides[d];
    row = rest;
  }
  return offset;
}

// The mask's row for a row of the scores. Divisions of 64 bits take longer than the work.
template <class Element>
__device__ __forceinline__ const Element* mask_row_of(const MaskedSoftmaxRows& s, int64_t row) {
  const auto* mask = static_cast<const Element*>(s.mask);
  return mask + (s.rows <= 0xffffffff ? mask_offset(s, static_cast<uint32_t>(row)) : mask_offset(s, row));
}

template <class Element, int pack>
__global__ void __launch_bounds__(kMaxTeam) softmax_kernel(const MaskedSoftmaxRows s, const int team_size) {
  const Team team(team_size);
  const int64_t columns = team.row < s.rows ? s.columns : 0;
  const auto* scores = row_of<Element>(s.scores, team.row, columns);
  const auto* mask = s.mask && columns > 0 ? mask_row_of<Element>(s, team.row) : nullptr;
  const float added = mask && s.mask_is_one ? widen(*mask) : 0.f, scale = s.scale;
  const auto* mask_row = s.mask_is_one ? nullptr : mask;
  const auto gather = [=](const Quad<pack>& quad, float(&x)[kPacks][pack]) {
    quad.load_from(scores, x);
    quad.for_each_value([=](float& value) { value = value * scale + added; }, x);
    quad.add_from(mask_row, x);
  };
  float held[kPacks][pack] = {};
  // The first quad stays in registers, changed by `prepare` and `body`; others are gathered and prepared again.
  const auto for_each_kept = [&](const auto& prepare, const auto& body) {
    for_each_quad<pack>(team, columns, [&](const Quad<pack>& quad, auto is_first) {
      if constexpr (decltype(is_first)::value) {
        body(quad, held);
      } else {
        float x[kPacks][pack] = {};
        gather(quad, x);
        prepare(quad, x);
        body(quad, x);
      }
    });
  };
  const auto as_they_are = [](const Quad<pack>&, float(&)[kPacks][pack]) {};
  if (team.thread < quads_of<pack>(columns)) gather(Quad<pack>(team.thread, columns), held);
  float top = -kInfinity, sum = 0;
  for_each_kept(as_they_are, [&](const Quad<pack>& quad, float(&x)[kPacks][pack]) {
    quad.for_each_value([&](float value) { top = Maximum::combine(value, top); }, x);
  });
  top = team.over<Maximum>(top);
  // Where every score is -inf, all results are 0.
  const float shift = top == -kInfinity ? 0.f : top;
  const auto exponentials = [=](const Quad<pack>& quad, float(&x)[kPacks][pack]) {
    quad.for_each_value([=](float& value) { value = __expf(value - shift); }, x);
  };
  for_each_kept(as_they_are, [&](const Quad<pack>& quad, float(&x)[kPacks][pack]) {
    exponentials(quad, x);
    quad.for_each_value([&](float value) { sum += value; }, x);
  });
  sum = team.over<Sum>(sum);
  const float factor = sum == 0 ? 0.f : 1.f / sum;
  auto* probs = row_of<Element>(s.probs, team.row, columns);
  auto* output = row_of<Element>(s.output, team.row, columns);
  for_each_kept(exponentials, [&](const Quad<pack>& quad, float(&x)[kPacks][pack]) {
    quad.for_each_value([=](float& value) { value *= factor; }, x);
    if (probs) quad.store_to(probs, x);
    Kept<pack>(s.dropout, team.row, quad).apply(x);
    quad.store_to(output, x);
  });
}

template <class Element, int pack>
__global__ void __launch_bounds__(kMaxTeam) softmax_gradient_kernel(const SoftmaxGradRows g, const int team_size) {
  const Team team(team_size);
  const int64_t columns = team.row < g.rows ? g.columns : 0;
  const auto* grad_output = row_of<Element>(g.grad_output, team.row, columns);
  const auto* all_probs = row_of<Element>(g.probs, team.row, columns);
  float held[kPacks][pack] = {}, held_probs[kPacks][pack] = {}, sum = 0;
  const auto gather = [&](const Quad<pack>& quad, float(&grad)[kPacks][pack], float(&probs)[kPacks][pack]) {
    quad.load_from(grad_output, grad);
    quad.load_from(all_probs, probs);
    Kept<pack>(g.dropout, team.row, quad).apply(grad);
  };
  const auto for_each_kept = [&](const auto& body) {
    for_each_quad<pack>(team, columns, [&](const Quad<pack>& quad, auto is_first) {
      if constexpr (decltype(is_first)::value) {
        body(quad, held, held_probs);
      } else {
        float grad[kPacks][pack] = {}, probs[kPacks][pack] = {};
        gather(quad, grad, probs);
        body(quad, grad, probs);
      }
    });
  };
  if (team.thread < quads_of<pack>(columns)) gather(Quad<pack>(team.thread, columns), held, held_probs);
  for_each_kept([&](const Quad<pack>& quad, float(&grad)[kPacks][pack], float(&probs)[kPacks][pack]) {
    quad.for_each_value([&](float value, float p) { sum += value * p; }, grad, probs);
  });
  sum = team.over<Sum>(sum);
  const float scale = g.scale;
  auto* grad_scores = row_of<Element>(g.grad_scores, team.row, columns);
  for_each_kept([&](const Quad<pack>& quad, float(&grad)[kPacks][pack], float(&probs)[kPacks][pack]) {
    quad.for_each_value([=](float& value, float p) { value = p * (value - sum) * scale; }, grad, probs);
    quad.store_to(grad_scores, grad);
  });
}

// ---- launches ----------------------------------------------------------------------------------------------------

// Whether rows can be read in packs from these addresses (null ones do not matter).
template <class... Pointers>
bool fit_packs(int64_t columns, Pointers... pointers) {
  return columns % kQuadPack == 0 && (is_aligned(pointers) && ...);
}

// Calls `with(element, pack)`, of whose arguments the types count.
template <class With>
void with_quads(Dtype dtype, bool packed, const With& with) {
  with_element(dtype, [&](auto element) {
    return packed ? with(element, Constant<kQuadPack>{}) : with(element, Constant<1>{});
  });
}

// Sums of columns are those of parts of the rows first.
int64_t column_parts(int64_t rows) {
  constexpr int64_t kRows = 64, kMost = 1024;
  return std::min(std::max<int64_t>((rows + kRows - 1) / kRows, 1), kMost);
}

// Room for the sums of so many arrays.
float* new_parts(const Stream& stream, int64_t arrays, int64_t rows, int64_t columns) {
  return stream.room<float>(column_parts(rows) * arrays * columns);
}

template <int pack>
dim3 strips(const Stream& stream, int64_t rows, int64_t columns) {
  dim3 blocks = grid(stream, (quads_of<pack>(columns) + kWarpThreads - 1) / kWarpThreads);
  blocks.y = static_cast<unsigned>(column_parts(rows));
  return blocks;
}

template <class Element>
void add_up(const Stream& stream, const Totals& totals, const float* parts, int arrays, int64_t count, int64_t columns) {
  dim3 blocks = grid(stream, (columns + kWarpThreads - 1) / kWarpThreads);
  blocks.y = static_cast<unsigned>(arrays);
  launch(stream, total_kernel<Element>, blocks, kStripThreads, totals, parts, count, arrays, columns);
}

// The norm by the kernel for rows that fit in registers, if it can be.
template <class Element>
bool held_norm(const TrainingNormRows& n, const Stream& stream) {
  constexpr int pack = kPack<Element>;
  const SumRows& s = n.sum;
  const bool packed = in_packs<Element>(s.columns, s.input, s.bias, s.residual, s.sum, n.weight, n.bias, n.output);
  const int64_t packs = s.columns / pack;
  if (!packed || packs == 0 || packs > kHeldPacks * kMaxRowThreads || (s.sum && s.dropout.seed)) return false;
  const Teams teams = row_teams(packs);
  const auto run = [&](auto kernel) {
    launch(stream, kernel, teams.resident_blocks(stream, s.rows), teams.threads, n, teams.size);
  };
  s.sum ? run(held_norm_kernel<Element, pack, true>) : run(held_norm_kernel<Element, pack, false>);
  return true;
}

// The gradient of a norm by one kernel that reads each row once, if it can be.
template <class Element>
bool held_gradient(const NormGradRows& g, const Stream& stream) {
  constexpr int pack = kPack<Element>;
  const bool packed = in_packs<Element>(g.columns, g.grad_output, g.grad_sum, g.rows_in, g.weight, g.grad_total);
  const int64_t packs = g.columns / pack;
  if (!packed || packs > kHeldPacks * kGradientThreads || g.grad_input || !(g.mean || g.rms)) return false;
  const Teams teams = row_teams(packs);
  // Sums of columns by parts of a warp would be too many: one for each few columns of a row.
  if (teams.size < kWarpThreads) return false;
  // How many parts there are depends on shapes alone, so that sums have the same bits on every GPU: so many threads as
  // 132 multiprocessors have, if each takes at least four rows.
  constexpr int64_t kRows = 4, kThreads = 132 * kGradientThreads;
  const int64_t together = teams.threads / teams.size, most = kThreads / teams.threads;
  const int64_t blocks = std::max<int64_t>(std::min((g.rows + kRows * together - 1) / (kRows * together), most), 1);
  const int64_t count = blocks * together;
  const auto run = [&](auto arrays) {
    auto* const parts = stream.room<float>(count * arrays * g.columns);
    launch(stream, held_norm_gradient_kernel<Element, pack, decltype(arrays){}>, grid(stream, blocks), teams.threads, g,
           parts, teams.size);
    const Totals totals{{g.weight_sums, g.bias_sums, g.input_sums}};
    add_up<Element>(stream, totals, parts, arrays, count, g.columns);
  };
  if (g.input_sums) {
    run(Constant<3>{});
  } else if (g.bias_sums) {
    run(Constant<2>{});
  } else {
    run(Constant<1>{});
  }
  return true;
}

}  // namespace

template <>
void compute(const SumRows& s, Dtype dtype, const Stream& stream) {
  if (s.columns == 0) return;
  const auto run = [&](auto element, auto pack) {
    const Share share(quads_of<pack>(s.columns));
    launch(stream, sum_kernel<decltype(element), pack>, share.blocks(stream, s.rows), share.threads, s,
           share.blocks_of_row);
  };
  with_quads(dtype, fit_packs(s.columns, s.input, s.bias, s.residual, s.sum), run);
}

template <>
void compute(const TrainingNormRows& n, Dtype dtype, const Stream& stream) {
  bool done = false;
  with_element(dtype, [&](auto element) { done = held_norm<decltype(element)>(n, stream); });
  if (done) return;
  const auto run = [&](auto element, auto pack) {
    const Teams teams(quads_of<pack>(n.sum.columns));
    launch(stream, norm_kernel<decltype(element), pack>, teams.blocks(stream, n.sum.rows), teams.threads, n, teams.size);
  };
  const SumRows& s = n.sum;
  with_quads(dtype, fit_packs(s.columns, s.input, s.bias, s.residual, s.sum, n.weight, n.bias, n.output), run);
}

template <>
void compute(const NormGradRows& g, Dtype dtype, const Stream& stream) {
  if (g.columns == 0) return;
  bool done = false;
  with_element(dtype, [&](auto element) { done = held_gradient<decltype(element)>(g, stream); });
  if (done) return;
  // Two means for each row.
  auto* const means = stream.room<float>(2 * g.rows);
  float* const parts = new_parts(stream, kNormSums, g.rows, g.columns);
  const auto take_means = [&](auto element, auto pack) {
    const Teams teams(quads_of<pack>(g.columns));
    launch(stream, norm_means_kernel<decltype(element), pack>, teams.blocks(stream, g.rows), teams.threads, g,
           means, teams.size);
  };
  with_quads(dtype, fit_packs(g.columns, g.grad_output, g.rows_in, g.weight, g.bias), take_means);
  const auto gradients = [&](auto element, auto pack) {
    launch(stream, norm_gradient_kernel<decltype(element), pack>, strips<pack>(stream, g.rows, g.columns), kStripThreads,
           g, means, parts);
    const Totals totals{{g.weight_sums, g.bias_sums, g.input_sums}};
    add_up<decltype(element)>(stream, totals, parts, kNormSums, column_parts(g.rows), g.columns);
  };
  const bool packed =
      fit_packs(g.columns, g.grad_output, g.grad_sum, g.rows_in, g.weight, g.bias, g.grad_total, g.grad_input);
  with_quads(dtype, packed, gradients);
}

template <>
void compute(const DropoutGradRows& g, Dtype dtype, const Stream& stream) {
  if (g.columns == 0) return;
  if (!g.sums) {
    const auto run = [&](auto element, auto pack) {
      const Share share(quads_of<pack>(g.columns));
      launch(stream, drop_gradient_kernel<decltype(element), pack>, share.blocks(stream, g.rows), share.threads, g,
             share.blocks_of_row);
    };
    return with_quads(dtype, fit_packs(g.columns, g.grad_output, g.grad_input), run);
  }
  float* const parts = new_parts(stream, 1, g.rows, g.columns);
  const auto run = [&](auto element, auto pack) {
    launch(stream, drop_gradient_sums_kernel<decltype(element), pack>, strips<pack>(stream, g.rows, g.columns),
           kStripThreads, g, parts);
    add_up<decltype(element)>(stream, {{g.sums}}, parts, 1, column_parts(g.rows), g.columns);
  };
  with_quads(dtype, fit_packs(g.columns, g.grad_output, g.grad_input), run);
}

template <>
void compute(const GeluRows& g, Dtype dtype, const Stream& stream) {
  if (g.columns == 0) return;
  with_element(dtype, [&](auto element) {
    using Element = decltype(element);
    const auto run = [&](auto pack) {
      const Share share(g.columns / pack);
      launch(stream, gelu_kernel<Element, pack>, share.blocks(stream, g.rows), share.threads, g, share.blocks_of_row);
    };
    if (in_packs<Element>(g.columns, g.input, g.bias, g.output)) {
      run(Constant<kPack<Element>>{});
    } else {
      run(Constant<1>{});
    }
  });
}

template <>
void compute(const GeluGradRows& g, Dtype dtype, const Stream& stream) {
  if (g.columns == 0) return;
  float* const parts = g.sums ? new_parts(stream, 1, g.rows, g.columns) : nullptr;
  const auto run = [&](auto element, auto pack) {
    launch(stream, gelu_gradient_kernel<decltype(element), pack>, strips<pack>(stream, g.rows, g.columns), kStripThreads,
           g, parts);
    if (parts) add_up<decltype(element)>(stream, {{g.sums}}, parts, 1, column_parts(g.rows), g.columns);
  };
  with_quads(dtype, fit_packs(g.columns, g.grad_output, g.input, g.bias, g.grad_input), run);
}

template <>
void compute(const GateRows& g, Dtype dtype, const Stream& stream) {
  with_activation(g.activation, [&](auto activation) {
    const auto kernel_of = [](auto element, auto pack) {
      return gate_kernel<decltype(element), pack, decltype(activation)::value>;
    };
    launch_in_packs(stream, g, dtype, kernel_of, g.gate, g.up, g.output);
  });
}

template <>
void compute(const GateGradRows& g, Dtype dtype, const Stream& stream) {
  with_activation(g.activation, [&](auto activation) {
    const auto kernel_of = [](auto element, auto pack) {
      return gate_gradient_kernel<decltype(element), pack, decltype(activation)::value>;
    };
    launch_in_packs(stream, g, dtype, kernel_of, g.grad_output, g.gate, g.up, g.grad_gate, g.grad_up);
  });
}

template <>
void compute(const MaskedSoftmaxRows& s, Dtype dtype, const Stream& stream) {
  if (s.columns == 0) return;
  bool packed = fit_packs(s.columns, s.scores, s.output, s.probs);
  if (s.mask && !s.mask_is_one) {
    packed = packed && is_aligned(s.mask);
    for (const int64_t stride : s.mask_strides) packed = packed && stride % kQuadPack == 0;
  }
  const auto run = [&](auto element, auto pack) {
    const Teams teams(quads_of<pack>(s.columns));
    launch(stream, softmax_kernel<decltype(element), pack>, teams.blocks(stream, s.rows), teams.threads, s, teams.size);
  };
  with_quads(dtype, packed, run);
}

template <>
void compute(const SoftmaxGradRows& g, Dtype dtype, const Stream& stream) {
  if (g.columns == 0) return;
  const auto run = [&](auto element, auto pack) {
    const Teams teams(quads_of<pack>(g.columns));
    launch(stream, softmax_gradient_kernel<decltype(element), pack>, teams.blocks(stream, g.rows), teams.threads, g,
           teams.size);
  };
  with_quads(dtype, fit_packs(g.columns, g.grad_output, g.probs, g.grad_scores), run);
}

}  // namespace ds_kernels::cuda
