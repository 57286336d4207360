#include "model/rope_override.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "model/arch/keys.h"
#include "model/model_config.h"

namespace thermo {
namespace {

void check(const char* name, const std::optional<double>& value, double low, double high) {
  if (value && !(*value >= low && *value <= high))
    throw ConfigError(fmt::format("{} is {:g}, expected {:g} to {:g}", name, *value, low, high));
}

}  // namespace

void override_rope(const RopeOverride& o, ModelConfig& config) {
  if (o == RopeOverride{}) return;
  check("the factor of the rotation", o.factor, 1.0, 1 << 16);
  check("YaRN's share of unscaled frequencies", o.extrapolation, 0.0, 1.0);
  check("YaRN's factor of the magnitude", o.attention, 0.01, 100.0);
  check("YaRN's fast end", o.beta_fast, 0.001, 1 << 16);
  check("YaRN's slow end", o.beta_slow, 0.001, 1 << 16);
  if (o.original_context < 0 || static_cast<uint64_t>(o.original_context) > kMaxContext)
    throw ConfigError(
        fmt::format("the context before YaRN is {}, expected 0 to {}", o.original_context, kMaxContext));
  if (config.ropes.empty()) throw ConfigError("this model rotates nothing: there is nothing to scale");

  RopeConfig& rope = config.ropes.front();  // of full attention
  const double before = rope.scaling == RopeScaling::None || rope.factor <= 0.0 ? 1.0 : rope.factor;
  switch (o.kind) {
    case RopeOverride::Kind::File:
      if (o.factor && rope.scaling == RopeScaling::None) rope.scaling = RopeScaling::Linear;
      break;
    case RopeOverride::Kind::None:
      if (o.factor)
        throw ConfigError(
            fmt::format("the rotation is not to be scaled, but by {:g}: leave one out", *o.factor));
      rope.scaling = RopeScaling::None;
      break;
    case RopeOverride::Kind::Linear:
      rope.scaling = RopeScaling::Linear;
      break;
    case RopeOverride::Kind::Yarn:
      rope.scaling = RopeScaling::Yarn;
      break;
  }
  if (o.has_yarn_numbers() && rope.scaling != RopeScaling::Yarn)
    throw ConfigError(
        "numbers of YaRN were given, but this model's rotation is not scaled with it; ask for it",
        Remedy::Yarn);
  if (rope.scaling == RopeScaling::None) {
    rope.factor = 1.0;
    return;
  }
  rope.factor = o.factor.value_or(before);
  if (rope.factor == 1.0 && !o.factor)
    throw ConfigError(
        "the rotation is to be scaled, but neither the options nor the file say how far; give a factor",
        Remedy::RopeFactor);
  // What the model was trained for before any scaling.
  const double trained = rope.original_context > 0 ? rope.original_context : config.n_ctx_train / before;
  if (rope.scaling == RopeScaling::Yarn) {
    rope.original_context = o.original_context > 0 ? o.original_context : std::floor(trained);
    rope.extrapolation = o.extrapolation.value_or(rope.extrapolation);
    rope.attention = o.attention.value_or(rope.attention);
    rope.beta_fast = o.beta_fast.value_or(rope.beta_fast);
    rope.beta_slow = o.beta_slow.value_or(rope.beta_slow);
    if (rope.beta_fast <= rope.beta_slow)
      throw ConfigError(fmt::format("YaRN's fast end is {:g}, expected more than the slow end, {:g}",
                                    rope.beta_fast, rope.beta_slow));
  }
  const double reach = rope.factor * (rope.scaling == RopeScaling::Yarn ? rope.original_context : trained);
  config.n_ctx_train =
      std::max(config.n_ctx_train, static_cast<int>(std::min(reach, static_cast<double>(kMaxContext))));
}

}  // namespace thermo
