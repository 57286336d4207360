// What the expert machinery did: counted per step by the part that does it, read by bench, the trace and
// metrics.
#pragma once

#include <cstdint>

namespace thermo {

struct ExpertTelemetry {
  // Of every model with experts on the processor, split or not: routed layers run, and the experts that each
  // of them used, however many rows did.
  uint64_t routed_layers = 0, distinct_experts = 0;
  uint64_t steps = 0, tokens = 0;
  uint64_t layer_steps = 0;  // routed layers run
  uint64_t all_hot = 0;      // of them, those where nothing was cold
  uint64_t pairs = 0;        // (row, expert) uses
  uint64_t hot_pairs = 0, cpu_pairs = 0, fetched_pairs = 0;
  uint64_t parcels = 0;       // experts sent ahead, whether in time and used or not
  uint64_t parcels_came = 0;  // of them, those that were in time
  uint64_t parcels_used = 0;  // of these, those that some row chose
  uint64_t cold_experts = 0;  // distinct experts of a layer of a step, on the CPU lane
  uint64_t foreseen = 0;      // of them, those that had been guessed
  uint64_t ahead_bytes = 0;   // of guessed experts, loaded early
  uint64_t hot_bytes = 0, cpu_bytes = 0, fetched_bytes = 0, streamed_bytes = 0, disk_bytes = 0;
  uint64_t moved = 0, moved_bytes = 0;  // experts that became hot, and what was copied for that alone
  uint64_t evicted = 0;                 // experts that left the device
  uint64_t parcels_kept = 0;            // of those moved: parcels that stayed
  uint64_t cpu_ns = 0;                  // the CPU lane computed
  uint64_t stall_ns = 0;                // the device waited for the CPU lane
  uint64_t max_stall_ns = 0;            // of one layer
  uint64_t device_wait_ns = 0;          // the CPU lane waited for the device's next post
  uint64_t copy_wait_ns = 0;            // the device waited for experts that are copied for a prompt
  uint64_t disk_wait_ns = 0;
  uint64_t budget_bytes = 0, hot_expert_bytes = 0, total_expert_bytes = 0;

  double hit_rate() const {
    return pairs == 0 ? 1.0 : static_cast<double>(hot_pairs) / static_cast<double>(pairs);
  }
};

// Of all counters. What is none, as the sizes, is that of the newer one: `b`, and `now`.
ExpertTelemetry operator+(const ExpertTelemetry& a, const ExpertTelemetry& b);
ExpertTelemetry operator-(const ExpertTelemetry& now, const ExpertTelemetry& before);

}  // namespace thermo
