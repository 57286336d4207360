#include "sampling/sampling_params.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sampling/testing/slow_sampler.h"

namespace thermo {
namespace {

using ::testing::HasSubstr;

constexpr int kVocab = 100;

TEST(SamplingParams, DefaultsAreTheBuiltInOnesAndValid) {
  const SamplingParams params;
  EXPECT_EQ(params.temperature, 1.0f);
  EXPECT_EQ(params.top_p, 0.95f);
  EXPECT_EQ(params.top_k, 20);
  EXPECT_EQ(params.min_p, 0.0f);
  EXPECT_TRUE(validate(params, kVocab).ok());
  EXPECT_TRUE(validate(params, 1).ok());
}

TEST(SamplingParams, BothEndsOfEveryRangeAreValid) {
  for (const SamplingParams& params : {SamplingParams{.temperature = 0.0f,
                                      .top_k = -1,
                                      .top_p = 0.0f,
                                      .typical_p = 0.0f,
                                      .top_n_sigma = -1.0f,
                                      .presence_penalty = -2.0f,
                                      .frequency_penalty = -2.0f,
                                      .repetition_penalty = 0.1f,
                                      .repeat_last_n = -1,
                                      .dry_base = 1.0f,
                                      .dry_allowed_length = 1,
                                      .dry_penalty_last_n = -1,
                                      .logit_bias = {{0, -100.0f}, {kVocab - 1, kBanToken}},
                                      .n_probs = 0},
                                       SamplingParams{.temperature = 5.0f,
                                       .top_k = kVocab,
                                       .top_p = 1.0f,
                                       .min_p = 1.0f,
                                       .top_n_sigma = 100.0f,
                                       .presence_penalty = 2.0f,
                                       .frequency_penalty = 2.0f,
                                       .repetition_penalty = 10.0f,
                                       .repeat_last_n = 0,
                                       .dry_multiplier = 100.0f,
                                       .dry_base = 10.0f,
                                       .dry_penalty_last_n = 0,
                                       .logit_bias = {{5, 100.0f}},
                                       .seed = UINT64_MAX,
                                       .n_probs = 20}}) {
    const Status status = validate(params, kVocab);
    EXPECT_TRUE(status.ok()) << (status.ok() ? "" : status.error().message);
  }
}

TEST(SamplingParams, RefusalsNameTheFieldTheValueAndTheRange) {
  struct Case {
    SamplingParams params;
    const char* field;
    const char* range;
  };
  const Case cases[] = {
      {{.temperature = 5.5f}, "temperature is 5.5", "0 to 5"},
      {{.temperature = -0.1f}, "temperature is -0.1", "0 to 5"},
      {{.temperature = NAN}, "temperature is nan", "0 to 5"},
      {{.top_k = kVocab + 1}, "top_k is 101", "-1 to 100"},
      {{.top_k = -2}, "top_k is -2", "-1 to 100"},
      {{.top_p = 1.01f}, "top_p is 1.01", "0 to 1"},
      {{.min_p = -0.5f}, "min_p", "0 to 1"},
      {{.xtc_probability = 1.5f}, "xtc_probability", "0 to 1"},
      {{.xtc_threshold = -0.1f}, "xtc_threshold", "0 to 1"},
      {{.typical_p = 2.0f}, "typical_p", "0 to 1"},
      {{.top_n_sigma = -0.5f}, "top_n_sigma is -0.5", "0 to 100"},
      {{.presence_penalty = 2.5f}, "presence_penalty", "-2 to 2"},
      {{.frequency_penalty = -3.0f}, "frequency_penalty", "-2 to 2"},
      {{.repetition_penalty = 0.0f}, "repetition_penalty is 0", "0.1 to 10"},
      {{.repeat_last_n = -2}, "repeat_last_n is -2", "-1 or more"},
      {{.dry_multiplier = INFINITY}, "dry_multiplier is inf", "0 to 100"},
      {{.dry_base = 0.5f}, "dry_base", "1 to 10"},
      {{.dry_allowed_length = 0}, "dry_allowed_length is 0", "1 or more"},
      {{.dry_penalty_last_n = -5}, "dry_penalty_last_n is -5", "-1 or more"},
      {{.dry_breakers = breakers_of({{1, kVocab}})}, "dry_sequence_breakers names a token", "0 to 99"},
      {{.logit_bias = {{kVocab, 1.0f}}}, "logit_bias names token 100", "0 to 99"},
      {{.logit_bias = {{-1, 1.0f}}}, "logit_bias names token -1", "0 to 99"},
      {{.logit_bias = {{7, 101.0f}}}, "logit_bias of token 7 is 101", "-100 to 100"},
      {{.logit_bias = {{7, NAN}}}, "logit_bias of token 7 is nan", "-100 to 100"},
      {{.min_tokens = -1}, "min_tokens is -1", "0 or more"},
      {{.n_probs = 21}, "n_probs is 21", "0 to 20"},
  };
  for (const Case& c : cases) {
    const Status status = validate(c.params, kVocab);
    ASSERT_FALSE(status.ok()) << c.field;
    EXPECT_EQ(status.error().code, ErrorCode::InvalidArgument);
    EXPECT_THAT(status.error().message, HasSubstr(c.field));
    EXPECT_THAT(status.error().message, HasSubstr(c.range));
  }
}

}  // namespace
}  // namespace thermo
