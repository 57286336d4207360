#include "experts/tiered_experts.h"

#include <algorithm>
#include <numeric>

namespace thermo {

TieredExperts::TieredExperts(ExpertCatalog catalog, HeatMap heat, const SplitOptions& options, Isa isa,
                             ThreadPool& pool, const ExpertCore::Progress& progress)
    : core_(std::move(catalog), std::move(heat), options, isa, pool, progress),
      catalog_(core_.catalog()),
      host_(core_.host()),
      counts_(core_.counts()),
      trace_(options.trace),
      ffns_(static_cast<size_t>(catalog_.n_expert)) {
  groups_.reserve(static_cast<size_t>(catalog_.n_expert) + 1);
  wanted_.reserve(static_cast<size_t>(catalog_.n_expert));
  all_experts_.resize(static_cast<size_t>(catalog_.n_expert));
  std::iota(all_experts_.begin(), all_experts_.end(), 0);
  const auto fewest = static_cast<size_t>(host_.n_slots_of_a_size());
  ahead_ = std::clamp(fewest - std::min(fewest, 3 * kRound), kRound, kMostAhead);
  // Four rows for each expert: with routing at random all but 2 % of them are used.
  read_ahead_rows_ = 4 * catalog_.n_expert / std::max(1, catalog_.n_active);
}

void TieredExperts::begin_step(int n_rows) noexcept {
  core_.begin_step(n_rows, n_rows > kPromptRows);
}

void TieredExperts::end_step() noexcept {
  core_.end_step();
}

void TieredExperts::run(const RoutedLayer& routed) noexcept {
  const std::span<const FfnGroup> groups = routed.args.groups;
  const uint64_t bytes = catalog_.layers[static_cast<size_t>(routed.layer)].expert_bytes;
  wanted_.clear();
  int n_missing = 0;
  for (int g = 0; g < routed.n_routed; ++g) {
    const FfnGroup& group = groups[static_cast<size_t>(g)];
    const int expert = routed.expert_of(group);
    wanted_.push_back(expert);
    const bool here = host_.address(routed.layer, expert) != nullptr;
    n_missing += !here;
    const auto n_pairs = static_cast<uint64_t>(group.n_pairs);
    core_.count_pairs(routed.layer, n_pairs, here ? n_pairs : 0);
    counts_.cpu_pairs += n_pairs;
    counts_.cpu_bytes += bytes;
    if (!here) counts_.fetched_pairs += n_pairs;
    (here ? counts_.hot_bytes : counts_.fetched_bytes) += bytes;
  }
  ++counts_.layer_steps;
  counts_.all_hot += n_missing == 0;

  // In rounds, so that some are read while others are computed, and few slots are enough for many experts.
  const size_t n = wanted_.size();
  groups_.assign(groups.begin(), groups.end());
  want(routed, 0, ahead_);
  for (size_t begin = 0; begin < n; begin += kRound) {
    const size_t end = std::min(begin + kRound, n);
    const int64_t begin_ns = trace_ ? now_ns() : 0;
    for (size_t i = begin; i < end; ++i) {
      ffns_[i] = host_.acquire(routed.layer, wanted_[i]);
      groups_[i].ffn = &ffns_[i];
    }
    const int64_t read_ns = trace_ ? now_ns() : 0;
    want(routed, begin + ahead_, begin + ahead_ + kRound);
    // The shared expert comes with the last round.
    const size_t groups_end = end == n ? groups_.size() : end;
    ExpertFfnArgs args = routed.args;
    args.groups = std::span(groups_).subspan(begin, groups_end - begin);
    args.fresh = begin == 0;
    if (end < n) args.y = nullptr;
    expert_ffn_cpu(args, routed.scratch, routed.row_ops, routed.linear);
    for (size_t i = begin; i < end; ++i) host_.release(routed.layer, wanted_[i]);
    if (trace_) trace_round(routed.layer, n_missing, static_cast<int>(end - begin), begin_ns, read_ns);
  }
}

// Asks for the experts [begin, end) of those this layer wants; what is beyond them are the next layer's,
// where a chunk is sure to use nearly all.
void TieredExperts::want(const RoutedLayer& routed, size_t begin, size_t end) noexcept {
  const size_t n = wanted_.size();
  const size_t here = std::min(end, n);
  if (begin < here) host_.want(routed.layer, std::span<const int32_t>(wanted_).subspan(begin, here - begin));
  const auto next = static_cast<size_t>(routed.layer) + 1;
  if (end <= n || routed.n_rows < read_ahead_rows_ || next >= catalog_.layers.size()) return;
  const size_t n_next = catalog_.layers[next].experts.size();
  const size_t first = std::min(std::max(begin, n) - n, n_next), last = std::min(end - n, n_next);
  host_.want(static_cast<int>(next), std::span<const int32_t>(all_experts_).subspan(first, last - first));
}

void TieredExperts::trace_round(int layer, int n_missing, int n_experts, int64_t begin_ns,
                                int64_t read_ns) noexcept {
  if (n_missing > 0)
    trace_->add({.lane = TraceLane::Cpu,
                 .name = "waiting for the file",
                 .category = "experts",
                 .begin_ns = begin_ns,
                 .duration_ns = read_ns - begin_ns,
                 .args = {{{"layer", layer}, {"experts", n_missing}}}});
  trace_->add({.lane = TraceLane::Cpu,
               .name = "experts",
               .category = "experts",
               .begin_ns = read_ns,
               .duration_ns = now_ns() - read_ns,
               .args = {{{"layer", layer}, {"experts", n_experts}}}});
}

}  // namespace thermo
