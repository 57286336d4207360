// How the next token is chosen from the logits. A plain struct that the APIs fill and the sampler reads; it
// knows token ids and no text.
//
// The filters apply in a fixed order: bias, penalties, token filter, DRY, top_n_sigma, top_k, typical_p,
// top_p, min_p, XTC, temperature, choice.
#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "base/result.h"
#include "sampling/dry_breakers.h"

namespace thermo {

// A logit_bias that removes the token. A bias of -100 does so as well.
inline constexpr float kBanToken = -INFINITY;

struct SamplingParams {
  // The shape of the distribution. All cuts look at probabilities before temperature.
  float temperature = 1.0f;  // 0..5; 0: greedy, the most likely token after bias and penalties, no other cuts
  int top_k = 20;            // 0..n_vocab most likely tokens; 0 or -1: off
  float top_p = 0.95f;       // 0..1; fewest most likely tokens with this much of the probability; 1: off
  float min_p = 0.0f;        // 0..1; at least this share of the most likely token's probability; 0: off
  float typical_p = 1.0f;    // 0..1; tokens nearest to the expected surprise, this much in total; 1: off
  float top_n_sigma = 0.0f;  // 0..100; logits within this many deviations of the largest; 0 or -1: off
  // XTC ("exclude top choices"): at this share of the positions, of the tokens with at least the threshold of
  // what the other cuts left only the least likely one stays.
  float xtc_probability = 0.0f;  // 0..1; 0: off
  float xtc_threshold = 0.1f;    // 0..1; above a half there is never more than one such token

  // Penalties. The first two look at the generated tokens of this reply only, the third at prompt and reply.
  float presence_penalty = 0.0f;    // -2..2; subtracted from the logit of every token that occurred
  float frequency_penalty = 0.0f;   // -2..2; subtracted from the logit, for each time the token occurred
  float repetition_penalty = 1.0f;  // 0.1..10; divides positive logits, multiplies negative ones
  int repeat_last_n = -1;           // tokens that repetition_penalty and DRY look back; -1: all, 0: none

  // DRY: a token that would continue a repeated run of at least dry_allowed_length tokens loses
  // dry_multiplier * dry_base ^ (run - dry_allowed_length).
  float dry_multiplier = 0.0f;                        // 0..100; 0: off
  float dry_base = 1.75f;                             // 1..10
  int dry_allowed_length = 2;                         // 1 and up
  std::optional<int> dry_penalty_last_n{};            // nullopt: repeat_last_n; -1: all, 0: off
  std::shared_ptr<const DryBreakers> dry_breakers{};  // no run extends over them; nullptr: there are none

  // Tokens that are favoured, discouraged or removed.
  std::map<int32_t, float> logit_bias{};  // -100..100 added to the logit; -100 or kBanToken: never chosen
  bool ignore_eos = false;                // end tokens are never chosen
  int min_tokens = 0;                     // no end token before this many tokens of the reply

  // Randomness: the noise is a pure function of (seed, choice, position, token).
  std::optional<uint64_t> seed{};  // nullopt: drawn when the sampler is made; see Sampler::seed()
  uint32_t choice = 0;             // which of the n replies to one request

  // Reporting. Not read by the sampler.
  std::optional<int> n_probs{};  // 0..20 most likely tokens beside the chosen one; nullopt: no logprobs
};

// InvalidArgument with the field, its value and its range for the first value that is out of range.
Status validate(const SamplingParams& params, int n_vocab);

}  // namespace thermo
