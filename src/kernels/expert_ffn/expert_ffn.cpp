#include "kernels/expert_ffn/expert_ffn.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/pause.h"
#include "base/units.h"
#include "kernels/row_ops/sum_grid.h"

namespace thermo {
namespace {

constexpr int kTileActs = LinearScratch::kTileActs;

// Loads what next() names meanwhile. A tasks are short and their threads never sleep, so the wait is a few
// microseconds at most.
template <class NextFn>
void wait_until_set(const std::atomic<int>& flag, NextFn next) noexcept {
  LoadRange range;
  int spins = 0;
  while (flag.load(std::memory_order_acquire) == 0) {
    if (range.empty()) range = next();
    if (!range.empty()) {
      range.load_piece();
      continue;
    }
    pause_cpu();
    if (++spins == 1 << 14) {
      std::this_thread::yield();
      spins = 0;
    }
  }
}

// Panels of gate and up in one A task.
int tile_a(const Ffn& ffn, int widest) noexcept {
  return std::min(panels_per_task(ffn.gate, 1, 1), widest);
}

// The widest A tile. Few experts on many threads get smaller ones: of those that give every thread two tasks,
// the one whose largest share is least.
int choose_widest_a(std::span<const FfnGroup> groups, int n_threads) noexcept {
  constexpr int kWidest = 4;
  int n_all = 0;
  for (const FfnGroup& group : groups) n_all += n_panels(group.ffn->gate.n_rows);
  if (n_threads == 1 || n_all >= 8 * kWidest * n_threads) return kWidest;
  int best = 1, best_time = std::numeric_limits<int>::max();
  for (int widest = 1; widest <= kWidest; ++widest) {
    int n_tasks = 0, time = 0;
    for (const FfnGroup& group : groups) {
      const int tile = tile_a(*group.ffn, widest);
      const int tiles = ceil_div(n_panels(group.ffn->gate.n_rows), tile);
      n_tasks += tiles;
      time += ceil_div(tiles, n_threads) * tile;
    }
    if (widest > 1 && n_tasks < 2 * n_threads) break;
    if (time <= best_time) best = widest, best_time = time;
  }
  return best;
}

bool many_groups(int n_groups, int n_threads) noexcept {
  return n_groups >= 8 * n_threads;
}

// What a thread takes of the n tiles of a group. Of few groups the same part of each, whichever they are, so
// that what was read ahead lies in the right core's cache; experts of few tiles begin at another thread each.
// Of many groups whole ones: longer runs of memory (a prefill of 128 tokens on two cores: +8 %). But not of
// the last group: where there is a shared expert, all rows take it, and one thread would come late with it.
struct TileShare {
  int begin, end;
};
TileShare tile_share(int n, int group, int n_groups, int thread, int n_threads) noexcept {
  if (many_groups(n_groups, n_threads) && group < n_groups - 1) {
    const bool own = group * n_threads / (n_groups - 1) == thread;
    return {0, own ? n : 0};
  }
  const int place = n >= n_threads ? thread : (thread + group) % n_threads;
  return {n * place / n_threads, n * (place + 1) / n_threads};
}

// Columns [first, first + n) of every row.
void write_stamped(const StampedRows& out, int first, const ExpertSums& sums, int n) noexcept {
  const uint64_t stamp = static_cast<uint64_t>(out.stamp) << 32;
  constexpr double kMost = 0x1p30;
  for (int r = 0; r < out.n_rows; ++r) {
    StampedSum* const to = out.rows + r * out.stride + first;
    const double* const from = sums.row(r) + first;
    for (int i = 0; i < n; ++i) {
      const bool known = from[i] > -kMost && from[i] < kMost;
      const int64_t sum =
          known ? static_cast<int64_t>(from[i] * (1.0 / kSumGrid)) : std::numeric_limits<int64_t>::min();
      const uint64_t bits = static_cast<uint64_t>(sum);
      to[i] = {stamp | (bits & 0xffffffffu), stamp | bits >> 32};
    }
  }
}

size_t sum_stride(int n_embd) {
  return align_up<size_t>(static_cast<size_t>(n_embd), 8) + 8;
}

}  // namespace

// Rows a cache line further than a power of two apart: a tile reads the same columns of all of them.
ExpertSums::ExpertSums(int max_rows, int n_embd)
    : memory_(planned_bytes(max_rows, n_embd)), n_embd_(n_embd), stride_(sum_stride(n_embd)) {}

size_t ExpertSums::planned_bytes(int max_rows, int n_embd) {
  return static_cast<size_t>(max_rows) * sum_stride(n_embd) * sizeof(double);
}

void ExpertSums::add(const ExpertSums& other, int n_rows) noexcept {
  for (int r = 0; r < n_rows; ++r) {
    double* const to = row(r);
    const double* const from = other.row(r);
    for (int i = 0; i < n_embd_; ++i) to[i] += from[i];
  }
}

ExpertFfnScratch::ExpertFfnScratch(int max_pairs, int max_ff, int max_groups, int n_threads)
    : hidden_(max_pairs, max_ff),
      groups_(new Group[static_cast<size_t>(max_groups)]),
      tiles_a_(static_cast<size_t>(max_groups)),
      first_a_(static_cast<size_t>(n_threads)),
      tasks_a_(n_threads),
      tasks_b_(n_threads) {}

FfnShare ffn_share(const Ffn& ffn, int thread, int n_threads) noexcept {
  const auto part = [&](const Matrix& w) {
    const int n = n_panels(w.n_rows);
    return PanelRange{n * thread / n_threads, n * (thread + 1) / n_threads};
  };
  return {.gate_up = part(ffn.gate), .down = part(ffn.down)};
}

void expert_ffn_cpu(const ExpertFfnArgs& args, ExpertFfnScratch& scratch, const RowOpKernels& row_ops,
                    const LinearContext& context) noexcept {
  const int n_groups = static_cast<int>(args.groups.size());
  if (n_groups == 0) {
    THERMO_CHECK(args.stamped == nullptr, "an answer to nothing");
    for (int r = 0; r < args.n_rows; ++r) {
      if (args.fresh) std::fill_n(args.sums->row(r), args.n_embd, 0.0);
      if (args.y != nullptr) row_ops.add_sum(args.y + r * args.y_stride, args.sums->row(r), args.n_embd);
    }
    return;
  }
  THERMO_CHECK(n_groups <= static_cast<int>(scratch.tiles_a_.size()), "more groups than planned");
  const int n_threads = context.pool.size();
  ActBuffer& hidden = scratch.hidden_;

  // Groups may differ in width and type (the shared expert), so each has its own tile size.
  const int widest_a = choose_widest_a(args.groups, n_threads);
  ExpertFfnScratch::Tiles* const tiles_a = scratch.tiles_a_.data();
  int max_ff = 0;
  for (int i = 0; i < n_groups; ++i) {
    const Ffn& ffn = *args.groups[static_cast<size_t>(i)].ffn;
    // The last of many groups is for all threads.
    const int widest = many_groups(n_groups, n_threads) && i == n_groups - 1
                           ? std::clamp(n_panels(ffn.gate.n_rows) / n_threads, 1, widest_a)
                           : widest_a;
    const int tile = tile_a(ffn, widest);
    tiles_a[i] = {tile, ceil_div(n_panels(ffn.gate.n_rows), tile)};
    ExpertFfnScratch::Group& state = scratch.groups_[static_cast<size_t>(i)];
    state.tiles_left.store(tiles_a[i].n, std::memory_order_relaxed);
    state.open.store(0, std::memory_order_relaxed);
    max_ff = std::max(max_ff, ffn.gate.n_rows);
  }
  hidden.set_cols(max_ff);
  const int out_panels = n_panels(args.n_embd);
  // Two tasks for every thread, so that one that comes late is not waited for with half of the work.
  const int tile_b =
      std::clamp(out_panels / (n_threads > 1 ? 2 * n_threads : 1), 1, LinearScratch::kTilePanels);
  const int n_tasks_b = ceil_div(out_panels, tile_b);

  const auto share_of = [&](int g, int thread) {
    return tile_share(tiles_a[g].n, g, n_groups, thread, n_threads);
  };

  // Tiles of one group that a thread has done and not told anybody about yet.
  struct Finished {
    int group = -1;
    int n = 0;
  };
  // How far a thread has come in somebody's share: the n-th group of it, whose first task is `task`.
  struct Place {
    int owner = -1;
    int n = 0;
    int task = 0;
  };
  // Whoever brings the count to zero was last, quantises, and opens the group.
  const auto tell = [&](Finished& finished) {
    const int n = std::exchange(finished.n, 0);
    if (n == 0) return;
    ExpertFfnScratch::Group& state = scratch.groups_[static_cast<size_t>(finished.group)];
    if (state.tiles_left.fetch_sub(n, std::memory_order_acq_rel) != n) return;
    const FfnGroup& group = args.groups[static_cast<size_t>(finished.group)];
    ActFormats formats;
    formats.add(group.ffn->down);
    for (int i = 0; i < group.n_pairs; ++i)
      hidden.quantize(group.pair_begin + i, group.ffn->down.n_cols, formats, context.kernels);
    state.open.store(1, std::memory_order_release);
  };

  // Threads go through the groups from different ones on: where some were read ahead and others were not,
  // main memory is then never idle while everybody computes from the caches. Of many groups the last one
  // comes first: a shared expert's is the longest, and its outputs start the sums of all rows.
  const auto nth_group = [&](int i, int thread) {
    const bool many = many_groups(n_groups, n_threads);
    if (many && i == 0) return n_groups - 1;
    const int n = many ? n_groups - 1 : n_groups, g = (many ? i - 1 : i) + n * thread / n_threads;
    return g < n ? g : g - n;
  };

  // `task`: of the owner's share, group by group. A thread takes them in increasing order.
  const auto run_a = [&](int task, int owner, int thread, Place& place, Finished& finished) {
    if (place.owner != owner) place = {owner, 0, scratch.first_a_[static_cast<size_t>(owner)]};
    int g = nth_group(place.n, owner);
    TileShare share = share_of(g, owner);
    while (task - place.task >= share.end - share.begin) {
      place.task += share.end - share.begin;
      g = nth_group(++place.n, owner);
      share = share_of(g, owner);
    }
    if (g != finished.group) {
      tell(finished);
      finished.group = g;
    }
    const FfnGroup& group = args.groups[static_cast<size_t>(g)];
    const Ffn& ffn = *group.ffn;
    const int panel = (share.begin + task - place.task) * tiles_a[g].panels;
    const int tile_panels = std::min(tiles_a[g].panels, n_panels(ffn.gate.n_rows) - panel);
    const int row = panel * kPanelRows;
    const int tile_rows = std::min(tile_panels * kPanelRows, ffn.gate.n_rows - row);
    float* const gate = context.scratch.tile(thread, 0);
    float* const up = context.scratch.tile(thread, 1);
    prefetch_tile(ffn.up, panel);
    for (int begin = 0; begin < group.n_pairs; begin += kTileActs) {
      const int n = std::min(kTileActs, group.n_pairs - begin);
      const int pair = group.pair_begin + begin;
      const ActRange acts{.x = args.x, .index = args.pair_rows + pair, .n = n};
      multiply_tile(ffn.gate, panel, tile_panels, acts, gate, tile_rows, context.scratch.panels(thread),
                    context.kernels);
      multiply_tile(ffn.up, panel, tile_panels, acts, up, tile_rows, context.scratch.panels(thread),
                    context.kernels);
      row_ops.swiglu(gate, up, n * tile_rows);
      for (int i = 0; i < n; ++i)
        std::copy_n(gate + static_cast<int64_t>(i) * tile_rows, tile_rows, hidden.row(pair + i) + row);
    }
    ++finished.n;
  };

  const auto run_b = [&](int task, int thread) {
    const int panel = task * tile_b;
    const int tile_panels = std::min(tile_b, out_panels - panel);
    const int row = panel * kPanelRows;
    const int tile_rows = std::min(tile_panels * kPanelRows, args.n_embd - row);
    float* const tile = context.scratch.tile(thread, 0);
    ExpertSums& sums = *args.sums;
    const FfnGroup* const groups = args.groups.data();
    // Groups in the thread's own order: it may load some of them while it waits for another.
    const auto group_at = [&](int i) { return nth_group(i, thread); };
    const bool starts = args.fresh && groups[group_at(0)].n_pairs == args.n_rows;
    if (args.fresh && !starts && args.outputs == nullptr)
      for (int r = 0; r < args.n_rows; ++r) std::fill_n(sums.row(r) + row, tile_rows, 0.0);
    const auto add = [&](int pair, int n, const float* products, bool start) {
      if (args.outputs != nullptr) {
        for (int i = 0; i < n; ++i)
          std::copy_n(products + static_cast<int64_t>(i) * tile_rows, tile_rows,
                      args.outputs + args.pair_rows[pair + i] * args.y_stride + row);
        return;
      }
      const auto add_row = start ? row_ops.start_sum : row_ops.add_to_sum;
      for (int i = 0; i < n; ++i)
        add_row(sums.row(args.pair_rows[pair + i]) + row, products + static_cast<int64_t>(i) * tile_rows,
                args.pair_weights[pair + i], tile_rows);
    };
    const auto multiply = [&](const Ffn& ffn, int pair, int n, float* products) {
      multiply_tile(ffn.down, panel, tile_panels, {.x = &hidden, .first = pair, .n = n}, products, tile_rows,
                    context.scratch.panels(thread), context.kernels);
    };
    for (int i = 0; i < n_groups; ++i) {
      const FfnGroup& group = groups[group_at(i)];
      if (i + 1 < n_groups) prefetch_tile(groups[group_at(i + 1)].ffn->down, panel);
      wait_until_set(scratch.groups_[static_cast<size_t>(&group - groups)].open, [&, ahead = i]() mutable {
        if (ahead == n_groups) return LoadRange{};
        const Ffn& ffn = *groups[group_at(ahead++)].ffn;
        return panels_to_load(ffn.down, panel, panel + tile_panels);
      });
      for (int p = 0; p < group.n_pairs; p += kTileActs) {
        const int n = std::min(kTileActs, group.n_pairs - p), pair = group.pair_begin + p;
        multiply(*group.ffn, pair, n, tile);
        add(pair, n, tile, starts && i == 0);
      }
    }
    if (args.y != nullptr)
      for (int r = 0; r < args.n_rows; ++r)
        row_ops.add_sum(args.y + r * args.y_stride + row, sums.row(r) + row, tile_rows);
    if (args.stamped == nullptr) return;
    write_stamped(*args.stamped, row, sums, tile_rows);
    if (task == 0)
      std::atomic_ref<uint32_t>(*args.stamped->near).store(args.stamped->stamp, std::memory_order_relaxed);
  };

  // Gate and up of a thread's share, in the order in which it takes them.
  const auto wait_for_x = [&](int thread) {
    wait_until_set(scratch.x_ready_, [&, part = 0]() mutable {
      if (part == 2 * n_groups) return LoadRange{};
      const int g = nth_group(part / 2, thread);
      const Ffn& ffn = *args.groups[static_cast<size_t>(g)].ffn;
      const Matrix& w = part++ % 2 == 0 ? ffn.gate : ffn.up;
      const TileShare share = share_of(g, thread);
      const int tile = tiles_a[g].panels;
      return panels_to_load(w, share.begin * tile, std::min(share.end * tile, n_panels(w.n_rows)));
    });
  };
  scratch.x_ready_.store(args.prepare_x == nullptr, std::memory_order_relaxed);

  // When a thread finds no A task left, every one of them is running, done or about to be told of, so B tasks
  // never wait for nobody.
  int n_tasks_a = 0;
  for (int thread = 0; thread < n_threads; ++thread) {
    const int first = n_tasks_a;
    for (int g = 0; g < n_groups; ++g) {
      const TileShare share = share_of(g, thread);
      n_tasks_a += share.end - share.begin;
    }
    scratch.first_a_[static_cast<size_t>(thread)] = first;
    scratch.tasks_a_.deal(thread, first, n_tasks_a);
  }
  scratch.tasks_b_.deal(n_tasks_b);
  context.pool.run_threads([&](int thread) {
    if (thread == 0 && args.prepare_x != nullptr) {
      (*args.prepare_x)();
      scratch.x_ready_.store(1, std::memory_order_release);
    }
    wait_for_x(thread);
    Finished finished;
    Place place;
    scratch.tasks_a_.drain(thread, [&](int task, int owner) { run_a(task, owner, thread, place, finished); });
    tell(finished);
    scratch.tasks_b_.drain(thread, [&](int task, int) { run_b(task, thread); });
  });
}

}  // namespace thermo
