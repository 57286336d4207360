// One thread. Decode reads a cache larger than the third-level cache where the context allows (counter GB/s);
// prefill counts 4 * head_dim operations per visible (query, slot). Compare with the FMA peak: 32 operations
// per cycle with AVX2 or AVX-512 on Zen 4, 64 on recent Intel servers.
#include <benchmark/benchmark.h>

#include <numeric>
#include <vector>

#include "base/host_buffer.h"
#include "kernels/attention/attention.h"
#include "kernels/testing/inputs.h"

namespace thermo {
namespace {

struct Shape {
  const char* name;
  int n_head, n_head_kv, head_dim, window;
};
constexpr Shape kShapes[] = {
    {"qwen35b", 16, 2, 256, 0}, {"laguna_full", 48, 8, 128, 0}, {"laguna_window", 64, 8, 128, 512}};

void attend_bench(benchmark::State& state, Isa isa, const Shape& s, KvType type, int n_past, int n_rows) {
  const size_t n_slots = static_cast<size_t>(n_past + n_rows);
  const size_t head = kv_head_bytes(type, s.head_dim);
  testing::Inputs in(1);
  std::vector<float> q = in.normal(static_cast<size_t>(n_rows * s.n_head * s.head_dim));
  std::vector<float> out(q.size());
  // As in the engine: large pages of the system, pages of the cache from K and V in turn.
  const size_t part = kKvPage * static_cast<size_t>(s.n_head_kv) * head,
               n_pages = (n_slots + kKvPage - 1) / kKvPage;
  HostBuffer cache(n_pages * 2 * part);
  std::vector<int32_t> pages(n_pages);
  for (size_t i = 0; i < n_pages; ++i) pages[i] = static_cast<int32_t>(n_pages - 1 - i);
  const KvView kv = {
      type, type, cache.data(), cache.data() + part, pages.data(), static_cast<int64_t>(2 * part)};
  const AttentionKernels& kernels = attention_kernels(isa);
  const std::vector<float> row = in.normal(static_cast<size_t>(s.n_head_kv * s.head_dim));
  for (int i = 0; i < n_past + n_rows; ++i)
    kernels.kv_append({row.data(), row.data(), kv, i, 1, s.n_head_kv, s.head_dim});
  std::vector<int32_t> positions(static_cast<size_t>(n_rows));
  std::iota(positions.begin(), positions.end(), n_past);
  std::vector<float> scratch(attention_scratch_floats(s.n_head, s.n_head_kv, s.head_dim) + 16);
  float* aligned = scratch.data() + (64 - reinterpret_cast<uintptr_t>(scratch.data()) % 64) % 64 / 4;
  const AttentionArgs args = {q.data(),    kv,         out.data(), positions.data(), n_rows, n_past, s.n_head,
                              s.n_head_kv, s.head_dim, 0.06f,      s.window,         {}};
  const int tile = std::max(1, 64 / (s.n_head / s.n_head_kv));
  for (auto _ : state) {
    for (int r = 0; r < n_rows; r += tile)
      for (int g = 0; g < s.n_head_kv; ++g) kernels.attend(args, r, std::min(n_rows, r + tile), g, aligned);
    benchmark::DoNotOptimize(out.data());
  }
  double pairs = 0.0, slots = 0.0;
  for (int r = 0; r < n_rows; ++r) {
    const int seen = s.window > 0 ? std::min(s.window, n_past + r + 1) : n_past + r + 1;
    pairs += seen;
    slots = std::max(slots, static_cast<double>(seen));
  }
  const double runs = static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] =
      benchmark::Counter(4e-9 * s.head_dim * pairs * s.n_head * runs, benchmark::Counter::kIsRate);
  if (n_rows == 1)
    state.counters["GB/s"] = benchmark::Counter(2e-9 * static_cast<double>(head) * s.n_head_kv * slots * runs,
                                                benchmark::Counter::kIsRate);
}

const int registered = [] {
  for (Isa isa : available_isas())
    for (const Shape& s : kShapes)
      for (KvType type : {KvType::F16, KvType::BF16, KvType::Q8_0, KvType::Q4_0})
        for (const auto& [n_past, n_rows] :
             {std::pair(8192, 1), std::pair(4096, 16), std::pair(0, 512), std::pair(4096, 64)}) {
          const std::string name = std::string("attend/") + isa_name(isa) + "/" + s.name + "/" +
                                   kv_type_name(type) + "/past" + std::to_string(n_past) + "/rows" +
                                   std::to_string(n_rows);
          benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
            attend_bench(state, isa, s, type, n_past, n_rows);
          });
        }
  return 0;
}();

}  // namespace
}  // namespace thermo
