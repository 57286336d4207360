#include "cli/bench/kernel_rates.h"

#include <algorithm>
#include <chrono>
#include <span>
#include <vector>

#include "base/cpu_info.h"
#include "base/host_buffer.h"
#include "base/thread_pool.h"
#include "base/units.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/prefetch_choice.h"

namespace thermo {
namespace {

constexpr int kCols = 2048;                // as wide as the models in question
constexpr size_t kSmallProduct = 4 * MiB;  // as the projections and experts of a layer
constexpr size_t kCachePerThread = 1 * MiB;
constexpr auto kLongEnough = std::chrono::milliseconds(60);
constexpr auto kTooLong = std::chrono::milliseconds(400);  // for more than one run: a slow machine

// More than the caches hold a useful part of, where there is room.
size_t bytes_from_memory() {
  const uint64_t enough = std::clamp<uint64_t>(2 * cpu_info().l3_bytes, 256 * MiB, GiB);
  return std::max<uint64_t>(64 * MiB, std::min(enough, available_memory_bytes() / 8));
}

size_t bytes_from_cache(const ThreadPool& pool) {
  return std::max<size_t>(2, static_cast<size_t>(pool.size())) * kCachePerThread;
}

// The shortest of a few runs, in seconds: what other programs take away is not the machine's.
template <class Body>
double shortest(const Body& body) {
  double best = 1e30;
  const auto start = std::chrono::steady_clock::now();
  auto now = start;
  for (int i = 0; i < 64 && (i == 0 || now - start < (i < 3 ? kTooLong : kLongEnough)); ++i) {
    const auto before = now;
    body();
    now = std::chrono::steady_clock::now();
    best = std::min(best, std::chrono::duration<double>(now - before).count());
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

// Seconds of products with so many rows, one after the other. All have the same columns.
double time_products(std::span<const Matrix> ws, int n_rows, Isa isa, ThreadPool& pool) {
  const QuantMatmulKernels& kernels = quant_matmul_kernels(isa);
  const LinearScratch scratch(pool.size(), 0);
  ActBuffer x(n_rows, kCols);
  x.set_cols(kCols);
  ActFormats formats;
  formats.add(ws.front());
  for (int r = 0; r < n_rows; ++r) {
    for (int c = 0; c < kCols; ++c) x.row(r)[c] = static_cast<float>((c * 37 + r * 11) % 101) / 50.0f - 1.0f;
    x.quantize(r, kCols, formats, kernels);
  }
  std::vector<float> y(static_cast<size_t>(n_rows) * static_cast<size_t>(ws.front().n_rows));
  return shortest([&] {
    for (const Matrix& w : ws) {
      const LinearJob job{.w = &w, .x = &x, .y = y.data(), .y_stride = w.n_rows};
      linear_cpu({&job, 1}, n_rows, nullptr, {kernels, pool, scratch});
    }
  });
}

// Weights of a model in memory. While they live, products of few rows prefetch as was measured to be best for
// them; then as before, since a model in the same program has a distance of its own.
class WeightsInMemory {
 public:
  WeightsInMemory(DType dtype, Isa isa, ThreadPool& pool) : weights_(dtype, bytes_from_memory(), pool) {
    choose_prefetch({&weights_.matrix(), 1}, quant_matmul_kernels(isa), pool, 0);
  }
  ~WeightsInMemory() { set_prefetch_ahead(ahead_before_); }
  WeightsInMemory(const WeightsInMemory&) = delete;
  WeightsInMemory& operator=(const WeightsInMemory&) = delete;
  const Matrix& matrix() const { return weights_.matrix(); }

 private:
  const int ahead_before_ = prefetch_ahead();
  TestMatrix weights_;
};

double time_product(const Matrix& w, int n_rows, Isa isa, ThreadPool& pool) {
  return time_products({&w, 1}, n_rows, isa, pool);
}

double macs(const Matrix& w, int n_rows) {
  return static_cast<double>(n_rows) * w.n_rows * w.n_cols;
}

}  // namespace

TypeRates measure_matmul(DType dtype, Isa isa, ThreadPool& pool) {
  const WeightsInMemory large(dtype, isa, pool);
  const TestMatrix small(dtype, bytes_from_cache(pool), pool);
  return {
      .one_row = static_cast<double>(large.matrix().n_bytes()) / time_product(large.matrix(), 1, isa, pool),
      .few_rows = macs(large.matrix(), kFewRows) / time_product(large.matrix(), kFewRows, isa, pool),
      .many_rows = macs(small.matrix(), kManyRows) / time_product(small.matrix(), kManyRows, isa, pool)};
}

double measure_cache_gain(DType dtype, Isa isa, double from_memory, ThreadPool& pool) {
  const TestMatrix small(dtype, bytes_from_cache(pool), pool);
  const double rate =
      static_cast<double>(small.matrix().n_bytes()) / time_product(small.matrix(), 1, isa, pool);
  return std::max(1.0, rate / from_memory);
}

double measure_small_product(DType dtype, Isa isa, ThreadPool& pool) {
  const WeightsInMemory large(dtype, isa, pool);
  const size_t panel = panel_bytes(dtype, kCols);
  const int n_panels = large.matrix().n_rows / kPanelRows,
            n_each = std::max(1, static_cast<int>(kSmallProduct / panel));
  std::vector<Matrix> pieces;
  for (int p = 0; p + n_each <= n_panels; p += n_each) {
    pieces.push_back(large.matrix());
    pieces.back().n_rows = n_each * kPanelRows;
    pieces.back().panels += static_cast<size_t>(p) * panel;
  }
  if (pieces.empty()) return 0.0;
  const double whole =
      time_product(large.matrix(), 1, isa, pool) * static_cast<double>(pieces.size()) * n_each / n_panels;
  return std::max(1e-7, (time_products(pieces, 1, isa, pool) - whole) / static_cast<double>(pieces.size()));
}

}  // namespace thermo
