// What drafting did: for people, reply objects and benchmarks.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "speculative/ddtree.h"

namespace thermo {

struct DraftTelemetry {
  std::string drafter;                                  // empty: there is none
  std::string state;                                    // of the planner, at last: "on", "off: ..."
  uint64_t n_rounds = 0;                                // steps that verified drafts
  uint64_t n_plain = 0;                                 // steps of a sequence without any
  uint64_t n_drafted = 0;                               // nodes verified
  uint64_t n_accepted = 0;                              // of them
  std::array<uint64_t, kMaxDraftNodes + 1> tried{};     // by depth: rounds whose path came to nodes there
  std::array<uint64_t, kMaxDraftNodes + 1> accepted{};  // of them, accepted
  // Of the routed layers of steps that verified drafts, where they are counted: how many there were, and the
  // experts that each used, however many rows did; of these the cold ones that the processor computed.
  uint64_t n_layers = 0, n_experts = 0, n_cold_experts = 0;
  double draft_seconds = 0.0, verify_seconds = 0.0, commit_seconds = 0.0, plain_seconds = 0.0;

  // From depth 1 to the last one that a path came to.
  std::vector<uint64_t> tried_by_depth() const { return to_last_depth(tried); }
  std::vector<uint64_t> accepted_by_depth() const { return to_last_depth(accepted); }
  // Of a layer of a step that verified drafts; 0: nobody counted.
  double experts_per_layer() const { return per_layer(n_experts); }
  double cold_experts_per_layer() const { return per_layer(n_cold_experts); }
  uint64_t n_steps() const { return n_rounds + n_plain; }
  // Tokens committed for each step of a sequence.
  double tokens_per_step() const {
    return n_steps() == 0 ? 0.0 : 1.0 + static_cast<double>(n_accepted) / static_cast<double>(n_steps());
  }
  // And for each that verified drafts.
  double accept_length() const {
    return n_rounds == 0 ? 0.0 : 1.0 + static_cast<double>(n_accepted) / static_cast<double>(n_rounds);
  }

 private:
  std::vector<uint64_t> to_last_depth(const std::array<uint64_t, kMaxDraftNodes + 1>& counts) const {
    const auto n = std::find(tried.begin() + 1, tried.end(), 0u) - tried.begin();
    return {counts.begin() + 1, counts.begin() + n};
  }
  double per_layer(uint64_t n) const {
    return n_layers == 0 ? 0.0 : static_cast<double>(n) / static_cast<double>(n_layers);
  }
};

// Both together, and what was added since. The state is that of the first one, unless it has none.
DraftTelemetry operator+(const DraftTelemetry& a, const DraftTelemetry& b);
DraftTelemetry operator-(const DraftTelemetry& now, const DraftTelemetry& before);

}  // namespace thermo
