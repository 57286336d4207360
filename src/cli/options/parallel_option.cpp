#include "cli/options/parallel_option.h"

#include <fmt/format.h>

#include <charconv>

#include "base/error.h"
#include "engine/memory_plan.h"

namespace thermo {

Option& add_parallel_option(OptionSet& set, std::string& target) {
  const auto check = [&target](std::string_view text) {
    int n = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), n);
    const bool is_number = error == std::errc() && end == text.data() + text.size();
    if (text != "auto" && (!is_number || n < 1 || n > 256))
      throw ConfigError("1 to 256 or auto was expected");
    target = text;
  };
  return set
      .custom("-np,--parallel", "N", check,
              fmt::format("requests computed together; auto: up to 4, as memory allows (default {})", target))
      .suggest({"auto"})
      .llama_env("LLAMA_ARG_N_PARALLEL");
}

int n_parallel(const std::string& text, const GgufFile& file, EngineOptions options) {
  if (text != "auto") {
    int n = 0;
    parse_value(text, n);
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
