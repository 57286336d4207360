#include "cli/heat_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace thermo {
namespace {

constexpr int kLevels = 5;
constexpr double kLevelFrom[kLevels] = {0.0, 0.25, 0.75, 1.5, 3.0};  // times the average
constexpr const char* kUnicode[kLevels] = {" ", "░", "▒", "▓", "█"};
constexpr const char* kAscii[kLevels] = {" ", ".", ":", "*", "#"};

int level_of(double times_average) {
  int level = 0;
  while (level + 1 < kLevels && times_average >= kLevelFrom[level + 1]) ++level;
  return level;
}

// `n` neighbouring cells of one level.
std::string cells_of(int level, size_t n, const Terminal& terminal) {
  std::string marks;
  for (size_t i = 0; i < n; ++i) marks += (terminal.unicode ? kUnicode : kAscii)[level];
  switch (level) {
    case 1:
      return terminal.on_stdout(Style::Cyan, marks);
    case 3:
      return terminal.on_stdout(Style::Yellow, marks);
    case 4:
      return terminal.on_stdout(Style::Red, marks);
    default:
      return marks;
  }
}

double share_of_top(const std::vector<float>& sorted, double share, double total) {
  const auto n = static_cast<size_t>(std::ceil(share * static_cast<double>(sorted.size())));
  double sum = 0.0;
  for (size_t i = 0; i < std::min(std::max<size_t>(1, n), sorted.size()); ++i) sum += sorted[i];
  return sum / total;
}

}  // namespace

LayerSpread spread_of(std::span<const float> heat) {
  LayerSpread spread;
  std::vector<float> sorted(heat.begin(), heat.end());
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  for (const float h : sorted) {
    spread.total += h;
    if (h > 0.0f) ++spread.n_used;
  }
  if (spread.total <= 0.0) return spread;
  spread.top10 = share_of_top(sorted, 0.10, spread.total);
  spread.top25 = share_of_top(sorted, 0.25, spread.total);
  spread.top50 = share_of_top(sorted, 0.50, spread.total);
  for (const float h : sorted) {
    const double p = h / spread.total;
    if (p > 0.0) spread.entropy -= p * std::log(p);
  }
  if (sorted.size() > 1) spread.entropy /= std::log(static_cast<double>(sorted.size()));
  return spread;
}

std::vector<int32_t> by_heat(std::span<const float> heat) {
  std::vector<int32_t> order(heat.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return heat[static_cast<size_t>(a)] > heat[static_cast<size_t>(b)];
  });
  return order;
}

std::string heat_bar(std::span<const float> heat, int n_cells, const Terminal& terminal) {
  const size_t n = heat.size(), cells = std::min(n, static_cast<size_t>(std::max(1, n_cells)));
  const double average =
      n == 0 ? 0.0 : std::accumulate(heat.begin(), heat.end(), 0.0) / static_cast<double>(n);
  std::string bar;
  int run_level = 0;
  size_t n_run = 0;
  for (size_t c = 0; c < cells; ++c) {
    const size_t begin = c * n / cells, end = (c + 1) * n / cells;
    const double sum = std::accumulate(heat.begin() + static_cast<std::ptrdiff_t>(begin),
                                       heat.begin() + static_cast<std::ptrdiff_t>(end), 0.0);
    const double mean = sum / static_cast<double>(end - begin);
    const int level = average > 0.0 ? level_of(mean / average) : 0;
    if (level != run_level && n_run > 0) {
      bar += cells_of(run_level, n_run, terminal);
      n_run = 0;
    }
    run_level = level;
    ++n_run;
  }
  return n_run > 0 ? bar + cells_of(run_level, n_run, terminal) : bar;
}

std::string heat_legend(const Terminal& terminal) {
  std::string text = "uses relative to the layer's average:";
  for (int level = 1; level < kLevels; ++level)
    text += fmt::format("  {} from {:g}x", cells_of(level, 1, terminal), kLevelFrom[level]);
  return text;
}

}  // namespace thermo
