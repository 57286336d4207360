#include "sampling/sampling_params.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace thermo {
namespace {

constexpr int kNoLimit = std::numeric_limits<int>::max();

Error refuse(std::string message) {
  return {ErrorCode::InvalidArgument, std::move(message)};
}

struct FloatRange {
  const char* name;
  float value, low, high;
  const char* note;
};

struct IntRange {
  const char* name;
  int value, low, high;
  const char* note;
};

}  // namespace

Status validate(const SamplingParams& p, int n_vocab) {
  const FloatRange floats[] = {
      {"temperature", p.temperature, 0.0f, 5.0f, " (0 is greedy)"},
      {"top_p", p.top_p, 0.0f, 1.0f, " (1 is off)"},
      {"min_p", p.min_p, 0.0f, 1.0f, " (0 is off)"},
      {"typical_p", p.typical_p, 0.0f, 1.0f, " (1 is off)"},
      {"xtc_probability", p.xtc_probability, 0.0f, 1.0f, " (0 is off)"},
      {"xtc_threshold", p.xtc_threshold, 0.0f, 1.0f, ""},
      {"presence_penalty", p.presence_penalty, -2.0f, 2.0f, " (0 is off)"},
      {"frequency_penalty", p.frequency_penalty, -2.0f, 2.0f, " (0 is off)"},
      {"repetition_penalty", p.repetition_penalty, 0.1f, 10.0f, " (1 is off)"},
      {"dry_multiplier", p.dry_multiplier, 0.0f, 100.0f, " (0 is off)"},
      {"dry_base", p.dry_base, 1.0f, 10.0f, ""},
      {"top_n_sigma", p.top_n_sigma == -1.0f ? 0.0f : p.top_n_sigma, 0.0f, 100.0f, " (0 or -1 is off)"},
  };
  for (const FloatRange& r : floats) {
    if (r.value >= r.low && r.value <= r.high) continue;  // false for NaN
    return refuse(fmt::format("{} is {}, expected {} to {}{}", r.name, r.value, r.low, r.high, r.note));
  }

  // The default is valid for any vocabulary: those of test models may be smaller.
  const int top_k_high = std::max(n_vocab, SamplingParams{}.top_k);
  const IntRange ints[] = {
      {"top_k", p.top_k, -1, top_k_high, " (0 or -1 is off; the upper end is the vocabulary)"},
      {"repeat_last_n", p.repeat_last_n, -1, kNoLimit, " (-1 is the whole context)"},
      {"dry_allowed_length", p.dry_allowed_length, 1, kNoLimit, ""},
      {"dry_penalty_last_n", p.dry_penalty_last_n.value_or(0), -1, kNoLimit, " (-1 is the whole context)"},
      {"min_tokens", p.min_tokens, 0, kNoLimit, ""},
      {"n_probs", p.n_probs.value_or(0), 0, 20, ""},
  };
  for (const IntRange& r : ints) {
    if (r.value >= r.low && r.value <= r.high) continue;
    if (r.high == kNoLimit)
      return refuse(fmt::format("{} is {}, expected {} or more{}", r.name, r.value, r.low, r.note));
    return refuse(fmt::format("{} is {}, expected {} to {}{}", r.name, r.value, r.low, r.high, r.note));
  }

  for (const auto& [token, bias] : p.logit_bias) {
    if (token < 0 || token >= n_vocab)
      return refuse(fmt::format("logit_bias names token {}, expected 0 to {}", token, n_vocab - 1));
    if (!(bias >= -100.0f && bias <= 100.0f) && bias != kBanToken)
      return refuse(
          fmt::format("logit_bias of token {} is {}, expected -100 to 100 (-100 bans it)", token, bias));
  }
  if (p.dry_breakers != nullptr && !p.dry_breakers->fit(n_vocab))
    return refuse(fmt::format("dry_sequence_breakers names a token outside 0 to {}", n_vocab - 1));
  return {};
}

}  // namespace thermo
