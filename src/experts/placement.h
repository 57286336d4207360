// Which experts are hot, given how they are used and how much memory there is. Pure: numbers in, lists out.
#pragma once

#include <cstdint>
#include <vector>

#include "experts/catalog.h"
#include "experts/heat.h"

namespace thermo {

struct PlacementInputs {
  const ExpertCatalog* catalog = nullptr;
  const HeatMap* heat = nullptr;  // nullptr or empty: every expert is worth the same
  uint64_t budget_bytes = 0;
  int floor = 0;       // experts every layer gets first; 0: twice the active ones
  int pin_layers = 0;  // the first layers (dense ones count) are wholly hot before anything else is
};

struct Placement {
  std::vector<std::vector<int32_t>> hot;  // of each layer, the most valuable first
  uint64_t bytes = 0;
  int floor = 0;  // what every layer got; below the wanted floor when the budget is small
  int n_hot = 0;
  double expected_hit_rate = 0.0;  // share of the uses that `heat` knows; the share of experts without heat

  bool is_hot(int layer, int expert) const;
};

// Greedy by heat per byte above the floor. Deterministic: ties go to the lower layer, then the lower expert,
// spread so that layers without heat get equal shares.
//
// The budget buys the first part of one order that does not depend on it: pinned layers, then the floors in
// rounds (every layer's hottest expert, every layer's second, ...), then the rest by heat per byte. So
//  - a larger budget keeps everything that a smaller one had;
//  - a budget below the floors lowers all of them evenly, and one below an expert for each layer goes to the
//    layers whose hottest expert is worth most: a hit saves the same time wherever it happens;
//  - no hot expert above the floor can be exchanged for a cold one of its size or smaller and gain.
// It ends at the first expert that does not fit, which leaves less than one expert of the budget unused.
Placement place_experts(const PlacementInputs& inputs);

}  // namespace thermo
