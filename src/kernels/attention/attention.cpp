#include "kernels/attention/attention.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>

#include "base/thread_pool.h"
#include "kernels/attention/attention_tiles.h"

namespace thermo {

extern const AttentionKernels attention_kernels_portable;
#if defined(__x86_64__)
extern const AttentionKernels attention_kernels_avx2;
extern const AttentionKernels attention_kernels_avx512;
#endif

namespace {

constexpr int kMinSplitSlots = 128;  // 14 us of one core at 8 heads of 256; less is not worth a task
constexpr int kMaxSplitTasks = 256;  // tiles whose context is split; more than that fill any machine anyway

// Partial sums of one tile over n_splits ranges, `partial` [n_splits][n_queries][head_dim + 2], to rows of
// `out`.
void merge_splits(const AttentionArgs& args, int row_begin, int row_end, int head_kv, int n_splits,
                  const float* partial) noexcept {
  const int dim = args.head_dim;
  const int group = args.n_head / args.n_head_kv;
  const int n_queries = (row_end - row_begin) * group;
  const size_t query_floats = static_cast<size_t>(dim) + 2;
  const size_t split_floats = static_cast<size_t>(n_queries) * query_floats;
  for (int q = 0; q < n_queries; ++q) {
    const float* first = partial + static_cast<size_t>(q) * query_floats;
    float top = first[dim];
    for (int s = 1; s < n_splits; ++s)
      top = std::max(top, first[static_cast<size_t>(s) * split_floats + dim]);
    float total = 0.0f;
    for (int s = 0; s < n_splits; ++s) {
      const float* p = first + static_cast<size_t>(s) * split_floats;
      total += p[dim + 1] * std::exp(p[dim] - top);
    }
    const int row = row_begin + q / group;
    const int head = head_kv * group + q % group;
    float* out =
        args.out +
        (static_cast<size_t>(row) * static_cast<size_t>(args.n_head) + static_cast<size_t>(head)) * dim;
    std::fill_n(out, dim, 0.0f);
    for (int s = 0; s < n_splits; ++s) {
      const float* p = first + static_cast<size_t>(s) * split_floats;
      const float weight = total > 0.0f ? std::exp(p[dim] - top) / total : 0.0f;
      for (int d = 0; d < dim; ++d) out[d] += weight * p[d];
    }
  }
}

}  // namespace

const char* kv_type_name(KvType type) {
  switch (type) {
    case KvType::F32:
      return "f32";
    case KvType::F16:
      return "f16";
    case KvType::Q8_0:
      return "q8_0";
  }
  return "?";
}

size_t kv_head_bytes(KvType type, int head_dim) {
  const size_t n = static_cast<size_t>(head_dim);
  switch (type) {
    case KvType::F32:
      return 4 * n;
    case KvType::F16:
      return 2 * n;
    case KvType::Q8_0:
      return n / 32 * 34;
  }
  return 0;
}

const AttentionKernels& attention_kernels(Isa isa) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::Avx2:
      return attention_kernels_avx2;
    case Isa::Avx512:
    case Isa::Amx:
      return attention_kernels_avx512;
#endif
    default:
      return attention_kernels_portable;
  }
}

size_t attention_scratch_floats(int n_head, int n_head_kv, int head_dim) {
  (void)n_head, (void)n_head_kv;  // tiles hold any number of heads
  const AttentionScratch layout(head_dim);
  return layout.work_floats() + layout.partial_floats();
}

void attention_cpu(const AttentionArgs& args, const AttentionKernels& kernels, ThreadPool& pool,
                   float* scratch) noexcept {
  if (args.n_rows <= 0) return;
  const AttentionScratch layout(args.head_dim);
  const int n_threads = pool.size();
  const int group = args.n_head / args.n_head_kv;
  const int tile_rows = std::max(1, kAttentionQueries / group);
  const int n_tiles = (args.n_rows + tile_rows - 1) / tile_rows;
  const int n_tasks = n_tiles * args.n_head_kv;
  const auto work = [&](int thread) { return scratch + static_cast<size_t>(thread) * layout.work_floats(); };

  // Slots any row sees. The windows of the rows start close together, so one range serves all tiles.
  int first_slot = 0;
  if (args.window > 0) {
    const int lowest = *std::min_element(args.positions, args.positions + args.n_rows);
    first_slot = std::clamp(lowest - args.window + 1, 0, args.n_past);
  }
  const int n_slots = args.n_past + args.n_rows - first_slot;

  int n_splits = 1;
  if (n_tasks < n_threads && n_tasks <= kMaxSplitTasks && group <= kAttentionQueries) {
    // Two ranges per thread even out cores of different speed. The partials of all must fit the scratch.
    const int tile_queries = std::min(args.n_rows, tile_rows) * group;
    const int fit = n_threads * kAttentionQueries / (n_tasks * tile_queries);
    n_splits = std::min({(2 * n_threads + n_tasks - 1) / n_tasks, n_slots / kMinSplitSlots, fit});
  }
  if (n_splits <= 1) {
    // Later tiles see more slots: hand those out first, so that the last task is a short one.
    pool.run(n_tasks, [&](int task, int thread) {
      const int tile = n_tiles - 1 - task / args.n_head_kv;
      const int row_begin = tile * tile_rows;
      kernels.attend(args, row_begin, std::min(args.n_rows, row_begin + tile_rows), task % args.n_head_kv,
                     work(thread));
    });
    return;
  }

  float* partials = scratch + static_cast<size_t>(n_threads) * layout.work_floats();
  const size_t tile_floats = static_cast<size_t>(std::min(args.n_rows, tile_rows) * group) *
                             (static_cast<size_t>(args.head_dim) + 2);
  // Whoever finishes the last range of a tile merges it: no second fork and join.
  std::array<std::atomic<int>, kMaxSplitTasks> n_done{};
  pool.run(n_tasks * n_splits, [&](int task, int thread) {
    const int split = task % n_splits;
    const int base = task / n_splits;
    const int head_kv = base % args.n_head_kv;
    const int row_begin = base / args.n_head_kv * tile_rows;
    const int row_end = std::min(args.n_rows, row_begin + tile_rows);
    const auto slot_at = [&](int s) {
      return first_slot + static_cast<int>(static_cast<int64_t>(n_slots) * s / n_splits);
    };
    float* partial = partials + static_cast<size_t>(base) * static_cast<size_t>(n_splits) * tile_floats;
    const size_t split_floats =
        static_cast<size_t>((row_end - row_begin) * group) * (static_cast<size_t>(args.head_dim) + 2);
    kernels.attend_slots(args, row_begin, row_end, head_kv, slot_at(split), slot_at(split + 1), work(thread),
                         partial + static_cast<size_t>(split) * split_floats);
    if (n_done[static_cast<size_t>(base)].fetch_add(1, std::memory_order_acq_rel) == n_splits - 1)
      merge_splits(args, row_begin, row_end, head_kv, n_splits, partial);
  });
}

}  // namespace thermo
