#include "cli/bench/kernel_rates.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "base/host_buffer.h"
#include "base/thread_pool.h"
#include "base/units.h"
#include "kernels/linear/linear.h"

namespace thermo {
namespace {

constexpr int kCols = 2048;                // as wide as the models in question
constexpr size_t kFromMemory = 128 * MiB;  // far more than the caches of one processor hold for long
constexpr size_t kFromCache = 2 * MiB;
constexpr auto kLongEnough = std::chrono::milliseconds(60);

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The shortest of a few runs, in seconds: what other programs take away is not the machine's.
template <class Body>
double shortest(const Body& body) {
  double best = 1e30;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 64 && (i < 3 || std::chrono::steady_clock::now() - start < kLongEnough); ++i) {
    const auto before = std::chrono::steady_clock::now();
    body();
    best = std::min(best, seconds_since(before));
  }
  return std::max(best, 1e-9);
}

// A packed matrix of about so many bytes. Its bits are no numbers anybody chose, but ordinary ones.
class TestMatrix {
 public:
  TestMatrix(DType dtype, size_t n_bytes, ThreadPool& pool) {
    const size_t panel = panel_bytes(dtype, kCols);
    const size_t n = std::max<size_t>(1, n_bytes / panel);
    memory_ = HostBuffer(n * panel);
    pool.run(static_cast<int>(n), [&](int p, int) {
      auto* const words = reinterpret_cast<uint64_t*>(memory_.data() + static_cast<size_t>(p) * panel);
      for (size_t i = 0; i < panel / sizeof(uint64_t); ++i)
        words[i] = (i * 0x9e3779b97f4a7c15u & 0x3f3f3f3f3f3f3f3fu) | 0x1010101010101010u;
    });
    matrix_ = {.dtype = dtype,
               .n_rows = static_cast<int>(n) * kPanelRows,
               .n_cols = kCols,
               .panels = memory_.data(),
               .rows = nullptr};
  }
  const Matrix& matrix() const { return matrix_; }

 private:
  HostBuffer memory_;
  Matrix matrix_;
};

// Seconds of a product with so many rows.
double time_product(const Matrix& w, int n_rows, Isa isa, ThreadPool& pool) {
  const QuantMatmulKernels& kernels = quant_matmul_kernels(isa);
  const LinearScratch scratch(pool.size(), 0);
  ActBuffer x(n_rows, kCols);
  x.set_cols(kCols);
  ActFormats formats;
  formats.add(w);
  for (int r = 0; r < n_rows; ++r) {
    for (int c = 0; c < kCols; ++c) x.row(r)[c] = static_cast<float>((c * 37 + r * 11) % 101) / 50.0f - 1.0f;
    x.quantize(r, kCols, formats, kernels);
  }
  std::vector<float> y(static_cast<size_t>(n_rows) * static_cast<size_t>(w.n_rows));
  const LinearJob job{.w = &w, .x = &x, .y = y.data(), .y_stride = w.n_rows};
  return shortest([&] { linear_cpu({&job, 1}, n_rows, nullptr, {kernels, pool, scratch}); });
}

double macs(const Matrix& w, int n_rows) {
  return static_cast<double>(n_rows) * w.n_rows * w.n_cols;
}

}  // namespace

TypeRates measure_matmul(DType dtype, Isa isa, ThreadPool& pool) {
  const TestMatrix large(dtype, kFromMemory, pool);
  const TestMatrix small(dtype, kFromCache, pool);
  return {
      .one_row = static_cast<double>(large.matrix().n_bytes()) / time_product(large.matrix(), 1, isa, pool),
      .few_rows = macs(large.matrix(), kFewRows) / time_product(large.matrix(), kFewRows, isa, pool),
      .many_rows = macs(small.matrix(), kManyRows) / time_product(small.matrix(), kManyRows, isa, pool)};
}

double measure_cache_gain(DType dtype, Isa isa, double from_memory, ThreadPool& pool) {
  const TestMatrix small(dtype, kFromCache, pool);
  const double rate =
      static_cast<double>(small.matrix().n_bytes()) / time_product(small.matrix(), 1, isa, pool);
  return std::max(1.0, rate / from_memory);
}

double measure_region(ThreadPool& pool) {
  // Every thread has to come, as where there is work for all; one that has no core is not waited for.
  constexpr auto kPatience = std::chrono::microseconds(50);
  const int n_threads = pool.size();
  return shortest([&] {
    std::atomic<int> here{0};
    pool.run(n_threads, [&](int, int) {
      const auto start = std::chrono::steady_clock::now();
      here.fetch_add(1);
      while (here.load() < n_threads && std::chrono::steady_clock::now() - start < kPatience) {
      }
    });
  });
}

}  // namespace thermo
