#include <benchmark/benchmark.h>

#include <algorithm>
#include <vector>

#include "kernels/route_topk/route_topk.h"
#include "kernels/testing/inputs.h"

namespace thermo {
namespace {

// 256 experts, 8 used; argument: gating function, and whether there is a bias.
void route_bench(benchmark::State& state) {
  const RouteConfig config = {
      .gating = static_cast<Gating>(state.range(0)), .n_expert = 256, .n_expert_used = 8};
  testing::Inputs in(1);
  const std::vector<float> logits = in.spiky(256, 2.0f), bias = in.normal(256, 0.1f);
  std::vector<float> row(256);
  int32_t ids[8];
  float weights[8];
  for (auto _ : state) {
    std::copy(logits.begin(), logits.end(), row.begin());
    route_topk(config, row.data(), state.range(1) != 0 ? bias.data() : nullptr, ids, weights);
    benchmark::DoNotOptimize(weights);
  }
}
BENCHMARK(route_bench)->ArgsProduct({{1, 2, 3, 4}, {0, 1}});

}  // namespace
}  // namespace thermo
