// --parallel: how many requests `serve` computes together, and `plan` makes room for.
#pragma once

#include <string>

#include "cli/options/options.h"
#include "engine/engine.h"

namespace thermo {

// `target` holds the default: "auto" or a number.
Option& add_parallel_option(OptionSet& set, std::string& target);
// auto: as many as fit, up to 4. Throws ConfigError, and what Engine::plan_for() does.
int n_parallel(const std::string& text, const GgufFile& file, EngineOptions options);

}  // namespace thermo
