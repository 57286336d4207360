#include "speculative/telemetry.h"

namespace thermo {
namespace {

template <class Join>
DraftTelemetry join(const DraftTelemetry& a, const DraftTelemetry& b, const Join& join_one) {
  DraftTelemetry out = a.drafter.empty() ? b : a;
  constexpr uint64_t DraftTelemetry::*kCounters[] = {
      &DraftTelemetry::n_rounds,      &DraftTelemetry::n_plain,  &DraftTelemetry::n_drafted,
      &DraftTelemetry::n_accepted,    &DraftTelemetry::n_layers, &DraftTelemetry::n_experts,
      &DraftTelemetry::n_cold_experts};
  for (const auto counter : kCounters) out.*counter = join_one(a.*counter, b.*counter);
  for (size_t i = 0; i < out.tried.size(); ++i) {
    out.tried[i] = join_one(a.tried[i], b.tried[i]);
    out.accepted[i] = join_one(a.accepted[i], b.accepted[i]);
  }
  constexpr double DraftTelemetry::*kTimes[] = {
      &DraftTelemetry::draft_seconds, &DraftTelemetry::verify_seconds, &DraftTelemetry::commit_seconds,
      &DraftTelemetry::plain_seconds};
  for (const auto time : kTimes) out.*time = join_one(a.*time, b.*time);
  return out;
}

}  // namespace

DraftTelemetry operator+(const DraftTelemetry& a, const DraftTelemetry& b) {
  return join(a, b, [](auto x, auto y) { return x + y; });
}

DraftTelemetry operator-(const DraftTelemetry& now, const DraftTelemetry& before) {
  return join(now, before, [](auto x, auto y) { return x - y; });
}

}  // namespace thermo
