// Products of up to 64 rows: the types that has_dot() knows, and how a sum is cut.
#include "kernels/linear/linear_few.cuh"

#include <algorithm>

#include "kernels/linear/linear_few_cuda.h"
#include "kernels/linear/linear_stream.cuh"

namespace thermo {
namespace {

bool is_big(DType dtype) {
  return act_group_cols(dtype) == 256;
}

}  // namespace

int linear_few_parts(const DeviceMatrix& w) noexcept {
  constexpr int kPanels = 600, kParts = 4, kLeastChunks = 2;
  return ceil_div(w.n_rows, 16) < kPanels && dot_chunks(w.n_cols) >= kParts * kLeastChunks ? kParts : 1;
}

// Until there are warps for a large card: 1400 are 10 for each of 132 multiprocessors. What comes in parts is
// not cut again.
SumCuts linear_sum_cuts(const DeviceLinearArgs& args) noexcept {
  int n_panels = 0, n_parts = 1;
  for (int j = 0; j < args.n_jobs; ++j) {
    const DeviceLinearJob& job = args.jobs[j];
    n_panels += ceil_div(job.w.n_rows, 16);
    const int parts = job.add ? linear_few_parts(job.w) : job.k_parts;
    if (parts > n_parts) n_parts = parts;
  }
  SumCuts cuts;
  while (1 << cuts.parts_log2 < n_parts) ++cuts.parts_log2;
  const int n_chunks = dot_chunks(args.jobs[0].w.n_cols);
  if (n_parts == 1 && n_panels < 1400 && n_chunks >= 4)
    cuts.cuts_log2 = n_panels >= 300 || n_chunks < 8 ? 1 : 2;
  return cuts;
}

bool linear_few_possible(const DeviceLinearArgs& args, int job) noexcept {
  const DeviceMatrix& w = args.jobs[job].w;
  return args.n_acts <= kMaxFewActs && !is_float_type(w.dtype) &&
         (is_big(w.dtype) ? args.x.blocks256 : args.x.blocks32) != nullptr;
}

namespace {

// 0: a type that is not read there.
int stream_chunk_bytes(const DeviceLinearArgs& args) {
  int bytes = 0;
  for (int j = 0; j < args.n_jobs; ++j) {
    if (!has_dot(args.jobs[j].w.dtype)) return 0;
    bytes = std::max(bytes, 64 + args.jobs[j].w.body_bytes);
  }
  return bytes;
}

}  // namespace

bool linear_rounds_row(const DeviceMatrix& w) noexcept {
  DeviceLinearArgs args;
  args.jobs[0] = {.w = w, .k_parts = linear_few_parts(w)};
  args.n_jobs = args.n_acts = 1;
  const int chunk_bytes = stream_chunk_bytes(args);
  return chunk_bytes > 0 && plan_stream<1, true>(args, linear_sum_cuts(args), chunk_bytes);
}

// Many columns, so that a warp has enough to do for each row; or so many panels, those of a head, that every
// warp gets several.
bool linear_stream_cuda(const DeviceLinearArgs& args, StreamView stream) noexcept {
  constexpr int kLeastChunks = 16, kMostRows = 2, kHeadPanels = 64;
  const int chunk_bytes = stream_chunk_bytes(args);
  if (chunk_bytes == 0) return false;
  const SumCuts cuts = linear_sum_cuts(args);
  const DeviceMatrix& w = args.jobs[0].w;
  const bool is_head = args.n_jobs == 1 && !cuts.any() && args.n_acts > 1 &&
                       ceil_div(w.n_rows, 16) >= kHeadPanels * device_in_use().n_multiprocessors;
  if (!is_head && (args.n_acts > kMostRows || dot_chunks(w.n_cols) < kLeastChunks)) return false;
  if (args.n_acts == 1) return launch_stream<1, true>(args, cuts, chunk_bytes, stream);
  if (args.n_acts <= 8) return launch_stream<1>(args, cuts, chunk_bytes, stream);
  if (args.n_acts <= 16) return launch_stream<2>(args, cuts, chunk_bytes, stream);
  return launch_stream<4>(args, cuts, chunk_bytes, stream);
}

void linear_few_cuda(const DeviceLinearArgs& args, StreamView stream) noexcept {
  if (linear_stream_cuda(args, stream)) return;
  FewPlan plan{.args = args,
               .first_block = {},
               .row_tiles = 1,
               .cuts_log2 = linear_sum_cuts(args).cuts_log2,
               .split_log2 = 0,
               .n_stages = 2,
               .chunk_bytes = 0};
  bool dot = true;
  for (int j = 0; j < args.n_jobs; ++j) {
    const DeviceMatrix& w = args.jobs[j].w;
    dot = dot && has_dot(w.dtype);
    if (64 + w.body_bytes > plan.chunk_bytes) plan.chunk_bytes = 64 + w.body_bytes;
  }
  if (dot)
    launch_few_rows<false>(plan, stream);
  else
    launch_few_any(plan, stream);
}

}  // namespace thermo
