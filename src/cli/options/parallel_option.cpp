#include "cli/options/parallel_option.h"

#include <fmt/format.h>

#include "base/error.h"
#include "engine/memory_plan.h"

namespace thermo {

Option& add_parallel_option(OptionSet& set, std::string& target) {
  return set
      .value("-np,--parallel", "N", target,
             fmt::format("requests computed together; auto: up to 4, as memory allows (default {})", target))
      .suggest({"auto"})
      .llama_env("LLAMA_ARG_N_PARALLEL");
}

int n_parallel(const std::string& text, const GgufFile& file, EngineOptions options) {
  if (text != "auto") {
    int n = 0;
    parse_value(text, n);
    if (n < 1 || n > 256)
      throw ConfigError(fmt::format("--parallel: {} cannot be used, 1 to 256 or auto was expected", text));
    return n;
  }
  for (const int n : {4, 2}) {
    options.n_sequences = n;
    try {
      if (Engine::plan_for(file, options).fits()) return n;
    } catch (const MemoryError&) {
      continue;
    }
  }
  return 1;
}

}  // namespace thermo
