#include "experts/tiered_experts.h"

#include <algorithm>

namespace thermo {

std::vector<std::pair<int, int>> hottest_first(const ExpertCatalog& catalog, const HeatMap& heat) {
  std::vector<std::pair<float, std::pair<int, int>>> order;
  for (int l = 0; l < static_cast<int>(catalog.layers.size()); ++l)
    for (int e = 0; e < catalog.layers[static_cast<size_t>(l)].n_expert(); ++e)
      if (const float h = heat.heat(l, e); h > 0.0f) order.push_back({h, {l, e}});
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<std::pair<int, int>> experts;
  for (const auto& [h, expert] : order) experts.push_back(expert);
  return experts;
}

TieredExperts::TieredExperts(ExpertCatalog catalog, HeatMap heat, const TieredExpertsOptions& options,
                             ThreadPool& pool,
                             const std::function<void(uint64_t done, uint64_t total)>& progress)
    : catalog_(std::move(catalog)),
      heat_(std::move(heat)),
      options_(options),
      arena_(std::min(options.memory_bytes, catalog_.total_bytes())),
      host_(catalog_,
            {.arena = {arena_.data(), std::min<uint64_t>(options.memory_bytes, catalog_.total_bytes())},
             .n_readers = options.n_readers,
             .files = options.files}),
      ffns_(static_cast<size_t>(catalog_.n_expert)) {
  groups_.reserve(static_cast<size_t>(catalog_.n_expert) + 1);
  wanted_.reserve(static_cast<size_t>(catalog_.n_expert));
  host_.load(pool, hottest_first(catalog_, heat_), progress);
}

void TieredExperts::begin_step(int n_rows) noexcept {
  host_.set_passing(n_rows > options_.passing_rows);
  ++counts_.steps;
  counts_.tokens += static_cast<uint64_t>(n_rows);
}

void TieredExperts::end_step() noexcept {}

void TieredExperts::run(const RoutedLayer& routed) noexcept {
  const std::span<const FfnGroup> groups = routed.args.groups;
  const uint64_t bytes = catalog_.layers[static_cast<size_t>(routed.layer)].expert_bytes;
  const int64_t begin_ns = options_.trace ? TraceWriter::now_ns() : 0;
  wanted_.clear();
  int n_missing = 0;
  for (int g = 0; g < routed.n_routed; ++g) {
    const FfnGroup& group = groups[static_cast<size_t>(g)];
    const int expert = routed.expert_of(group);
    wanted_.push_back(expert);
    const bool here = host_.address(routed.layer, expert) != nullptr;
    n_missing += !here;
    const auto n_pairs = static_cast<uint64_t>(group.n_pairs);
    counts_.pairs += n_pairs;
    counts_.cpu_pairs += n_pairs;
    counts_.cpu_bytes += bytes;
    (here ? counts_.hot_pairs : counts_.fetched_pairs) += n_pairs;
    (here ? counts_.hot_bytes : counts_.fetched_bytes) += bytes;
  }
  ++counts_.layer_steps;
  counts_.all_hot += n_missing == 0;
  host_.want(routed.layer, wanted_);
  for (size_t i = 0; i < wanted_.size(); ++i) ffns_[i] = host_.acquire(routed.layer, wanted_[i]);
  const int64_t read_ns = options_.trace ? TraceWriter::now_ns() : 0;

  groups_.assign(groups.begin(), groups.end());
  for (size_t i = 0; i < wanted_.size(); ++i) groups_[i].ffn = &ffns_[i];
  ExpertFfnArgs args = routed.args;
  args.groups = groups_;
  expert_ffn_cpu(args, routed.scratch, routed.row_ops, routed.linear);
  for (const int32_t expert : wanted_) host_.release(routed.layer, expert);

  if (!options_.trace) return;
  if (n_missing > 0)
    options_.trace->add({.lane = TraceLane::Disk,
                         .name = "read experts",
                         .category = "experts",
                         .begin_ns = begin_ns,
                         .duration_ns = read_ns - begin_ns,
                         .args = {{{"layer", routed.layer}, {"experts", n_missing}}}});
  options_.trace->add({.lane = TraceLane::Cpu,
                       .name = "experts",
                       .category = "experts",
                       .begin_ns = read_ns,
                       .duration_ns = TraceWriter::now_ns() - read_ns,
                       .args = {{{"layer", routed.layer}, {"experts", routed.n_routed}}}});
}

ExpertTelemetry TieredExperts::telemetry() const noexcept {
  ExpertTelemetry t = counts_;
  const HostTierStats stats = host_.stats();
  t.disk_bytes = stats.bytes_read;
  t.disk_wait_ns = stats.wait_ns;
  t.budget_bytes = options_.memory_bytes;
  t.hot_expert_bytes = std::min<uint64_t>(arena_.size(), catalog_.total_bytes());
  t.total_expert_bytes = catalog_.total_bytes();
  return t;
}

}  // namespace thermo
