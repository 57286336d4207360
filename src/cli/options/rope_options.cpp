#include "cli/options/rope_options.h"

#include "base/error.h"

namespace thermo {

void add_rope_options(OptionSet& set, RopeOverride& rope, bool from_environment) {
  const auto finish = [&](Option& option) {
    option.advanced();
    if (!from_environment) option.no_environment();
  };
  // llama.cpp's defaults are below zero: the file's, else the usual ones.
  const auto number = [&](const char* name, std::optional<double>& target, double high, const char* help) {
    finish(set.custom(
                  name, "X",
                  [&target](std::string_view text) {
                    double value = 0.0;
                    parse_value(text, value);
                    target = value < 0.0 ? std::nullopt : std::optional<double>(value);
                  },
                  help)
               .range(-1, high));
  };
  finish(set.custom(
                "--rope-scaling", "HOW",
                [&rope](std::string_view text) {
                  using Kind = RopeOverride::Kind;
                  rope.kind = text == "none" ? Kind::None : text == "linear" ? Kind::Linear : Kind::Yarn;
                },
                "stretch the positions of full attention: none, linear or yarn (default: as the file says)")
             .choices({"none", "linear", "yarn"})
             .llama_env("LLAMA_ARG_ROPE_SCALING_TYPE"));
  finish(set.value("--rope-scale", "N", rope.factor,
                   "by which factor; alone it is linear scaling (default: the file's)")
             .range(1, 1 << 16));
  finish(
      set.count("--yarn-orig-ctx", "N", rope.original_context,
                "YaRN: the context before stretching; 0: the file's, else its training length (default 0)"));
  number(
      "--yarn-ext-factor", rope.extrapolation, 1,
      "YaRN: share of their own frequency that fast pairs keep, 0 to 1; -1: the usual one, 1 (default -1)");
  number("--yarn-attn-factor", rope.attention, 100,
         "YaRN: the magnitude, 1 + 0.1 ln(factor), times this; -1: the usual one, 1 (default -1)");
  number(
      "--yarn-beta-slow", rope.beta_slow, 1 << 16,
      "YaRN: pairs that turn less often than this are stretched whole; -1: the file's, else 1 (default -1)");
  number("--yarn-beta-fast", rope.beta_fast, 1 << 16,
         "YaRN: pairs that turn more often are not stretched; -1: the file's, else 32 (default -1)");
}

}  // namespace thermo
