// What came before, bans and filters: how they move a choice; and log-probabilities.
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <random>

#include "sampling/sampler.h"
#include "sampling/testing/slow_sampler.h"

namespace thermo {
namespace {

TEST(Sampler, PresenceAndFrequencyLookAtTheReplyOnly) {
  const std::vector<float> logits{1.0f, 0.9f, 0.0f};
  SamplingParams p = greedy();
  p.presence_penalty = 0.5f;
  Sampler sampler(p, 3);
  sampler.accept_prompt(Tokens{0, 0, 0, 0});
  EXPECT_EQ(sampler.sample(logits, 4), 0);
  sampler.accept(0);
  EXPECT_EQ(sampler.sample(logits, 5), 1);

  p = greedy();
  p.frequency_penalty = 0.04f;
  Sampler frequency(p, 3);
  for (int i = 0; i < 2; ++i) frequency.accept(0);
  EXPECT_EQ(frequency.sample(logits, 2), 0);  // 0.92 is still the largest
  frequency.accept(0);
  EXPECT_EQ(frequency.sample(logits, 3), 1);  // 0.88 is not
}

TEST(Sampler, RepetitionLooksAtPromptAndReplyWithinTheWindow) {
  const std::vector<float> logits{1.0f, 0.9f, -1.0f};
  SamplingParams p = greedy();
  p.repetition_penalty = 2.0f;
  p.repeat_last_n = 2;
  Sampler sampler(p, 3);
  sampler.accept_prompt(Tokens{0});
  EXPECT_EQ(sampler.sample(logits, 1), 1);
  sampler.accept(2);
  EXPECT_EQ(sampler.sample(logits, 2), 1);  // 0 is the second last
  sampler.accept(2);
  EXPECT_EQ(sampler.sample(logits, 3), 0);  // 0 has left the window
  for (int i = 0; i < 501; ++i) sampler.accept(i % 3);
  EXPECT_EQ(sampler.sample(logits, 504), 0);  // the window holds 1 and 2
}

TEST(Sampler, RepetitionMakesNegativeLogitsMoreNegative) {
  SamplingParams p = greedy();
  p.repetition_penalty = 2.0f;
  Sampler sampler(p, 2);
  sampler.accept_prompt(Tokens{0});
  EXPECT_EQ(sampler.sample(std::vector<float>{-1.0f, -1.5f}, 1), 1);
}

TEST(Sampler, ForcedTokensCountForNoPenaltyButForMinTokens) {
  const std::vector<float> logits{1.0f, 0.9f, 2.0f};
  SamplingParams p = greedy();
  p.presence_penalty = 2.0f;
  p.repetition_penalty = 5.0f;
  p.min_tokens = 2;
  Sampler sampler(p, 3, Tokens{2});
  sampler.accept(0, /*forced=*/true);
  EXPECT_EQ(sampler.sample(logits, 1), 0);
  sampler.accept(1, /*forced=*/true);
  EXPECT_EQ(sampler.n_accepted(), 2);
  EXPECT_EQ(sampler.sample(logits, 2), 2);
}

TEST(Sampler, DryDiscouragesContinuingARepeatedRun) {
  const std::vector<float> logits{0.0f, 0.0f, 0.0f, 1.0f, 0.5f};
  SamplingParams p = greedy();
  p.dry_multiplier = 0.8f;
  Sampler sampler(p, 5);
  sampler.accept_prompt(Tokens{0, 1, 2, 3, 0});
  sampler.accept(1);
  EXPECT_EQ(sampler.sample(logits, 6), 3);  // a run of two is continued by 2, not by 3
  sampler.accept(2);
  EXPECT_EQ(sampler.sample(logits, 7), 4);  // 0 1 2 was continued by 3
  p.dry_breakers = breakers_of({{1}});
  EXPECT_EQ(sampler_of(p, 5, {.prompt = {0, 1, 2, 3, 0, 1, 2}}).sample(logits, 7), 3);
  p.dry_breakers = breakers_of({{3, 0, 1}});  // only 2 is left of the run
  EXPECT_EQ(sampler_of(p, 5, {.prompt = {0, 1, 2, 3, 0, 1, 2}}).sample(logits, 7), 3);
  p.dry_breakers = breakers_of({{3, 0, 2}, {1, 2, 4}});  // neither is there
  EXPECT_EQ(sampler_of(p, 5, {.prompt = {0, 1, 2, 3, 0, 1, 2}}).sample(logits, 7), 4);
  p.dry_breakers = nullptr;
  p.dry_penalty_last_n = 5;
  EXPECT_EQ(sampler_of(p, 5, {.prompt = {0, 1, 2, 3, 0, 1, 2}}).sample(logits, 7), 3);
  p.dry_penalty_last_n.reset();
  Sampler forced(p, 5);
  forced.accept_prompt(Tokens{0, 1, 2, 3, 0});
  forced.accept(1, /*forced=*/true);
  forced.accept(2);
  EXPECT_EQ(forced.sample(logits, 7), 3);
}

TEST(Sampler, DryStaysFiniteOnVeryLongRuns) {
  SamplingParams p = uncut();
  p.dry_multiplier = 100.0f;
  p.dry_base = 10.0f;
  Sampler sampler(p, 3);
  sampler.accept_prompt(Tokens(5000, 1));
  for (int i = 0; i < 100; ++i) EXPECT_NE(sampler.sample(std::vector<float>{0.0f, 5.0f, 0.0f}, i), 1);
}

TEST(RunFinder, FindsWhatTokenByTokenComparisonFinds) {
  std::mt19937 rng(21);
  for (int round = 0; round < 500; ++round) {
    Tokens history(rng() % 60);
    for (int32_t& token : history) token = static_cast<int32_t>(rng() % 3) - (rng() % 20 == 0 ? 3 : 0);
    const int min_length = 1 + static_cast<int>(rng() % 4);
    const std::vector<Tokens> breakers = rng() % 3 == 0   ? std::vector<Tokens>{}
                                         : rng() % 2 == 0 ? std::vector<Tokens>{{2}}
                                                          : std::vector<Tokens>{{2, 2}, {0, 1, 2}, {1, 1}};
    RunFinder finder;
    std::map<int32_t, int> got;
    for (const RepeatedRun& run : finder.find(history, min_length, breakers_of(breakers).get()))
      got[run.next] = run.length;
    ASSERT_EQ(got, naive_runs(history, min_length, breakers_of(breakers).get())) << "round " << round;
  }
}

TEST(TokenWindow, HoldsTheLastTokensAndReportsWhatLeft) {
  for (int last_n : {1, 3, 100}) {
    TokenWindow window(last_n);
    for (int32_t i = 0; i < 1000; ++i) {
      EXPECT_EQ(window.push(i), i < last_n ? TokenWindow::kNothing : i - last_n);
      ASSERT_EQ(window.tokens().size(), static_cast<size_t>(std::min(i + 1, last_n)));
      EXPECT_EQ(window.tokens().back(), i);
      EXPECT_EQ(window.tokens().front(), std::max(0, i + 1 - last_n));
    }
  }
}

TEST(Sampler, BannedTokensAreNeverChosen) {
  const std::vector<float> logits{9.0f, 8.0f, INFINITY, 0.0f};
  for (float temperature : {0.0f, 5.0f}) {
    SamplingParams p = uncut(temperature);
    p.logit_bias = {{0, -100.0f}, {1, kBanToken}, {2, kBanToken}};
    Sampler sampler(p, 4);
    for (int i = 0; i < 100; ++i) EXPECT_EQ(sampler.sample(logits, i), 3);
  }
}

TEST(Sampler, BiasMovesTheChoice) {
  SamplingParams p = greedy();
  p.logit_bias = {{2, 5.0f}};
  EXPECT_EQ(Sampler(p, 3).sample(std::vector<float>{1.0f, 2.0f, 0.0f}, 0), 2);
}

TEST(Sampler, EndTokensWaitForMinTokensOrForever) {
  const std::vector<float> logits{1.0f, 9.0f, 8.0f};
  SamplingParams p = greedy();
  p.min_tokens = 2;
  Sampler sampler(p, 3, Tokens{1, 2, 77, -1});
  EXPECT_EQ(sampler.sample(logits, 0), 0);
  sampler.accept(0);
  EXPECT_EQ(sampler.sample(logits, 1), 0);
  sampler.accept(0);
  EXPECT_EQ(sampler.sample(logits, 2), 1);
  p.ignore_eos = true;
  Sampler endless(p, 3, Tokens{1});
  for (int i = 0; i < 10; ++i) endless.accept(0);
  EXPECT_EQ(endless.sample(logits, 10), 2);
}

TEST(Sampler, TheFilterHoldsForEveryKindOfSampling) {
  const std::vector<float> logits = random_logits(3000, 13);
  const TokenFilter rare = [](int32_t t) { return t == 1234 || t == 77; };
  for (SamplingParams p :
       {greedy(), uncut(), SamplingParams{}, SamplingParams{.top_k = 0}, SamplingParams{.top_n_sigma = 0.5f},
        SamplingParams{.top_k = 0, .typical_p = 0.5f}, SamplingParams{.top_k = 2}}) {
    p.seed = 3;
    Sampler sampler(p, 3000);
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(rare(sampler.sample(logits, i, rare)));
  }
}

TEST(Sampler, AsksTheFilterAboutFewTokensWhenItCan) {
  const std::vector<float> logits = random_logits(100000, 14);
  int asked = 0;
  const TokenFilter counting = [&](int32_t t) { return ++asked, t % 2 == 0; };
  Sampler(SamplingParams{}, 100000).sample(logits, 0, counting);
  EXPECT_LE(asked, 1000);
  asked = 0;
  Sampler(greedy(), 100000).sample(logits, 0, counting);
  EXPECT_LE(asked, 200);
}

TEST(Sampler, IsPlainGreedyOnlyWhileNothingTouchesTheLogits) {
  EXPECT_TRUE(Sampler(greedy(), 10).is_plain_greedy());
  EXPECT_TRUE(Sampler(SamplingParams{.temperature = 0.0f}, 10).is_plain_greedy());
  EXPECT_FALSE(Sampler(uncut(), 10).is_plain_greedy());
  EXPECT_FALSE(Sampler(SamplingParams{.temperature = 0.0f, .logit_bias = {{1, 1.0f}}}, 10).is_plain_greedy());
  EXPECT_FALSE(
      Sampler(SamplingParams{.temperature = 0.0f, .ignore_eos = true}, 10, Tokens{2}).is_plain_greedy());
  EXPECT_TRUE(Sampler(SamplingParams{.temperature = 0.0f, .ignore_eos = true}, 10).is_plain_greedy());
  Sampler waiting(SamplingParams{.temperature = 0.0f, .min_tokens = 1}, 10, Tokens{2});
  EXPECT_FALSE(waiting.is_plain_greedy());
  waiting.accept(1);
  EXPECT_TRUE(waiting.is_plain_greedy());
  Sampler penalised(SamplingParams{.temperature = 0.0f, .presence_penalty = 1.0f}, 10);
  EXPECT_TRUE(penalised.is_plain_greedy());
  penalised.accept(1);
  EXPECT_FALSE(penalised.is_plain_greedy());
}

// ---- log probabilities

TEST(Logprobs, AreTheLogSoftmaxOfTheRawLogits) {
  const std::vector<float> logits = random_logits(5003, 15, 4.0f);
  double total = 0, sum = 0;
  for (float logit : logits) total += std::exp(static_cast<double>(logit));
  const std::vector<TokenLogprob> all = top_logprobs(logits, 17, 5003);
  ASSERT_EQ(all.size(), 5004u);
  EXPECT_EQ(all[0].id, 17);
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_NEAR(all[i].logprob, logits[static_cast<size_t>(all[i].id)] - std::log(total), 3e-6);
    if (i > 0) sum += std::exp(static_cast<double>(all[i].logprob));
    EXPECT_TRUE(i < 2 || all[i].logprob <= all[i - 1].logprob);
  }
  EXPECT_NEAR(sum, 1.0, 1e-6);
}

TEST(Logprobs, ReportTheChosenTokenFirstAndThenTheMostLikely) {
  const std::vector<TokenLogprob> top = top_logprobs(std::vector<float>{0.0f, 3.0f, 3.0f, -5.0f, 1.0f}, 3, 3);
  ASSERT_EQ(top.size(), 4u);
  EXPECT_EQ(top[0].id, 3);
  EXPECT_EQ(top[1].id, 1);
  EXPECT_EQ(top[2].id, 2);
  EXPECT_EQ(top[3].id, 4);
  EXPECT_EQ(top_logprobs(std::vector<float>{0.0f, 1.0f}, 1, 0).size(), 1u);
  EXPECT_EQ(top_logprobs(std::vector<float>{0.0f, 1.0f}, 1, 20).size(), 3u);
}

TEST(Logprobs, GiveImpossibleTokensMinusInfinity) {
  const std::vector<float> logits{1.0f, -INFINITY, NAN, 1.0f};
  const std::vector<TokenLogprob> top = top_logprobs(logits, 2, 4);
  ASSERT_EQ(top.size(), 5u);
  EXPECT_EQ(top[0].logprob, -INFINITY);
  EXPECT_NEAR(top[1].logprob, std::log(0.5), 1e-6);
  EXPECT_EQ(top[3].logprob, -INFINITY);
  EXPECT_EQ(top[4].logprob, -INFINITY);
  EXPECT_EQ(top_logprobs(std::vector<float>(3, NAN), 0, 2)[1].logprob, -INFINITY);
  EXPECT_NEAR(top_logprobs(std::vector<float>{INFINITY, 0.0f, INFINITY}, 2, 2)[0].logprob, std::log(0.5),
              1e-6);
  EXPECT_EQ(top_logprobs(std::vector<float>{INFINITY, 0.0f, INFINITY}, 1, 2)[0].logprob, -INFINITY);
}

}  // namespace
}  // namespace thermo
