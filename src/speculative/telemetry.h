// What drafting did: for people, reply objects and benchmarks.
#pragma once

#include <array>
#include <cstdint>
#include <string>

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
  double draft_seconds = 0.0, verify_seconds = 0.0, commit_seconds = 0.0, plain_seconds = 0.0;

  uint64_t n_steps() const { return n_rounds + n_plain; }
  // Tokens committed for each step of a sequence.
  double tokens_per_step() const {
    return n_steps() == 0 ? 0.0 : 1.0 + static_cast<double>(n_accepted) / static_cast<double>(n_steps());
  }
  // And for each that verified drafts.
  double accept_length() const {
    return n_rounds == 0 ? 0.0 : 1.0 + static_cast<double>(n_accepted) / static_cast<double>(n_rounds);
  }
};

// Both together, and what was added since. The state is that of the first one, unless it has none.
DraftTelemetry operator+(const DraftTelemetry& a, const DraftTelemetry& b);
DraftTelemetry operator-(const DraftTelemetry& now, const DraftTelemetry& before);

}  // namespace thermo
