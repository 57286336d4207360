// What the engine has counted, second by second, for rates and ratios of a window of time. The thread of the
// sockets.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "engine/token_service.h"

namespace thermo {

class LoadHistory {
 public:
  using Clock = std::chrono::steady_clock;
  struct Sample {
    Clock::time_point time;
    uint64_t n_written = 0, n_prompt = 0;  // tokens
    uint64_t n_steps = 0;
    ExpertCounts experts;
    DraftTelemetry draft;
    double cpu_seconds = 0.0;                           // of the process
    std::optional<int> busy_threads;                    // at that moment; nullopt: not known
    std::optional<uint64_t> memory_bytes;               // to and from main memory, so far; likewise
    std::shared_ptr<const std::vector<uint64_t>> uses;  // of each expert; nullptr: not known
    std::vector<LayerUses> layers;                      // as ExpertHeat has them
  };

  void add(Sample sample) {
    samples_.push_back(std::move(sample));
    if (samples_.size() > kMost) samples_.pop_front();
  }
  // Whether the engine did anything of late, with so many steps by now.
  bool stirs(uint64_t n_steps) const {
    return samples_.size() < 2 || samples_[samples_.size() - 2].n_steps != n_steps;
  }

  // What came in about the last so many seconds: from an older sample to the newest.
  struct Window {
    double seconds = 0.0;  // 0: nothing is known yet
    double written_per_s = 0.0, prompt_per_s = 0.0, cpu = 0.0;
    double moved_per_s = 0.0, moved_bytes_per_s = 0.0, stall_share = 0.0;
    double rounds_per_s = 0.0;
    std::optional<double> memory_bytes_per_s = {};  // nullopt: not known
    uint64_t n_uses = 0;
    double hot_ratio = 1.0;
  };
  Window window(double seconds) const;
  Sample newest() const { return samples_.empty() ? Sample{} : samples_.back(); }
  // Uses of each expert about so many seconds ago; nullptr: not known.
  std::shared_ptr<const std::vector<uint64_t>> uses_before(double seconds) const;
  // Share of the uses of each layer's experts that were hot; nullopt: there were none.
  std::vector<std::optional<double>> layer_hits(double seconds) const;

 private:
  const Sample* sample_before(double seconds) const;

  static constexpr size_t kMost = 64;
  std::deque<Sample> samples_;
};

}  // namespace thermo
