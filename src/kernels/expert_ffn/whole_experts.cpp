#include "kernels/expert_ffn/whole_experts.h"

#include <algorithm>
#include <numeric>
#include <thread>

#include "base/pause.h"
#include "base/units.h"

namespace thermo {
namespace {

// So many groups for each thread that nobody waits long for the last one.
constexpr int kGroupsForThread = 4;

}  // namespace

WholeExperts::WholeExperts(int max_ff, int n_embd, int max_groups, int n_threads)
    : max_ff_(max_ff),
      threads_(static_cast<size_t>(n_threads)),
      order_(static_cast<size_t>(max_groups)),
      groups_(n_threads),
      sums_(n_threads),
      n_computed_(std::make_unique<std::atomic<int>>(0)) {
  for (Thread& thread : threads_) {
    thread.hidden = ActBuffer(kMaxRows, max_ff);
    thread.sums = ExpertSums(kMaxRows, n_embd);
  }
}

size_t WholeExperts::planned_bytes(int max_ff, int n_embd, int n_threads) {
  return static_cast<size_t>(n_threads) *
         (ActBuffer::planned_bytes(kMaxRows, max_ff) + ExpertSums::planned_bytes(kMaxRows, n_embd));
}

bool WholeExperts::suits(const ExpertFfnArgs& args, int n_threads) const noexcept {
  return args.n_rows <= kMaxRows && static_cast<int>(args.groups.size()) >= kGroupsForThread * n_threads;
}

void WholeExperts::run(const ExpertFfnArgs& args, const RowOpKernels& row_ops,
                       const LinearContext& context) noexcept {
  const int n_groups = static_cast<int>(args.groups.size()), n_threads = context.pool.size();
  // A thread takes the same experts in every step, so that their weights stay in its caches, and others' when
  // it has none left; the ones with most pairs first.
  const std::span<int> order = std::span(order_).first(args.groups.size());
  const auto group_at = [&](int i) -> const FfnGroup& { return args.groups[static_cast<size_t>(i)]; };
  const auto owner_of = [&](int i) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(group_at(i).ffn) / sizeof(Ffn) %
                            static_cast<uintptr_t>(n_threads));
  };
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int a, int b) {
    const int of_a = owner_of(a), of_b = owner_of(b);
    return of_a != of_b ? of_a < of_b : group_at(a).n_pairs > group_at(b).n_pairs;
  });
  for (int thread = 0, begin = 0; thread < n_threads; ++thread) {
    int end = begin;
    while (end < n_groups && owner_of(order[static_cast<size_t>(end)]) == thread) ++end;
    groups_.deal(thread, begin, end);
    begin = end;
  }
  for (Thread& thread : threads_) thread.has_sums = false;
  std::atomic<int>& computed = *n_computed_;
  computed.store(0, std::memory_order_relaxed);
  // At the end a thread adds the sums of some rows, where there are enough of them, or of some columns.
  const bool by_rows = args.n_rows >= 2 * n_threads;
  sums_.deal(n_threads);
  const auto share = [&](int n, int i) { return n * i / n_threads; };

  context.pool.run_threads([&](int thread) {
    int n = 0;
    groups_.drain(thread, [&](int i, int) {
      compute(args, group_at(order[static_cast<size_t>(i)]), thread, row_ops, context);
      ++n;
    });
    if (n > 0) computed.fetch_add(n, std::memory_order_acq_rel);
    for (int spins = 0; computed.load(std::memory_order_acquire) < n_groups;) {
      pause_cpu();
      if (++spins < 1 << 14) continue;
      std::this_thread::yield();
      spins = 0;
    }
    sums_.drain(thread, [&](int i, int) {
      const int all = by_rows ? args.n_rows : args.n_embd;
      const Range part{share(all, i), share(all, i + 1)};
      add_sums(args, by_rows ? part : Range{0, args.n_rows}, by_rows ? Range{0, args.n_embd} : part, row_ops);
    });
  });
}

namespace {

// body(panel, n_panels, rows of the matrix)
template <class Body>
void for_each_tile(const Matrix& w, const Body& body) {
  for (int panel = 0; panel < n_panels(w.n_rows); panel += LinearScratch::kTilePanels) {
    const int n = std::min(LinearScratch::kTilePanels, n_panels(w.n_rows) - panel);
    body(panel, n, std::min(n * kPanelRows, w.n_rows - panel * kPanelRows));
  }
}

}  // namespace

void WholeExperts::find_hidden(const Ffn& ffn, const ActRange& x, int thread, const RowOpKernels& row_ops,
                               const LinearContext& context) noexcept {
  ActBuffer& hidden = threads_[static_cast<size_t>(thread)].hidden;
  std::byte* const packed = context.scratch.panels(thread);
  float *const gate = context.scratch.tile(thread, 0), *const up = context.scratch.tile(thread, 1);
  hidden.set_cols(ffn.gate.n_rows);
  for_each_tile(ffn.gate, [&](int panel, int n, int n_rows) {
    multiply_tile(ffn.gate, panel, n, x, gate, n_rows, packed, context.kernels);
    multiply_tile(ffn.up, panel, n, x, up, n_rows, packed, context.kernels);
    row_ops.swiglu(gate, up, x.n * n_rows);
    for (int i = 0; i < x.n; ++i)
      std::copy_n(gate + static_cast<int64_t>(i) * n_rows, n_rows, hidden.row(i) + panel * kPanelRows);
  });
  ActFormats formats;
  formats.add(ffn.down);
  for (int i = 0; i < x.n; ++i) hidden.quantize(i, ffn.down.n_cols, formats, context.kernels);
}

template <class Body>
void WholeExperts::for_each_output(const Ffn& ffn, int n, int thread, const LinearContext& context,
                                   const Body& body) noexcept {
  float* const tile = context.scratch.tile(thread, 0);
  for_each_tile(ffn.down, [&](int panel, int tile_panels, int n_rows) {
    multiply_tile(ffn.down, panel, tile_panels, {.x = &threads_[static_cast<size_t>(thread)].hidden, .n = n},
                  tile, n_rows, context.scratch.panels(thread), context.kernels);
    for (int i = 0; i < n; ++i) body(i, panel * kPanelRows, tile + static_cast<int64_t>(i) * n_rows, n_rows);
  });
}

void WholeExperts::compute(const ExpertFfnArgs& args, const FfnGroup& group, int thread,
                           const RowOpKernels& row_ops, const LinearContext& context) noexcept {
  Thread& own = threads_[static_cast<size_t>(thread)];
  const int32_t* const rows = args.pair_rows + group.pair_begin;
  const float* const weights = args.pair_weights + group.pair_begin;
  find_hidden(*group.ffn, {.x = args.x, .index = rows, .n = group.n_pairs}, thread, row_ops, context);
  const bool starts = !own.has_sums && group.n_pairs == args.n_rows;
  if (!own.has_sums && !starts)
    for (int r = 0; r < args.n_rows; ++r) std::fill_n(own.sums.row(r), args.n_embd, 0.0);
  own.has_sums = true;
  for_each_output(*group.ffn, group.n_pairs, thread, context,
                  [&](int i, int column, const float* products, int n) {
                    (starts ? row_ops.start_sum : row_ops.add_to_sum)(own.sums.row(rows[i]) + column,
                                                                      products, weights[i], n);
                  });
}

void WholeExperts::add_rows(const Ffn& ffn, const ActBuffer& x, int first, int n, int thread, float* y,
                            const RowOpKernels& row_ops, const LinearContext& context) noexcept {
  double* const sum = threads_[static_cast<size_t>(thread)].sums.row(0);
  const int64_t width = ffn.down.n_rows;
  find_hidden(ffn, {.x = &x, .first = first, .n = n}, thread, row_ops, context);
  for_each_output(ffn, n, thread, context, [&](int i, int column, const float* products, int n_columns) {
    row_ops.start_sum(sum, products, 1.0f, n_columns);
    row_ops.add_sum(y + (first + i) * width + column, sum, n_columns);
  });
}

// What all threads have of some rows and columns.
void WholeExperts::add_sums(const ExpertFfnArgs& args, Range rows, Range columns,
                            const RowOpKernels& row_ops) const noexcept {
  constexpr int kAtOnce = 256;
  double all[kAtOnce];
  for (int r = rows.begin; r < rows.end; ++r)
    for (int first = columns.begin; first < columns.end; first += kAtOnce) {
      const int n = std::min(kAtOnce, columns.end - first);
      const double* sums = nullptr;
      for (const Thread& thread : threads_) {
        if (!thread.has_sums) continue;
        const double* const part = thread.sums.row(r) + first;
        for (int i = 0; i < n && sums != nullptr; ++i) all[i] = sums[i] + part[i];
        sums = sums == nullptr ? part : all;
      }
      row_ops.add_sum(args.y + r * args.y_stride + first, sums, n);
    }
}

}  // namespace thermo
