// Products of whole matrices with the rows of a step, on all threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/host_buffer.h"
#include "base/load_line.h"
#include "base/thread_pool.h"
#include "kernels/linear/matrix.h"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {

// The set of activation forms that some matrices need.
class ActFormats {
 public:
  void add(const Matrix& w) {
    if (!w.empty()) bits_ |= 1u << static_cast<int>(act_format(w.dtype));
  }
  bool has(ActFormat format) const { return (bits_ >> static_cast<int>(format)) & 1; }

 private:
  unsigned bits_ = 0;
};

// Activation rows, as floats and in the quantised forms. Owns memory for max_rows x max_cols.
class ActBuffer {
 public:
  ActBuffer() = default;
  ActBuffer(int max_rows, int max_cols);
  static size_t planned_bytes(int max_rows, int max_cols);

  // Every row from here on has n_cols columns.
  void set_cols(int n_cols);
  int n_cols() const { return n_cols_; }
  float* row(int r) { return floats() + static_cast<size_t>(r) * float_stride_; }
  const float* row(int r) const { return const_cast<ActBuffer*>(this)->row(r); }
  // For what writes rows without gaps: where row r begins, and, once all n_rows are there, the move to row().
  float* packed_row(int r) { return floats() + static_cast<size_t>(r) * static_cast<size_t>(n_cols_); }
  void spread_packed_rows(int n_rows) noexcept;
  // Brings the first n_cols of row r into the given forms; after its floats are final, before a product of
  // that many columns reads them.
  void quantize(int r, int n_cols, ActFormats formats, const QuantMatmulKernels& kernels) noexcept;

  // Multiplies row r with a number, in these forms and as floats. Its codes stay: they are those of the row
  // before, whatever the number.
  void scale(int r, int n_cols, ActFormats formats, float scale) noexcept;

  const std::byte* rows(ActFormat format) const;
  size_t stride(ActFormat format) const;

 private:
  float* floats() { return memory_.as<float>(); }

  HostBuffer memory_;
  int max_cols_ = 0, n_cols_ = 0;
  size_t float_stride_ = 0;
  size_t offset_[kActFormats] = {};
  size_t stride_[kActFormats] = {};
};

// Per-thread working memory of linear_cpu and expert_ffn_cpu.
class LinearScratch {
 public:
  LinearScratch() = default;
  // `max_panel_bytes`: the largest panel packed on the fly; 0 when everything is repacked.
  LinearScratch(int n_threads, size_t max_panel_bytes);
  static size_t planned_bytes(int n_threads, size_t max_panel_bytes);

  float* tile(int thread, int which) const;  // kTileFloats floats; which: 0 or 1
  std::byte* panels(int thread) const;       // kTilePanels panels

  static constexpr int kTilePanels = 16;
  static constexpr int kTileActs = 64;    // activation rows multiplied into a tile at a time
  static constexpr int kBlockActs = 128;  // activation rows that stay in the L2 cache while a tile passes
  static constexpr int kTileFloats = kTilePanels * kPanelRows * kTileActs;

 private:
  HostBuffer memory_;
  size_t thread_bytes_ = 0;
};

// Everything a product needs besides its operands.
struct LinearContext {
  const QuantMatmulKernels& kernels;
  ThreadPool& pool;
  const LinearScratch& scratch;
};

struct LinearJob {
  const Matrix* w;
  const ActBuffer* x;
  float* y;          // y[r * y_stride + output]
  int64_t y_stride;  // floats
  bool add = false;  // y += W x instead of y = W x
};

// Several products over the same n_rows activation rows in one parallel region. `row_index` picks the
// activation rows (nullptr: 0, 1, 2, ...).
void linear_cpu(std::span<const LinearJob> jobs, int n_rows, const int32_t* row_index,
                const LinearContext& context) noexcept;

// Which activation rows a tile is multiplied with: `index` (n of them), or first, first + 1, ...
struct ActRange {
  const ActBuffer* x;
  int first = 0;
  const int32_t* index = nullptr;
  int n = 0;
};

// One tile, on the calling thread: panels [panel, panel + n_panels) of w into y[i * y_stride + row - 16 *
// panel], packing on the fly where the matrix is not repacked. n_panels <= kTilePanels.
void multiply_tile(const Matrix& w, int panel, int n_panels, const ActRange& acts, float* y, int64_t y_stride,
                   std::byte* panel_scratch, const QuantMatmulKernels& kernels) noexcept;

// Starts loading the head of a tile that will be multiplied soon. The processor follows a stream once it has
// seen it, but experts and tiles start at unrelated addresses. Measured once, noisily:
// +8 to +11 % in a prefill of 128 tokens.
void prefetch_tile(const Matrix& w, int panel) noexcept;

// The memory of panels [begin, end), for a thread that has time before it multiplies them. Empty where they
// are not packed.
LoadRange panels_to_load(const Matrix& w, int begin, int end) noexcept;

// Panels per task. Few rows: about 64 KiB of weights, so that all threads have work and nobody waits long at
// the end. Many rows: as many panels as still keep all threads busy, because a task reads all activation rows
// once.
int panels_per_task(const Matrix& w, int n_rows, int n_threads) noexcept;

}  // namespace thermo
