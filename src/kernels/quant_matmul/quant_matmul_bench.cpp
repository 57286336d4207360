// Decode: one activation row times a matrix far larger than the caches, which are cold by its size. Reports
// bytes of weights per second and the share of plain reading of the same memory with as many threads.
// Prefill: many activation rows times panels that stay in the caches. Reports multiply-adds per second of one
// core. Pack: GGUF rows to panels. Quantize: activation rows.
//
//     kernels_bench --benchmark_filter='Decode/Q4_K'
#include <benchmark/benchmark.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {
namespace {

constexpr DType kTypes[] = {DType::Q4_K, DType::Q5_K,   DType::Q6_K,   DType::Q8_0,  DType::Q2_K, DType::Q3_K,
                            DType::Q4_0, DType::IQ4_NL, DType::IQ4_XS, DType::MXFP4, DType::F16,  DType::F32};
constexpr size_t kMatrixBytes = 768u << 20;
constexpr int kCols = 2048;
constexpr int kTaskPanels = 32;  // panels of one call, as an engine's task would have

// Bytes that are valid, ordinary numbers in every format (no subnormal scales, which are slow).
std::byte* memory() {
  static std::byte* const bytes = [] {
    void* p = mmap(nullptr, kMatrixBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    madvise(p, kMatrixBytes, MADV_HUGEPAGE);
    uint64_t* words = static_cast<uint64_t*>(p);
    for (size_t i = 0; i < kMatrixBytes / 8; ++i)
      words[i] = (i * 0x9e3779b97f4a7c15u & 0x3f3f3f3f3f3f3f3fu) | 0x1010101010101010u;
    return static_cast<std::byte*>(p);
  }();
  return bytes;
}

uint64_t sum_words(const std::byte* bytes, size_t n) {
  const uint64_t* w = reinterpret_cast<const uint64_t*>(bytes);
  uint64_t sum[8] = {};
  for (size_t i = 0; i < n / 8; i += 8)
    for (size_t j = 0; j < 8; ++j) sum[j] += w[i + j];
  return sum[0] + sum[1] + sum[2] + sum[3] + sum[4] + sum[5] + sum[6] + sum[7];
}

// Bytes per second of plain reading with n threads: the best of some tries.
double read_bandwidth(int n_threads) {
  static std::mutex mutex;
  static std::map<int, double> known;
  const std::lock_guard lock(mutex);
  if (known.count(n_threads)) return known[n_threads];
  const std::byte* bytes = memory();
  double best = 0;
  for (int i = 0; i < 8; ++i) {
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> threads;
    for (int t = 0; t < n_threads; ++t)
      threads.emplace_back([=] {
        const size_t part = kMatrixBytes / static_cast<size_t>(n_threads) / 64 * 64;
        benchmark::DoNotOptimize(sum_words(bytes + static_cast<size_t>(t) * part, part));
      });
    for (std::thread& t : threads) t.join();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    best = std::max(best, static_cast<double>(kMatrixBytes) / time.count());
  }
  return known[n_threads] = best;
}

struct Activations {
  std::byte* data;
  size_t stride;

  Activations(const QuantMatmulKernels& kernels, DType dtype, int n_act)
      : stride(act_row_bytes(act_format(dtype), kCols)) {
    data = static_cast<std::byte*>(std::aligned_alloc(64, stride * static_cast<size_t>(n_act)));
    std::vector<float> x(kCols);
    for (int t = 0; t < n_act; ++t) {
      for (int c = 0; c < kCols; ++c)
        x[static_cast<size_t>(c)] = static_cast<float>((c * 37 + t * 11) % 101) / 50.0f - 1.0f;
      kernels.quantize_row(act_format(dtype), x.data(), kCols, data + stride * static_cast<size_t>(t));
    }
  }
  ~Activations() { std::free(data); }
  Activations(const Activations&) = delete;
  Activations& operator=(const Activations&) = delete;
};

void decode(benchmark::State& state, DType dtype, Isa isa) {
  const QuantMatmulKernels& kernels = quant_matmul_kernels(isa);
  const Activations acts(kernels, dtype, 1);
  const size_t task_bytes = panel_bytes(dtype, kCols) * kTaskPanels;
  const size_t part = kMatrixBytes / static_cast<size_t>(state.threads());
  const std::byte* bytes = memory() + static_cast<size_t>(state.thread_index()) * (part / 64 * 64);
  const double peak = read_bandwidth(state.threads());
  std::vector<float> y(kTaskPanels * kPanelRows);
  size_t at = 0;
  for (auto _ : state) {
    if (at + task_bytes > part) at = 0;
    kernels.matmul({.dtype = dtype,
                    .n_cols = kCols,
                    .panels = bytes + at,
                    .n_panels = kTaskPanels,
                    .n_rows = kTaskPanels * kPanelRows,
                    .acts = acts.data,
                    .act_stride = acts.stride,
                    .act_index = nullptr,
                    .n_act = 1,
                    .y = y.data(),
                    .y_stride = kTaskPanels * kPanelRows});
    at += task_bytes;
  }
  const double done = static_cast<double>(state.iterations()) * static_cast<double>(task_bytes);
  state.counters["bytes"] =
      benchmark::Counter(done, benchmark::Counter::kIsRate, benchmark::Counter::kIs1000);
  state.counters["of_read"] = benchmark::Counter(done / peak, benchmark::Counter::kIsRate);
}

void prefill(benchmark::State& state, DType dtype, Isa isa) {
  const QuantMatmulKernels& kernels = quant_matmul_kernels(isa);
  const int n_act = static_cast<int>(state.range(0));
  const Activations acts(kernels, dtype, n_act);
  std::vector<float> y(static_cast<size_t>(n_act * kTaskPanels * kPanelRows));
  for (auto _ : state) {
    kernels.matmul({.dtype = dtype,
                    .n_cols = kCols,
                    .panels = memory(),
                    .n_panels = kTaskPanels,
                    .n_rows = kTaskPanels * kPanelRows,
                    .acts = acts.data,
                    .act_stride = acts.stride,
                    .act_index = nullptr,
                    .n_act = n_act,
                    .y = y.data(),
                    .y_stride = kTaskPanels * kPanelRows});
  }
  const double macs = static_cast<double>(state.iterations()) * kTaskPanels * kPanelRows * kCols * n_act;
  state.counters["mac"] = benchmark::Counter(macs, benchmark::Counter::kIsRate, benchmark::Counter::kIs1000);
}

void pack(benchmark::State& state, DType dtype) {
  const int n_rows = 4096;
  std::byte* out = static_cast<std::byte*>(std::aligned_alloc(64, panel_bytes(dtype, kCols)));
  int panel = 0;
  for (auto _ : state) {
    pack_panel(dtype, memory(), n_rows, kCols, panel, out);
    panel = (panel + 1) % n_panels(n_rows);
  }
  std::free(out);
  state.SetBytesProcessed(static_cast<int64_t>(state.iterations()) *
                          static_cast<int64_t>(kPanelRows * row_bytes(dtype, kCols)));
}

void quantize(benchmark::State& state, ActFormat format, Isa isa) {
  const std::vector<float> x(kCols, 0.7f);
  std::byte* out = static_cast<std::byte*>(std::aligned_alloc(64, act_row_bytes(format, kCols)));
  for (auto _ : state) {
    quant_matmul_kernels(isa).quantize_row(format, x.data(), kCols, out);
    benchmark::DoNotOptimize(out);
  }
  std::free(out);
  state.SetItemsProcessed(state.iterations() * kCols);
}

const bool kRegistered = [] {
  for (Isa isa : available_isas()) {
    const std::string path = isa_name(isa);
    for (DType dtype : kTypes) {
      const std::string name = std::string(dtype_name(dtype)) + "/" + path;
      benchmark::RegisterBenchmark(("QuantMatmul/Decode/" + name).c_str(), decode, dtype, isa)
          ->Threads(1)
          ->Threads(2)
          ->UseRealTime();
      benchmark::RegisterBenchmark(("QuantMatmul/Prefill/" + name).c_str(), prefill, dtype, isa)
          ->Arg(1)
          ->Arg(2)
          ->Arg(4)
          ->Arg(8)
          ->Arg(16)
          ->Arg(64)
          ->Arg(512)
          ->UseRealTime();
    }
    benchmark::RegisterBenchmark(("QuantMatmul/Quantize/Q8x32/" + path).c_str(), quantize, ActFormat::Q8x32,
                                 isa);
    benchmark::RegisterBenchmark(("QuantMatmul/Quantize/Q8x256/" + path).c_str(), quantize, ActFormat::Q8x256,
                                 isa);
  }
  for (DType dtype : kTypes)
    benchmark::RegisterBenchmark((std::string("QuantMatmul/Pack/") + dtype_name(dtype)).c_str(), pack, dtype);
  return true;
}();

}  // namespace
}  // namespace thermo
