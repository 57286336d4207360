#include "kernels/linear/linear.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/units.h"
#include "kernels/quant_matmul/pack.h"

namespace thermo {
namespace {

constexpr size_t kTaskBytes = 64 * KiB;  // about 5 us of one core's share of memory bandwidth

constexpr ActFormat kFormats[kActFormats] = {ActFormat::F32, ActFormat::Q8x32, ActFormat::Q8x256};

// F32 "quantised" rows are the floats themselves.
size_t format_bytes_per_row(ActFormat format, int max_cols) {
  return format == ActFormat::F32 ? 0 : act_row_bytes(format, max_cols);
}

size_t float_row(int max_cols) {
  return align_up<size_t>(static_cast<size_t>(max_cols), 16);
}

}  // namespace

size_t ActBuffer::planned_bytes(int max_rows, int max_cols) {
  size_t row = float_row(max_cols) * sizeof(float);
  for (ActFormat format : kFormats) row += format_bytes_per_row(format, max_cols);
  return row * static_cast<size_t>(max_rows);
}

ActBuffer::ActBuffer(int max_rows, int max_cols)
    : memory_(planned_bytes(max_rows, max_cols)), max_cols_(max_cols) {
  size_t offset = float_row(max_cols) * sizeof(float) * static_cast<size_t>(max_rows);
  for (ActFormat format : kFormats) {
    offset_[static_cast<int>(format)] = offset;
    offset += format_bytes_per_row(format, max_cols) * static_cast<size_t>(max_rows);
  }
  offset_[static_cast<int>(ActFormat::F32)] = 0;
  set_cols(max_cols);
}

void ActBuffer::set_cols(int n_cols) {
  THERMO_CHECK(n_cols <= max_cols_, "activation rows wider than planned");
  n_cols_ = n_cols;
  float_stride_ = float_row(n_cols);
  for (ActFormat format : kFormats) stride_[static_cast<int>(format)] = act_row_bytes(format, n_cols);
  stride_[static_cast<int>(ActFormat::F32)] = float_stride_ * sizeof(float);
}

void ActBuffer::spread_packed_rows(int n_rows) noexcept {
  if (float_stride_ == static_cast<size_t>(n_cols_)) return;
  for (int r = n_rows - 1; r > 0; --r)
    std::memmove(row(r), packed_row(r), static_cast<size_t>(n_cols_) * sizeof(float));
}

const std::byte* ActBuffer::rows(ActFormat format) const {
  return memory_.data() + offset_[static_cast<int>(format)];
}
size_t ActBuffer::stride(ActFormat format) const {
  return stride_[static_cast<int>(format)];
}

void ActBuffer::quantize(int r, int n_cols, ActFormats formats, const QuantMatmulKernels& kernels) noexcept {
  for (ActFormat format : {ActFormat::Q8x32, ActFormat::Q8x256}) {
    if (!formats.has(format)) continue;
    const int f = static_cast<int>(format);
    kernels.quantize_row(format, row(r), n_cols,
                         memory_.data() + offset_[f] + static_cast<size_t>(r) * stride_[f]);
  }
}

void ActBuffer::scale(int r, int n_cols, ActFormats formats, float scale) noexcept {
  for (ActFormat format : {ActFormat::Q8x32, ActFormat::Q8x256}) {
    if (!formats.has(format)) continue;
    const int f = static_cast<int>(format);
    scale_act_row(format, n_cols, scale, memory_.data() + offset_[f] + static_cast<size_t>(r) * stride_[f]);
  }
  scale_act_row(ActFormat::F32, n_cols, scale, reinterpret_cast<std::byte*>(row(r)));
}

size_t LinearScratch::planned_bytes(int n_threads, size_t max_panel_bytes) {
  const size_t per_thread =
      2 * kTileFloats * sizeof(float) + kTilePanels * align_up<size_t>(max_panel_bytes, 64);
  return per_thread * static_cast<size_t>(n_threads);
}

LinearScratch::LinearScratch(int n_threads, size_t max_panel_bytes)
    : memory_(planned_bytes(n_threads, max_panel_bytes)), thread_bytes_(planned_bytes(1, max_panel_bytes)) {}

float* LinearScratch::tile(int thread, int which) const {
  return reinterpret_cast<float*>(memory_.data() + static_cast<size_t>(thread) * thread_bytes_) +
         which * kTileFloats;
}

std::byte* LinearScratch::panels(int thread) const {
  return memory_.data() + static_cast<size_t>(thread) * thread_bytes_ + 2 * kTileFloats * sizeof(float);
}

int panels_per_task(const Matrix& w, int n_rows, int n_threads) noexcept {
  const int count = n_panels(w.n_rows);
  const int by_bytes = static_cast<int>(std::max<size_t>(1, kTaskBytes / panel_bytes(w.dtype, w.n_cols)));
  const int few = std::min(by_bytes, std::max(1, count / (4 * n_threads)));
  const int many = std::max(1, count / (2 * n_threads));
  return std::min(n_rows < LinearScratch::kTileActs ? few : many, LinearScratch::kTilePanels);
}

void prefetch_tile(const Matrix& w, int panel) noexcept {
  constexpr int kHeadBytes = 4096;
  if (!w.panels || panel >= n_panels(w.n_rows)) return;
  const std::byte* const head = w.panels + static_cast<size_t>(panel) * panel_bytes(w.dtype, w.n_cols);
  for (int offset = 0; offset < kHeadBytes; offset += 64) __builtin_prefetch(head + offset, 0, 2);
}

LoadRange panels_to_load(const Matrix& w, int begin, int end) noexcept {
  const size_t bytes = panel_bytes(w.dtype, w.n_cols);
  if (!w.panels || begin >= end) return {};
  return {w.panels + static_cast<size_t>(begin) * bytes, w.panels + static_cast<size_t>(end) * bytes};
}

void multiply_tile(const Matrix& w, int panel, int tile_panels, const ActRange& acts, float* y,
                   int64_t y_stride, std::byte* panel_scratch, const QuantMatmulKernels& kernels) noexcept {
  const size_t bytes = panel_bytes(w.dtype, w.n_cols);
  const std::byte* panels = nullptr;
  if (w.panels) {
    panels = w.panels + static_cast<size_t>(panel) * bytes;
  } else {
    for (int p = 0; p < tile_panels; ++p)
      pack_panel(w.dtype, w.rows, w.row_stride, w.n_rows, w.n_cols, panel + p,
                 panel_scratch + static_cast<size_t>(p) * bytes);
    panels = panel_scratch;
  }
  const ActFormat format = act_format(w.dtype);
  PanelMatmulArgs args{.dtype = w.dtype,
                       .n_cols = w.n_cols,
                       .panels = panels,
                       .n_panels = tile_panels,
                       .n_rows = std::min(tile_panels * kPanelRows, w.n_rows - panel * kPanelRows),
                       .acts = acts.x->rows(format),
                       .act_stride = acts.x->stride(format),
                       .act_index = acts.index,
                       .n_act = 0,
                       .y = y,
                       .y_stride = y_stride};
  if (!acts.index) args.acts += static_cast<size_t>(acts.first) * args.act_stride;
  for (int begin = 0; begin < acts.n; begin += LinearScratch::kBlockActs) {
    args.n_act = std::min(LinearScratch::kBlockActs, acts.n - begin);
    kernels.matmul(args);
    args.y += args.n_act * y_stride;
    if (args.act_index)
      args.act_index += args.n_act;
    else
      args.acts += static_cast<size_t>(args.n_act) * args.act_stride;
  }
}

void linear_cpu(std::span<const LinearJob> jobs, int n_rows, const int32_t* row_index,
                const LinearContext& context) noexcept {
  // Tasks are numbered through all jobs; a job's first task is the sum of the ones before it.
  constexpr size_t kMaxJobs = 8;
  THERMO_CHECK(jobs.size() <= kMaxJobs, "too many products in one region");
  int tile[kMaxJobs];
  int first_task[kMaxJobs + 1] = {0};
  for (size_t j = 0; j < jobs.size(); ++j) {
    const Matrix& w = *jobs[j].w;
    tile[j] = panels_per_task(w, n_rows, context.pool.size());
    first_task[j + 1] = first_task[j] + ceil_div(n_panels(w.n_rows), tile[j]);
  }
  context.pool.run(first_task[jobs.size()], [&](int task, int thread) {
    size_t j = 0;
    while (task >= first_task[j + 1]) ++j;
    const LinearJob& job = jobs[j];
    const Matrix& w = *job.w;
    const int panel = (task - first_task[j]) * tile[j];
    const int tile_panels = std::min(tile[j], n_panels(w.n_rows) - panel);
    const int row = panel * kPanelRows;
    const int tile_rows = std::min(tile_panels * kPanelRows, w.n_rows - row);
    if (!job.add) {
      multiply_tile(w, panel, tile_panels, {.x = job.x, .index = row_index, .n = n_rows}, job.y + row,
                    job.y_stride, context.scratch.panels(thread), context.kernels);
      return;
    }
    // Multiply a slice into the thread's tile, then add it where it belongs.
    float* const tile_y = context.scratch.tile(thread, 0);
    for (int begin = 0; begin < n_rows; begin += LinearScratch::kTileActs) {
      const int n = std::min(LinearScratch::kTileActs, n_rows - begin);
      multiply_tile(w, panel, tile_panels,
                    {.x = job.x, .first = begin, .index = row_index ? row_index + begin : nullptr, .n = n},
                    tile_y, tile_rows, context.scratch.panels(thread), context.kernels);
      for (int i = 0; i < n; ++i) {
        float* const y = job.y + (begin + i) * job.y_stride + row;
        const float* const t = tile_y + static_cast<int64_t>(i) * tile_rows;
        for (int r = 0; r < tile_rows; ++r) y[r] += t[r];
      }
    }
  });
}

}  // namespace thermo
