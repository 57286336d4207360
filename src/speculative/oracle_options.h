// How often a drafter is to be right, for measurements; see oracle_drafter.h.
#pragma once

#include <cstdint>
#include <vector>

#include "model/step.h"

namespace thermo {

struct OracleOptions {
  // Of the best candidate of each position, then of the second, and so on: how often it is what the text has.
  std::vector<float> probabilities;
  uint64_t seed = 1;
  std::vector<TokenId> text;  // from the beginning of a sequence
};

}  // namespace thermo
