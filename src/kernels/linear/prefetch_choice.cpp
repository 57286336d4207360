#include "kernels/linear/prefetch_choice.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>
#include <vector>

#include "base/log.h"
#include "base/thread_pool.h"
#include "base/units.h"
#include "kernels/linear/linear.h"
#include "kernels/quant_matmul/quant_matmul.h"

namespace thermo {
namespace {

constexpr int kRounds = 6;
constexpr size_t kTaskBytes = 256 * KiB;  // about what a step deals to a thread at a time
constexpr int kTasksPerThread = 12;       // of one measurement

// Consecutive panels of one matrix.
struct Task {
  const Matrix* w;
  int panel, n_panels;
};

// All packed weights in tasks, in the order of memory: a later task is not in the caches because of an
// earlier one.
std::vector<Task> cut_into_tasks(std::span<const Matrix> matrices, uint64_t least_bytes) {
  std::vector<Task> tasks;
  uint64_t bytes = 0;
  for (const Matrix& w : matrices) {
    if (w.panels == nullptr || act_format(w.dtype) == ActFormat::F32) continue;
    const size_t panel = panel_bytes(w.dtype, w.n_cols);
    const int step = std::clamp(static_cast<int>(kTaskBytes / panel), 1, LinearScratch::kTilePanels);
    for (int p = 0; p < n_panels(w.n_rows); p += step)
      tasks.push_back({&w, p, std::min(step, n_panels(w.n_rows) - p)});
    bytes += panel * static_cast<size_t>(n_panels(w.n_rows));
  }
  if (bytes < least_bytes) tasks.clear();
  return tasks;
}

}  // namespace

int fastest_distance(std::span<const double, kPrefetchDistances.size()> seconds, int now) noexcept {
  constexpr double kClear = 0.97;
  double of_now = std::numeric_limits<double>::infinity();
  size_t best = 0;
  for (size_t i = 0; i < seconds.size(); ++i) {
    if (kPrefetchDistances[i] == now) of_now = seconds[i];
    if (seconds[i] < seconds[best]) best = i;
  }
  return seconds[best] < kClear * of_now ? kPrefetchDistances[best] : now;
}

void choose_prefetch(std::span<const Matrix> matrices, const QuantMatmulKernels& kernels, ThreadPool& pool,
                     uint64_t least_bytes) {
  const std::vector<Task> tasks = cut_into_tasks(matrices, least_bytes);
  const int n_tasks = kTasksPerThread * pool.size();
  if (tasks.size() < static_cast<size_t>(2 * n_tasks)) return;

  ActFormats formats;
  for (const Matrix& w : matrices) formats.add(w);
  std::map<int, ActBuffer> rows;  // by their columns
  for (const Task& task : tasks) {
    const int n_cols = task.w->n_cols;
    if (rows.contains(n_cols)) continue;
    ActBuffer& x = rows.emplace(n_cols, ActBuffer(1, n_cols)).first->second;
    for (int c = 0; c < n_cols; ++c) x.row(0)[c] = static_cast<float>(c * 37 % 101) / 50.0f - 1.0f;
    x.quantize(0, n_cols, formats, kernels);
  }
  const LinearScratch scratch(pool.size(), 0);

  // Every measurement takes the next tasks, which lay idle since the last round at least.
  size_t next = 0;
  const auto measure = [&](int ahead) {
    set_prefetch_ahead(ahead);
    const auto start = std::chrono::steady_clock::now();
    pool.run(n_tasks, [&](int i, int thread) {
      const Task& task = tasks[(next + static_cast<size_t>(i)) % tasks.size()];
      multiply_tile(*task.w, task.panel, task.n_panels, {.x = &rows.at(task.w->n_cols), .first = 0, .n = 1},
                    scratch.tile(thread, 0), LinearScratch::kTilePanels * kPanelRows, nullptr, kernels);
    });
    next += static_cast<size_t>(n_tasks);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };

  const int now = prefetch_ahead();
  std::array<double, kPrefetchDistances.size()> seconds;
  seconds.fill(std::numeric_limits<double>::infinity());
  measure(now);  // wakes the threads
  for (int round = 0; round < kRounds; ++round)
    for (size_t i = 0; i < seconds.size(); ++i)
      seconds[i] = std::min(seconds[i], measure(kPrefetchDistances[i]));
  set_prefetch_ahead(fastest_distance(seconds, now));
  log_info("kernels",
           "weights are asked for {} bytes ahead; {}, {} and {} bytes took {:.2f}, {:.2f} and {:.2f} ms",
           prefetch_ahead(), kPrefetchDistances[0], kPrefetchDistances[1], kPrefetchDistances[2],
           1e3 * seconds[0], 1e3 * seconds[1], 1e3 * seconds[2]);
}

}  // namespace thermo
