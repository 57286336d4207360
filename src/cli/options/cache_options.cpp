#include "cli/options/cache_options.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/cpu_info.h"
#include "base/error.h"
#include "base/units.h"
#include "engine/memory_plan.h"

namespace thermo {
namespace {

constexpr uint64_t kMostAuto = 8 * GiB, kLeastAuto = 16 * MiB;

// nullopt: auto.
std::optional<uint64_t> parse_cache_ram(std::string_view text) {
  if (text == "auto") return std::nullopt;
  if (text == "off") return 0;
  const bool is_plain = text.find_first_not_of("0123456789") == std::string_view::npos;
  const std::optional<uint64_t> bytes = parse_bytes(is_plain ? std::string(text) + "M" : std::string(text));
  if (!bytes) throw ConfigError("a size (64M, 4GiB; a plain number is MiB), auto or off was expected");
  return bytes;
}

}  // namespace

void add_cache_ram_option(OptionSet& set, std::string& target) {
  set.custom(
         "-cram,--cache-ram", "SIZE",
         [&target](std::string_view text) {
           parse_cache_ram(text);
           target = text;
         },
         fmt::format(
             "main memory for the prefix cache: 64M, 4G, a plain number is MiB; auto: a tenth of what "
             "is free, at most 8G; off (default {})",
             target))
      .suggest({"auto", "off"});
}

uint64_t cache_ram_bytes(const std::string& text, const GgufFile& file, EngineOptions options) {
  const std::optional<uint64_t> given = parse_cache_ram(text);
  if (given == uint64_t{0}) return 0;
  options.cache_bytes = 0;
  const MemoryPlan without = Engine::plan_for(file, options);
  if (given) {
    options.cache_bytes = *given;
    try {
      Engine::plan_for(file, options);
    } catch (const MemoryError&) {
      throw MemoryError(fmt::format(
          "--cache-ram: {} do not fit, beside the model and a context of {} there are {}: give less, or auto",
          format_bytes(*given), without.n_ctx,
          format_bytes(without.available_bytes - std::min(without.available_bytes, without.total_bytes))));
    }
    return *given;
  }
  for (uint64_t bytes = std::min(kMostAuto, available_memory_bytes() / 10); bytes >= kLeastAuto; bytes /= 2) {
    options.cache_bytes = bytes;
    try {
      const MemoryPlan plan = Engine::plan_for(file, options);
      if (plan.fits() && plan.n_ctx == without.n_ctx && plan.host_expert_bytes == without.host_expert_bytes &&
          plan.device_total_bytes == without.device_total_bytes)
        return bytes;
    } catch (const MemoryError&) {
      continue;
    }
  }
  return 0;
}

}  // namespace thermo
