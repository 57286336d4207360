// One thread. Operations counted are those of the recurrence, 6 * dim^2 per row and head (S k, S q, update),
// whichever form runs, so forms compare. One row is bound by the state: 8 * dim^2 bytes per head, of more
// heads than fit a cache.
#include <benchmark/benchmark.h>

#include <cmath>
#include <vector>

#include "kernels/delta_net/delta_net.h"
#include "kernels/testing/inputs.h"

namespace thermo {
namespace {

void rows_bench(benchmark::State& state, Isa isa, int n_head_k, int n_head_v, int dim, int n_rows,
                bool uncommitted, bool tree) {
  testing::Inputs in(1);
  const size_t n = static_cast<size_t>(n_rows);
  const int64_t stride = (2 * n_head_k + n_head_v) * dim;
  std::vector<float> qkv =
      in.normal(n * static_cast<size_t>(stride), 1.0f / std::sqrt(static_cast<float>(dim)));
  const std::vector<float> g = in.uniform(n * static_cast<size_t>(n_head_v), -0.2f, 0.0f);
  const std::vector<float> beta = in.uniform(g.size(), 0.1f, 0.9f);
  std::vector<float> s(static_cast<size_t>(n_head_v * dim * dim)),
      out(n * static_cast<size_t>(n_head_v * dim)), delta(out.size());
  std::vector<float> scratch(delta_net_scratch_floats(dim) + 16);
  float* aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64 / 4;
  const auto words = testing::ancestor_words(in.tree(n_rows), std::max(1, (n_rows + 63) / 64));
  const DeltaNetArgs args = {.q = qkv.data(),
                             .k = qkv.data() + n_head_k * dim,
                             .v = qkv.data() + 2 * n_head_k * dim,
                             .g = g.data(),
                             .beta = beta.data(),
                             .q_stride = stride,
                             .k_stride = stride,
                             .v_stride = stride,
                             .state = s.data(),
                             .out = out.data(),
                             .delta = uncommitted ? delta.data() : nullptr,
                             .n_rows = n_rows,
                             .n_head_k = n_head_k,
                             .n_head_v = n_head_v,
                             .dim = dim,
                             .ancestors = tree ? AncestorBits{words.data(), 1} : AncestorBits{},
                             .uncommitted = uncommitted};
  const DeltaNetKernels& kernels = delta_net_kernels(isa);
  for (auto _ : state) {
    kernels.rows(args, 0, n_head_v, aligned);
    benchmark::DoNotOptimize(out.data());
  }
  const double runs = static_cast<double>(state.iterations()), d2 = static_cast<double>(dim) * dim * n_head_v;
  state.counters["GFLOP/s"] = benchmark::Counter(6e-9 * d2 * n_rows * runs, benchmark::Counter::kIsRate);
  if (n_rows == 1) state.counters["GB/s"] = benchmark::Counter(8e-9 * d2 * runs, benchmark::Counter::kIsRate);
}

void commit_bench(benchmark::State& state, Isa isa, int length) {
  constexpr int kHeadsK = 16, kHeadsV = 32, kDim = 128;
  testing::Inputs in(1);
  const size_t n = static_cast<size_t>(length);
  const std::vector<float> k = in.normal(n * kHeadsK * kDim), g = in.uniform(n * kHeadsV, -0.2f, 0.0f);
  const std::vector<float> delta = in.normal(n * kHeadsV * kDim);
  std::vector<float> s(static_cast<size_t>(kHeadsV * kDim * kDim));
  std::vector<int32_t> path(n);
  for (size_t i = 0; i < n; ++i) path[i] = static_cast<int32_t>(i);
  for (auto _ : state) {
    delta_net_kernels(isa).commit(
        {k.data(), g.data(), delta.data(), kHeadsK * kDim, s.data(), path, kHeadsK, kHeadsV, kDim}, 0,
        kHeadsV);
    benchmark::DoNotOptimize(s.data());
  }
  state.counters["GB/s"] = benchmark::Counter(
      8e-9 * kHeadsV * kDim * kDim * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

void conv_bench(benchmark::State& state, Isa isa, int n_rows) {
  constexpr int kChannels = 8192;
  testing::Inputs in(1);
  const std::vector<float> u = in.normal(static_cast<size_t>(n_rows * kChannels)),
                           weight = in.normal(4 * kChannels), old = in.normal(3 * kChannels);
  std::vector<float> out(u.size());
  for (auto _ : state) {
    delta_net_kernels(isa).conv({.u = u.data(),
                                 .weight = weight.data(),
                                 .state = old.data(),
                                 .parents = nullptr,
                                 .out = out.data(),
                                 .n_rows = n_rows,
                                 .taps = 4,
                                 .stride = kChannels},
                                0, kChannels);
    benchmark::DoNotOptimize(out.data());
  }
  state.counters["Gelem/s"] = benchmark::Counter(
      1e-9 * kChannels * n_rows * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

const int registered = [] {
  for (Isa isa : available_isas()) {
    const std::string prefix = std::string("delta_net/") + isa_name(isa);
    for (int n_rows : {1, 2, 4, 6, 8, 16, 64, 512})
      benchmark::RegisterBenchmark(
          (prefix + "/rows" + std::to_string(n_rows)).c_str(),
          [=](benchmark::State& state) { rows_bench(state, isa, 16, 32, 128, n_rows, false, false); });
    for (int n_rows : {4, 22, 64})
      benchmark::RegisterBenchmark(
          (prefix + "/tree" + std::to_string(n_rows)).c_str(),
          [=](benchmark::State& state) { rows_bench(state, isa, 16, 32, 128, n_rows, true, true); });
    for (int n : {1, 8})
      benchmark::RegisterBenchmark((prefix + "/commit" + std::to_string(n)).c_str(),
                                   [=](benchmark::State& state) { commit_bench(state, isa, n); });
    for (int n : {1, 64})
      benchmark::RegisterBenchmark((prefix + "/conv" + std::to_string(n)).c_str(),
                                   [=](benchmark::State& state) { conv_bench(state, isa, n); });
  }
  return 0;
}();

}  // namespace
}  // namespace thermo
