// --cache-ram: main memory for the prefix cache of `serve`.
#pragma once

#include <string>

#include "cli/options/options.h"
#include "engine/engine.h"

namespace thermo {

// `target` holds the default: "auto" or "off".
void add_cache_ram_option(OptionSet& set, std::string& target);

// What it stands for, in bytes. auto: 8 GiB or a tenth of the memory that is free, whichever is less, and
// less than that where the model would get a smaller context or fewer experts in memory. Throws ConfigError,
// and what Engine::plan_for() does.
uint64_t cache_ram_bytes(const std::string& text, const GgufFile& file, EngineOptions options);

}  // namespace thermo
