#include "cli/options/expert_options.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "base/error.h"
#include "base/log.h"
#include "base/units.h"
#include "experts/budget.h"
#include "experts/telemetry.h"
#include "gguf/gguf_file.h"
#include "model/weights.h"

namespace thermo {
namespace {

// Found out before the model is loaded and not after the run, when there is something to lose.
void require_writable(const char* option, const std::string& path) {
  namespace fs = std::filesystem;
  if (path.empty()) return;
  std::error_code ignored;
  const fs::path folder = fs::path(path).has_parent_path() ? fs::path(path).parent_path() : fs::path(".");
  std::string why;
  if (!fs::is_directory(folder, ignored)) {
    why = fmt::format("the folder {} does not exist", folder.string());
  } else if (fs::is_directory(path, ignored)) {
    why = "it is a folder";
  } else if (fs::is_fifo(path, ignored)) {
    why = "it is a pipe";
  } else if (access(fs::exists(path, ignored) ? path.c_str() : folder.c_str(), W_OK) != 0) {
    why = std::strerror(errno);
  }
  if (!why.empty())
    throw ConfigError(fmt::format(
        "{} {}: it cannot be written ({}); give a path in a folder you may write to", option, path, why));
}

}  // namespace

ExpertBudget expert_budget_option(std::string_view text) {
  const Result<ExpertBudget> budget = parse_expert_budget(text);
  if (!budget) throw ConfigError(budget.error().message);
  return *budget;
}

Option& add_link_limit(OptionSet& set, ExpertFlags& flags) {
  return set.rate("--link-limit", "RATE", flags.link_limit,
                  "copy experts to the device no faster than this (12G/s), to simulate a slower link");
}

void add_expert_options(OptionSet& set, ExpertFlags& flags) {
  const auto budget = [](std::string& target) {
    return [&target](std::string_view text) {
      expert_budget_option(text);  // refused here, where the option is known
      target = text;
    };
  };
  set.section("Experts");
  set.custom(
      "--expert-cache", "SIZE", budget(flags.cache),
      "device memory for experts: a size (11G), a share of all experts (60%), or auto: what fits (default)");
  set.custom("--expert-ram", "SIZE", budget(flags.ram),
             "main memory for experts, in the same forms; the rest is read from the file as needed");
  set.value("--heat-file", "FILE", flags.heat_file,
            "file with how much each expert is used: read at the start if it exists, written at the end "
            "(default for run, chat and serve: one file per model in ~/.cache/thermocline/heat)");
  set.custom_flag(
         "--no-heat-file", [&flags](bool on) { flags.keep_heat = !on; },
         "neither read nor write heat in the cache folder")
      .advanced();
  set.contradict("--heat-file", "--no-heat-file");
  set.value("--trace", "FILE", flags.trace_file, "record what each lane does and when, for chrome://tracing")
      .no_environment();
  set.value("--pin-layers", "N", flags.pin_layers, "keep all experts of the first N layers on the device")
      .range(0, 10000)
      .advanced();
  set.flag("--expert-swaps", flags.swaps, "move experts according to their use while running (default on)")
      .advanced();
  set.custom(
         "--expert-policy", "WHICH", [&flags](std::string_view text) { flags.swaps = text == "auto"; },
         "auto: as --expert-swaps; static: as --no-expert-swaps (default auto)")
      .choices({"auto", "static"})
      .advanced();
  add_link_limit(set, flags).advanced();
  set.flag("-cmoe,--cpu-moe", flags.cpu_moe, "the same as --expert-cache 0").advanced();
  set.value("-ncmoe,--n-cpu-moe", "N", flags.n_cpu_moe,
            "taken as a budget: the size of the experts of all but N layers")
      .range(0, 10000)
      .advanced();
  set.contradict_each_other({"--expert-cache", "--cpu-moe", "--n-cpu-moe"});
}

void set_expert_options(const ExpertFlags& flags, EngineOptions& options) {
  if (int{flags.cache != "auto"} + int{flags.cpu_moe} + int{flags.n_cpu_moe >= 0} > 1)
    throw ConfigError("--expert-cache, --cpu-moe and --n-cpu-moe set the same thing: give one of them");
  require_writable("--trace", flags.trace_file);
  require_writable("--heat-file", flags.heat_file);
  options.expert_cache = expert_budget_option(flags.cpu_moe ? "0" : flags.cache);
  options.expert_ram = expert_budget_option(flags.ram);
  options.pin_layers = flags.pin_layers;
  options.expert_swaps = flags.swaps;
  options.link_limit = flags.link_limit;
  options.heat_file = flags.heat_file;
  options.trace_file = flags.trace_file;
}

void set_expert_options(const ExpertFlags& flags, const ModelConfig& config, EngineOptions& options) {
  set_expert_options(flags, options);
  if (!config.is_moe() && flags.cpu_moe) options.expert_cache = {};  // it names experts, and there are none
  if (flags.n_cpu_moe < 0 || !config.is_moe()) return;
  const int n_moe = config.n_routed_layers();
  const int n_hot = n_moe - std::min(flags.n_cpu_moe, n_moe);
  options.expert_cache = {.bytes = std::nullopt, .share = static_cast<double>(n_hot) / n_moe};
  log_info("cli", "--n-cpu-moe {} is used as --expert-cache {:.4f}%: experts move, layers do not",
           flags.n_cpu_moe, 100.0 * *options.expert_cache.share);
}

void note_unused_cache(const ExpertFlags& flags, const Engine& engine, const Terminal& terminal) {
  if (!flags.asks_for_a_cache()) return;
  if (engine.config().has_parts()) return;
  if (!engine.config().is_moe() && engine.info().device != "cpu") {
    terminal.note("--expert-cache has no effect: this model has no experts, and all of it is on the device");
  } else if (engine.info().device == "cpu") {
    terminal.note(
        "--expert-cache has no effect: the CPU computes everything in main memory; --device sim simulates a "
        "device");
  }
}

ExpertCatalog expert_catalog(const ModelConfig& config, const GgufFile& file) {
  return expert_catalog(config, Weights::bind(config, file));
}

std::string describe(const Engine& engine) {
  const ExpertTelemetry t = engine.expert_telemetry();
  if (t.pairs == 0) return "";
  const uint64_t n_tokens = std::max<uint64_t>(1, t.tokens);
  std::string text = engine.config().has_parts()
                         ? fmt::format("FFN parts {:.1f} % on the device", 100.0 * t.hit_rate())
                         : fmt::format("experts {:.1f} % hot, {} moved", 100.0 * t.hit_rate(), t.moved);
  const auto bytes = [&](uint64_t n, const char* what) {
    if (n > 0) text += fmt::format(", {}/token {}", format_bytes(n / n_tokens), what);
  };
  bytes(t.cpu_bytes, "by the CPU");
  bytes(t.fetched_bytes, "fetched");
  bytes(t.streamed_bytes, "streamed");
  bytes(t.disk_bytes, "from disk");
  if (t.stall_ns > 0)
    text += fmt::format(", waited {:.0f} us/token",
                        1e-3 * static_cast<double>(t.stall_ns) / static_cast<double>(n_tokens));
  return text;
}

}  // namespace thermo
