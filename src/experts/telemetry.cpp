#include "experts/telemetry.h"

namespace thermo {
namespace {

constexpr uint64_t ExpertTelemetry::*kCounters[] = {
    &ExpertTelemetry::steps,        &ExpertTelemetry::tokens,         &ExpertTelemetry::layer_steps,
    &ExpertTelemetry::all_hot,      &ExpertTelemetry::pairs,          &ExpertTelemetry::hot_pairs,
    &ExpertTelemetry::cpu_pairs,    &ExpertTelemetry::fetched_pairs,  &ExpertTelemetry::hot_bytes,
    &ExpertTelemetry::cpu_bytes,    &ExpertTelemetry::fetched_bytes,  &ExpertTelemetry::streamed_bytes,
    &ExpertTelemetry::disk_bytes,   &ExpertTelemetry::moved,          &ExpertTelemetry::moved_bytes,
    &ExpertTelemetry::cpu_ns,       &ExpertTelemetry::stall_ns,       &ExpertTelemetry::disk_wait_ns,
    &ExpertTelemetry::cold_experts, &ExpertTelemetry::foreseen,       &ExpertTelemetry::ahead_bytes,
    &ExpertTelemetry::parcels,      &ExpertTelemetry::parcels_used,   &ExpertTelemetry::parcels_came,
    &ExpertTelemetry::parcels_kept, &ExpertTelemetry::routed_layers,  &ExpertTelemetry::distinct_experts,
    &ExpertTelemetry::evicted,      &ExpertTelemetry::device_wait_ns, &ExpertTelemetry::copy_wait_ns};

}  // namespace

ExpertTelemetry operator+(const ExpertTelemetry& a, const ExpertTelemetry& b) {
  ExpertTelemetry sum = b;
  for (const auto counter : kCounters) sum.*counter += a.*counter;
  return sum;
}

ExpertTelemetry operator-(const ExpertTelemetry& now, const ExpertTelemetry& before) {
  ExpertTelemetry difference = now;
  for (const auto counter : kCounters) difference.*counter -= before.*counter;
  return difference;
}

}  // namespace thermo
