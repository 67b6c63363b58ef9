// Sharing elements among threads: every element once, shares that are even, no thread in another's way.
#include <ds_kernels/adam.h>
#include <ds_kernels/slices.h>

#include <numeric>
#include <vector>

#include "at_levels.h"

using namespace ds_kernels;

namespace {

const std::vector<std::vector<int64_t>> kSizes = {
    {},
    {0},
    {1},
    {0, 0, 5, 0},
    {1023, 1024, 1025},
    {1, 1, 1, 100'000, 1, 0, 77},
    std::vector<int64_t>(300, 1000),
};

void every_element_once(const std::vector<int64_t>& numels, int64_t threads) {
  std::vector<std::vector<int>> visits;
  for (const int64_t numel : numels) visits.emplace_back(numel, 0);
  const Slices slices(numels);
  int64_t most = 0;
  for (int64_t thread = 0; thread < threads; ++thread) {
    int64_t share = 0;
    slices.visit(slices.units() * thread / threads, slices.units() * (thread + 1) / threads,
                 [&](size_t tensor, int64_t begin, int64_t end) {
                   CHECK(0 <= begin && begin < end && end <= numels[tensor], "slice [%ld, %ld)", long(begin), long(end));
                   for (int64_t i = begin; i < end; ++i) ++visits[tensor][i];
                   share += (end - begin + Slices::kUnit - 1) / Slices::kUnit;
                 });
    most = std::max(most, share);
  }
  CHECK(most <= slices.units() / threads + 1, "a share of %ld units of %ld", long(most), long(slices.units()));
  for (const auto& tensor : visits) {
    for (const int count : tensor) CHECK(count == 1, "an element was visited %d times", count);
  }
}

// Real threads on the real loop: what a thread sanitizer watches.
void threads_share_a_step() {
  const std::vector<int64_t> numels = {5, 40'000, 1, 3000};
  const int64_t total = std::accumulate(numels.begin(), numels.end(), int64_t{0});
  const AdamStep step = adam_step({1e-2, 0.9, 0.999, 1e-8, 0.1, true, true}, 1);
  std::vector<std::vector<float>> results;  // parameters and both moments
  for (const int64_t count : {1, 4}) {
    std::vector<float> p(total, 1.f), g(total, 0.5f), m(total, 0.25f), v(total, 0.125f);
    std::vector<void*> data;
    for (std::vector<float>* list : {&p, &g, &m, &v}) {
      float* next = list->data();
      for (const int64_t numel : numels) data.push_back(next), next += numel;
    }
    const std::vector<Dtype> dtypes(4, Dtype::Float32);
    const TensorLists tensors{4, numels.size(), numels.data(), data.data(), dtypes.data()};
    cpu::best_compute<AdamLists>()({tensors, {&step, false}, false}, Dtype::Float32, cpu::Shares(count, true));
    p.insert(p.end(), m.begin(), m.end());
    p.insert(p.end(), v.begin(), v.end());
    results.push_back(p);
  }
  CHECK(results[0] == results[1], "the number of threads changed a result");
  for (const int64_t i : {int64_t{0}, total - 1}) {
    const float *p = &results[0][i], *m = p + total, *v = m + total;
    CHECK(*p != 1.f && *m != 0.25f && *v != 0.125f, "element %ld was not computed", long(i));
  }
}

}  // namespace

int main() {
  for (const auto& numels : kSizes) {
    for (const int64_t threads : {1, 2, 3, 7, 64}) every_element_once(numels, threads);
  }
  threads_share_a_step();
  return report();
}
