// Routed experts that the processor computes alone, from a cache in main memory over the file, so that a
// model larger than memory runs.
#pragma once

#include <vector>

#include "experts/expert_core.h"
#include "experts/expert_runner.h"
#include "experts/trace.h"

namespace thermo {

class TieredExperts final : public ExpertRunner {
 public:
  // options.host_bytes is the cache. `heat`: that of `catalog`, e.g. from a file; the hottest are in memory
  // first. Loads. Throws MemoryError and LoadError.
  TieredExperts(ExpertCatalog catalog, HeatMap heat, const SplitOptions& options, Isa isa, ThreadPool& pool,
                const ExpertCore::Progress& progress);

  void begin_step(int n_rows) noexcept override;
  void end_step() noexcept override;
  void run(const RoutedLayer& layer) noexcept override;
  bool reset() override { return false; }  // what was read from the file stays
  HeatMap& heat() noexcept override { return core_.heat(); }
  ExpertTelemetry telemetry() const noexcept override { return core_.telemetry(); }
  void places(std::span<ExpertPlace> out) const noexcept override { core_.places(out); }
  std::span<const LayerUses> layer_uses() const noexcept override { return core_.layer_uses(); }
  std::string_view fault() const noexcept override { return core_.fault(); }

 private:
  static constexpr int kPromptRows = 32;            // more rows are a prompt
  static constexpr size_t kRound = 32;              // experts held at once
  static constexpr size_t kMostAhead = 8 * kRound;  // experts asked for beyond those

  void want(const RoutedLayer& routed, size_t begin, size_t end) noexcept;
  void trace_round(int layer, int n_missing, int n_experts, int64_t begin_ns, int64_t read_ns) noexcept;

  ExpertCore core_;
  const ExpertCatalog& catalog_;
  HostTier& host_;
  ExpertTelemetry& counts_;
  TraceWriter* trace_;
  std::vector<Ffn> ffns_;
  std::vector<FfnGroup> groups_;
  std::vector<int32_t> wanted_;
  std::vector<int32_t> all_experts_;  // 0, 1, 2, ...
  size_t ahead_ = kMostAhead;         // less in a small cache: what is read must not push out what is next
  int read_ahead_rows_ = 0;           // a chunk of so many uses nearly all experts of every layer
};

}  // namespace thermo
