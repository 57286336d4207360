#include "kernels/attention/attention.h"

#include <algorithm>
#include <array>
#include <atomic>

#include "base/thread_pool.h"
#include "kernels/attention/attention_tiles.h"
#include "kernels/choose_by_isa.h"

namespace thermo {

namespace {

constexpr int kMaxSplitTasks = 256;  // tiles whose context is split; more than that fill any machine anyway

}  // namespace

const char* kv_type_name(KvType type) {
  switch (type) {
    case KvType::F32:
      return "f32";
    case KvType::F16:
      return "f16";
    case KvType::Q8_0:
      return "q8_0";
    case KvType::BF16:
      return "bf16";
    case KvType::Q4_0:
      return "q4_0";
  }
  return "?";
}

size_t kv_head_bytes(KvType type, int head_dim) {
  const size_t n = static_cast<size_t>(head_dim);
  switch (type) {
    case KvType::F32:
      return 4 * n;
    case KvType::F16:
    case KvType::BF16:
      return 2 * n;
    case KvType::Q8_0:
      return n / 32 * 34;
    case KvType::Q4_0:
      return n / 32 * 18;
  }
  return 0;
}

THERMO_CHOOSE_BY_ISA(AttentionKernels, attention_kernels)

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

  // Spans any row sees. The windows of the rows start close together, so one range serves all tiles.
  const auto [lowest, highest] = std::minmax_element(args.positions, args.positions + args.n_rows);
  const int first_span = args.window > 0 ? std::max(0, *lowest - args.window + 1) / kAttentionSpan : 0;
  const int end_span = *highest / kAttentionSpan + 1;

  if (n_tasks >= n_threads || n_tasks > kMaxSplitTasks || end_span - first_span == 1 ||
      group > kAttentionQueries) {
    // Later tiles see more positions: hand those out first, so that the last task is a short one.
    pool.run(n_tasks, [&](int task, int thread) {
      const int tile = n_tiles - 1 - task / args.n_head_kv;
      const int row_begin = tile * tile_rows;
      kernels.attend(args, row_begin, std::min(args.n_rows, row_begin + tile_rows), task % args.n_head_kv,
                     work(thread));
    });
    return;
  }

  // Rounds of as many spans as there is memory for: at least one for each thread.
  const size_t partial_floats = SpanState::floats(std::min(args.n_rows, tile_rows) * group, args.head_dim);
  const size_t n_partials = static_cast<size_t>(n_threads) * layout.partial_floats() / partial_floats;
  const int round_spans = static_cast<int>(n_partials) / n_tasks - 1;  // and what is merged already
  float* const partials = scratch + static_cast<size_t>(n_threads) * layout.work_floats();
  float* const merged =
      partials + static_cast<size_t>(n_tasks) * static_cast<size_t>(round_spans) * partial_floats;
  for (int begin = first_span; begin < end_span; begin += round_spans) {
    const int n_spans = std::min(round_spans, end_span - begin);
    // Whoever finishes the last span of a tile merges it: no second fork and join.
    std::array<std::atomic<int>, kMaxSplitTasks> n_done{};
    pool.run(n_tasks * n_spans, [&](int task, int thread) {
      const int span = task % n_spans;
      const int base = task / n_spans;
      const int head_kv = base % args.n_head_kv;
      const int row_begin = base / args.n_head_kv * tile_rows;
      const int row_end = std::min(args.n_rows, row_begin + tile_rows);
      float* const first =
          partials + static_cast<size_t>(base) * static_cast<size_t>(round_spans) * partial_floats;
      const size_t tile_floats = SpanState::floats((row_end - row_begin) * group, args.head_dim);
      kernels.attend_span(args, row_begin, row_end, head_kv, begin + span, work(thread),
                          first + static_cast<size_t>(span) * tile_floats);
      if (n_done[static_cast<size_t>(base)].fetch_add(1, std::memory_order_acq_rel) == n_spans - 1)
        kernels.merge_spans(
            args, row_begin, row_end, head_kv,
            {.n_spans = n_spans, .first = begin == first_span, .last = begin + n_spans == end_span}, first,
            merged + static_cast<size_t>(base) * partial_floats);
    });
  }
}

// With several sequences there are tasks enough without splitting contexts.
void attention_cpu(std::span<const AttentionArgs> sequences, const AttentionKernels& kernels,
                   ThreadPool& pool, float* scratch) noexcept {
  const auto tile_rows = [](const AttentionArgs& args) {
    return std::max(1, kAttentionQueries / (args.n_head / args.n_head_kv));
  };
  const auto tasks_of = [&](const AttentionArgs& args) {
    return (args.n_rows + tile_rows(args) - 1) / tile_rows(args) * args.n_head_kv;
  };
  int n_tasks = 0;
  for (const AttentionArgs& args : sequences) n_tasks += tasks_of(args);
  if (sequences.size() == 1 || n_tasks < 2 * pool.size()) {
    for (const AttentionArgs& args : sequences) attention_cpu(args, kernels, pool, scratch);
    return;
  }
  pool.run(n_tasks, [&](int task, int thread) {
    size_t i = 0;
    for (; task >= tasks_of(sequences[i]); ++i) task -= tasks_of(sequences[i]);
    const AttentionArgs& args = sequences[i];
    const int rows = tile_rows(args), begin = task / args.n_head_kv * rows;
    kernels.attend(args, begin, std::min(args.n_rows, begin + rows), task % args.n_head_kv,
                   scratch + static_cast<size_t>(thread) * AttentionScratch(args.head_dim).work_floats());
  });
}

}  // namespace thermo
