// Options of llama.cpp that say which cores threads use, and how urgently.
#pragma once

#include <vector>

#include "cli/options/options.h"

namespace thermo {

// -C --cpu-mask, -Cr --cpu-range, --cpu-strict, --prio. The first two and the last take effect at once, for
// this thread and those it starts; so they must be read before any other is started.
void add_cpu_options(OptionSet& set, bool& pin_threads);

// "0xF0", "f0": cores 4 to 7. "4-7": the same; an end may be left out. Throw ConfigError.
std::vector<int> cores_of_mask(std::string_view text);
std::vector<int> cores_of_range(std::string_view text);

}  // namespace thermo
