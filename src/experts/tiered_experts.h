// Routed experts computed by the processor alone, from a cache in main memory over the file: a model larger
// than memory runs.
#pragma once

#include <memory>
#include <vector>

#include "base/host_buffer.h"
#include "experts/expert_runner.h"
#include "experts/host_tier.h"
#include "experts/trace.h"

namespace thermo {

struct TieredExpertsOptions {
  uint64_t memory_bytes = 0;  // for packed experts; at least HostTier::min_bytes()
  int passing_rows = 32;      // more rows are a prompt, whose experts must not push out those of decoding
  std::vector<const MappedFile*> files = {};
  TraceWriter* trace = nullptr;
};

class TieredExperts final : public ExpertRunner {
 public:
  // `heat`: that of `catalog`, e.g. from a file; the hottest are in memory first. Loads. Throws MemoryError
  // and LoadError.
  TieredExperts(ExpertCatalog catalog, HeatMap heat, const TieredExpertsOptions& options, ThreadPool& pool,
                const std::function<void(uint64_t done, uint64_t total)>& progress);

  void begin_step(int n_rows) noexcept override;
  void end_step() noexcept override;
  void run(const RoutedLayer& layer) noexcept override;
  bool reset() override { return false; }  // what was read from the file stays
  HeatMap& heat() noexcept override { return heat_; }
  ExpertTelemetry telemetry() const noexcept override;
  std::string_view fault() const noexcept override { return host_.fault(); }

  const HostTier& host() const { return host_; }

 private:
  static constexpr size_t kRound = 32;              // experts held at once
  static constexpr size_t kMostAhead = 8 * kRound;  // experts asked for beyond those

  void want(const RoutedLayer& routed, size_t begin, size_t end) noexcept;
  void trace_round(int layer, int n_missing, int n_experts, int64_t begin_ns, int64_t read_ns) noexcept;

  ExpertCatalog catalog_;
  HeatMap heat_;
  TieredExpertsOptions options_;
  HostBuffer arena_;
  HostTier host_;
  std::vector<Ffn> ffns_;
  std::vector<FfnGroup> groups_;
  std::vector<int32_t> wanted_;
  std::vector<int32_t> all_experts_;  // 0, 1, 2, ...
  size_t ahead_ = kMostAhead;         // less in a small cache: what is read must not push out what is next
  int read_ahead_rows_ = 0;           // a chunk of so many uses nearly all experts of every layer
  ExpertTelemetry counts_;
};

// Experts by heat, for what is loaded first. Experts that were never used are left out.
std::vector<std::pair<int, int>> hottest_first(const ExpertCatalog& catalog, const HeatMap& heat);

}  // namespace thermo
