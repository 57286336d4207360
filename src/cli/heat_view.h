// A heat map as numbers and as a picture for the terminal. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cli/terminal.h"

namespace thermo {

// How a layer's uses spread over its experts.
struct LayerSpread {
  double total = 0.0;  // heat of all experts
  int n_used = 0;      // experts with any heat
  // Share of the uses that the hottest 10, 25 and 50 % of the experts carry (at least one expert).
  double top10 = 0.0, top25 = 0.0, top50 = 0.0;
  // Entropy over that of equal use: 1 is all experts alike, 0 is one expert only.
  double entropy = 0.0;
};
LayerSpread spread_of(std::span<const float> heat);

// Experts of a layer, hottest first; ties by number.
std::vector<int32_t> by_heat(std::span<const float> heat);

// The layer as at most `n_cells` characters, each for a run of neighbouring experts: how hot they are beside
// the layer's average. From below a quarter of it to above three times it: ` ░▒▓█`, or ` .:*#` without
// Unicode.
std::string heat_bar(std::span<const float> heat, int n_cells, const Terminal& terminal);
// What the characters mean, one line.
std::string heat_legend(const Terminal& terminal);

}  // namespace thermo
