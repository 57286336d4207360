// One call of sample() on a row of the size of the Qwen3.5 vocabulary; the row stays in the cache, as it does
// after the output projection.
#include "sampling/sampler.h"

#include <benchmark/benchmark.h>

#include <random>

namespace thermo {
namespace {

constexpr int kVocab = 248320;

std::vector<float> row_of_logits() {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0.0f, 2.5f);
  std::vector<float> logits(kVocab);
  for (float& logit : logits) logit = normal(rng);
  logits[777] = 20.0f;
  return logits;
}

void run(benchmark::State& state, SamplingParams params) {
  const std::vector<float> logits = row_of_logits();
  params.seed = 1;
  Sampler sampler(params, kVocab);
  for (int i = 0; i < 1000; ++i) sampler.accept(static_cast<int32_t>(i * 241));
  int64_t position = 0;
  for (auto _ : state) benchmark::DoNotOptimize(sampler.sample(logits, position++));
  state.SetBytesProcessed(state.iterations() * kVocab * static_cast<int64_t>(sizeof(float)));
}

BENCHMARK_CAPTURE(run, greedy, SamplingParams{.temperature = 0.0f});
BENCHMARK_CAPTURE(run, top_k_20_top_p_95, SamplingParams{});
BENCHMARK_CAPTURE(run, top_k_20_with_presence_penalty, SamplingParams{.presence_penalty = 1.5f});
BENCHMARK_CAPTURE(run, top_p_95, SamplingParams{.top_k = 0});
BENCHMARK_CAPTURE(run, min_p_05, SamplingParams{.top_k = 0, .top_p = 1.0f, .min_p = 0.05f});
BENCHMARK_CAPTURE(run, no_cuts, SamplingParams{.top_k = 0, .top_p = 1.0f});

void logprobs(benchmark::State& state) {
  const std::vector<float> logits = row_of_logits();
  for (auto _ : state) benchmark::DoNotOptimize(top_logprobs(logits, 3, 20));
}
BENCHMARK(logprobs);

}  // namespace
}  // namespace thermo
