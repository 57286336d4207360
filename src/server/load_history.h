// What the engine has counted, second by second, for rates and ratios of a window of time. The thread of the
// sockets.
#pragma once

#include <chrono>
#include <deque>

#include "engine/token_service.h"

namespace thermo {

class LoadHistory {
 public:
  using Clock = std::chrono::steady_clock;
  struct Sample {
    Clock::time_point time;
    uint64_t n_written = 0, n_prompt = 0;  // tokens
    ExpertCounts experts;
    DraftTelemetry draft;
    double cpu_seconds = 0.0;  // of the process
  };

  void add(Sample sample) {
    samples_.push_back(std::move(sample));
    if (samples_.size() > kMost) samples_.pop_front();
  }

  // What came in about the last so many seconds: from an older sample to the newest.
  struct Window {
    double seconds = 0.0;  // 0: nothing is known yet
    double written_per_s = 0.0, prompt_per_s = 0.0, cpu = 0.0;
    double moved_per_s = 0.0, moved_bytes_per_s = 0.0, stall_share = 0.0;
    double rounds_per_s = 0.0;
    uint64_t n_uses = 0;
    double hot_ratio = 1.0;
  };
  Window window(double seconds) const;

 private:
  static constexpr size_t kMost = 64;
  std::deque<Sample> samples_;
};

}  // namespace thermo
