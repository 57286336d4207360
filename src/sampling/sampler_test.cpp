#include "sampling/sampler.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <set>

#include "sampling/noise.h"
#include "sampling/testing/slow_sampler.h"

namespace thermo {
namespace {

// ---- the distribution

TEST(Sampler, DrawsFromTheSoftmaxAtEveryTemperature) {
  for (float temperature : {0.3f, 0.7f, 1.0f, 2.0f, 5.0f})
    expect_distribution(random_logits(60, 1), uncut(temperature));
}

TEST(Sampler, DrawsFromTheDistributionThatEachCutLeaves) {
  const std::vector<float> logits = random_logits(80, 2);
  SamplingParams p = uncut();
  p.top_k = 10;
  expect_distribution(logits, p);
  p = uncut();
  p.top_p = 0.8f;
  expect_distribution(logits, p);
  p = uncut();
  p.min_p = 0.1f;
  expect_distribution(logits, p);
  p = uncut();
  p.typical_p = 0.6f;
  expect_distribution(logits, p);
  p = uncut();
  p.top_n_sigma = 1.2f;
  expect_distribution(logits, p);
  p = SamplingParams{
      .temperature = 0.8f, .top_k = 30, .top_p = 0.9f, .min_p = 0.02f, .typical_p = 0.95f, .seed = 9};
  expect_distribution(logits, p);
}

TEST(Sampler, DrawsFromThePenalisedDistribution) {
  SamplingParams p = uncut();
  p.presence_penalty = 0.7f;
  p.frequency_penalty = 0.3f;
  p.repetition_penalty = 1.3f;
  p.logit_bias = {{3, 2.0f}, {4, -1.0f}, {5, kBanToken}};
  expect_distribution(random_logits(40, 3), p, {.prompt = {1, 2, 3}, .reply = {4, 4, 7, 8, 4}});
}

// The strongest test: with the same noise the choice must be the same token, whatever the parameters.
TEST(Sampler, ChoosesWhatTheSlowSamplerChooses) {
  std::mt19937 rng(17);
  const auto pick = [&](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> all{values...};
    return all[rng() % all.size()];
  };
  for (int round = 0; round < 4000; ++round) {
    const int n_vocab = pick(1, 2, 7, 127, 128, 129, 500, 3001);
    std::vector<float> logits = random_logits(n_vocab, static_cast<uint32_t>(rng()), pick(0.5f, 2.0f, 8.0f));
    if (rng() % 4 == 0)  // ties
      for (float& logit : logits) logit = std::round(logit);
    if (rng() % 4 == 0)
      for (float& logit : logits)
        if (rng() % 8 == 0) logit = pick(NAN, -INFINITY);
    logits[rng() % logits.size()] = 1.5f;
    SamplingParams p;
    p.seed = rng();
    p.choice = static_cast<uint32_t>(rng() % 3);
    p.temperature = pick(0.0f, 0.01f, 0.7f, 1.0f, 5.0f);
    p.top_k = std::min(n_vocab, pick(0, -1, 1, 5, 20, 300));
    p.top_p = pick(0.0f, 0.5f, 0.95f, 1.0f);
    p.min_p = pick(0.0f, 0.0f, 0.05f, 1.0f);
    p.typical_p = pick(1.0f, 1.0f, 0.5f);
    p.top_n_sigma = pick(0.0f, -1.0f, 1.0f, 3.0f);
    p.xtc_probability = pick(0.0f, 0.0f, 0.5f, 1.0f);
    p.xtc_threshold = pick(0.0f, 0.1f, 0.3f);
    p.presence_penalty = pick(0.0f, 1.5f, -1.0f);
    p.frequency_penalty = pick(0.0f, 0.5f);
    p.repetition_penalty = pick(1.0f, 1.2f, 0.8f);
    p.repeat_last_n = pick(-1, 0, 3, 16);
    p.dry_multiplier = pick(0.0f, 0.8f);
    p.dry_allowed_length = pick(1, 2, 3);
    if (rng() % 2 == 0) p.dry_penalty_last_n = pick(-1, 0, 8);
    p.ignore_eos = pick(false, true);
    p.min_tokens = pick(0, 5, 50);
    Story story;
    const auto token = [&] {
      return static_cast<int32_t>(rng() % static_cast<uint64_t>(std::min(n_vocab, 6)));
    };
    for (uint64_t i = rng() % 30; i > 0; --i) story.prompt.push_back(token());
    for (uint64_t i = rng() % 30; i > 0; --i) story.reply.push_back(token());
    if (n_vocab > 6) {
      story.end_tokens = {static_cast<int32_t>(rng() % static_cast<uint64_t>(n_vocab))};
      p.logit_bias = {{token(), 3.0f}, {token(), -100.0f}};
      const int32_t breaker = token();
      p.dry_breakers = breakers_of({{breaker}, {(breaker + 1) % 6, (breaker + 2) % 6}});
      if (rng() % 3 == 0)
        story.filter = [m = 2 + rng() % 5](int32_t t) { return static_cast<uint32_t>(t) % m == 0; };
    }
    if (naive_candidates(naive_edit(logits, p, story), uncut()).empty()) continue;
    Sampler sampler = sampler_of(p, logits.size(), story);
    for (int64_t position : {0, 1, 77777})
      ASSERT_EQ(sampler.sample(logits, position, story.filter), naive_sample(logits, p, story, position))
          << "round " << round;
  }
}

TEST(Sampler, ExcludesTopChoicesAsOftenAsItIsToldTo) {
  std::vector<float> logits(10, -20.0f);
  logits[3] = 2.0f, logits[5] = 1.5f, logits[7] = 1.0f, logits[8] = -3.0f;
  SamplingParams p = uncut();
  p.xtc_probability = 0.4f;
  p.xtc_threshold = 0.15f;
  Sampler sampler(p, 10);
  int n_first = 0;
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) {
    const int32_t token = sampler.sample(logits, i);
    n_first += token == 3 || token == 5;
    EXPECT_NE(token, 0);
  }
  const std::map<int32_t, double> plain = naive_distribution(logits, uncut());
  EXPECT_NEAR(n_first / static_cast<double>(kDraws), 0.6 * (plain.at(3) + plain.at(5)), 0.02);
  // Nothing is excluded where only one token is above the threshold.
  p.xtc_probability = 1.0f;
  p.xtc_threshold = 0.51f;
  Sampler one(p, 10), all(uncut(), 10);
  for (int i = 0; i < 200; ++i) EXPECT_EQ(one.sample(logits, i), all.sample(logits, i));
}

TEST(Sampler, KeepsExactlyTheTopK) {
  for (int k : {1, 2, 19, 20, 21, 127, 500, 1999, 2000}) {
    const std::vector<float> logits = random_logits(2000, 5);
    TopTokens top;
    top.start(logits);
    std::vector<Candidate> got;
    top.take(k, got);
    SamplingParams p = uncut();
    p.top_k = k;
    const std::vector<Candidate> want = naive_candidates(logits, p);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i].id, want[i].id);
  }
}

TEST(Sampler, AlwaysKeepsAtLeastOneToken) {
  const std::vector<float> logits = random_logits(100, 6);
  const int32_t best = Sampler(greedy(), 100).sample(logits, 0);
  for (SamplingParams p : {SamplingParams{.top_p = 0.0f}, SamplingParams{.min_p = 1.0f},
                           SamplingParams{.top_k = 1}, SamplingParams{.top_n_sigma = 1e-6f}}) {
    p.seed = 1;
    for (int i = 0; i < 50; ++i) EXPECT_EQ(Sampler(p, 100).sample(logits, i), best);
  }
}

// ---- randomness

TEST(Sampler, ChoiceDependsOnlyOnSeedChoiceAndPosition) {
  const std::vector<float> logits(1000, 0.0f), other = random_logits(1000, 8);
  Sampler forward(uncut(), 1000), backward(uncut(), 1000);
  std::map<int64_t, int32_t> seen;
  for (int64_t position = 0; position < 200; ++position) seen[position] = forward.sample(logits, position);
  for (int64_t position = 199; position >= 0; --position) {
    backward.sample(other, position);  // neither calls in between nor their order matter
    backward.accept(3);
    EXPECT_EQ(backward.sample(logits, position), seen[position]);
  }
}

TEST(Sampler, SeedsChoicesAndPositionsGiveDifferentDraws) {
  const std::vector<float> logits(100000, 0.0f);
  std::set<int32_t> drawn;
  int n = 0;
  for (uint64_t seed : {uint64_t{0}, uint64_t{1}, UINT64_MAX}) {
    for (uint32_t choice = 0; choice < 3; ++choice) {
      SamplingParams p = uncut();
      p.seed = seed;
      p.choice = choice;
      Sampler sampler(p, 100000);
      for (int64_t position = 0; position < 5; ++position, ++n)
        drawn.insert(sampler.sample(logits, position));
    }
  }
  EXPECT_GE(static_cast<int>(drawn.size()), n - 1);
}

TEST(Sampler, DrawsASeedWhenNoneIsGivenAndReportsIt) {
  SamplingParams p = uncut();
  p.seed.reset();
  const Sampler first(p, 10), second(p, 10);
  EXPECT_NE(first.seed(), second.seed());
  p.seed = first.seed();
  const std::vector<float> logits(10, 0.0f);
  Sampler again(p, 10), copy = first;
  for (int i = 0; i < 100; ++i) EXPECT_EQ(again.sample(logits, i), copy.sample(logits, i));
}

TEST(Noise, BoundIsNeverBelowTheNoise) {
  std::mt19937_64 rng(4);
  for (int i = 0; i < 100000; ++i) {
    const uint64_t bits = rng() >> rng() % 64;
    EXPECT_LE(PositionNoise::gumbel_of(bits), PositionNoise::gumbel_bound(bits) + 1e-12);
  }
  for (uint64_t bits : {uint64_t{0}, uint64_t{1}, UINT64_MAX})
    EXPECT_TRUE(std::isfinite(PositionNoise::gumbel_of(bits))) << bits;
}

// ---- greedy and odd rows

TEST(Sampler, GreedyTakesTheLowestIdOfTheLargest) {
  std::vector<float> logits = random_logits(1000, 9, 0.1f);
  logits[300] = logits[301] = logits[999] = 7.0f;
  EXPECT_EQ(Sampler(greedy(), 1000).sample(logits, 5), 300);
  EXPECT_EQ(Sampler(greedy(), 1000).sample(std::vector<float>(1000, -3.0f), 5), 0);
}

TEST(Sampler, GreedyIgnoresTheCutsAndTheSeed) {
  SamplingParams p{.temperature = 0.0f, .top_k = 3, .top_p = 0.1f, .typical_p = 0.1f};
  const std::vector<float> logits = random_logits(500, 10);
  const auto best = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  EXPECT_EQ(Sampler(p, 500).sample(logits, 1), best);
}

TEST(Sampler, NeverChoosesNaN) {
  for (size_t good : {size_t{0}, size_t{130}, size_t{299}}) {
    std::vector<float> logits(300, NAN);
    logits[good] = -1e30f;
    for (const SamplingParams& p : {greedy(), uncut(), SamplingParams{}})
      EXPECT_EQ(Sampler(p, 300).sample(logits, 1), static_cast<int32_t>(good));
  }
}

TEST(Sampler, GivesAnIdInRangeForHopelessRows) {
  for (float value : {NAN, -INFINITY, INFINITY, 3e38f, -3e38f}) {
    const std::vector<float> logits(300, value);
    for (const SamplingParams& p : {greedy(), uncut(), SamplingParams{}, SamplingParams{.top_n_sigma = 1.0f},
                                    SamplingParams{.top_k = 0, .typical_p = 0.5f}}) {
      const int32_t token = Sampler(p, 300).sample(logits, 1);
      EXPECT_GE(token, 0);
      EXPECT_LT(token, 300);
    }
  }
}

TEST(Sampler, HopelessRowsStillRespectBansAndTheFilter) {
  const std::vector<float> logits(300, -INFINITY);
  SamplingParams p = greedy();
  p.logit_bias = {{0, kBanToken}, {6, -100.0f}};
  for (float temperature : {0.0f, 1.0f}) {
    p.temperature = temperature;
    Sampler sampler(p, 300);
    EXPECT_EQ(sampler.sample(logits, 0), 1);
    EXPECT_EQ(sampler.sample(logits, 0, [](int32_t t) { return t % 6 == 0; }), 12);
    EXPECT_EQ(sampler.sample(logits, 0, [](int32_t t) { return t == 6; }), 6);  // nothing else is left
    EXPECT_EQ(sampler.sample(logits, 0, [](int32_t) { return false; }), 0);
  }
}

TEST(Sampler, AnInfiniteLogitWins) {
  std::vector<float> logits = random_logits(300, 11);
  logits[200] = logits[250] = INFINITY;
  for (const SamplingParams& p : {greedy(), uncut(), SamplingParams{}}) {
    EXPECT_EQ(Sampler(p, 300).sample(logits, 3), 200);
    EXPECT_EQ(Sampler(p, 300).sample(logits, 3, [](int32_t t) { return t > 200; }), 250);
  }
}

TEST(Sampler, AVocabularyOfOneHasOneAnswer) {
  for (const SamplingParams& p : {greedy(), uncut(), SamplingParams{.top_k = 1}})
    EXPECT_EQ(Sampler(p, 1).sample(std::vector<float>{-4.0f}, 9), 0);
}

TEST(Sampler, ATinyTemperatureIsGreedyAndALargeOneStaysInTheCuts) {
  const std::vector<float> logits = random_logits(400, 12);
  const int32_t best = Sampler(greedy(), 400).sample(logits, 0);
  for (float temperature : {1e-3f, 1e-20f, std::numeric_limits<float>::denorm_min()}) {
    Sampler sampler(uncut(temperature), 400);
    for (int i = 0; i < 100; ++i) EXPECT_EQ(sampler.sample(logits, i), best);
  }
  SamplingParams p = uncut(5.0f);
  p.top_k = 3;
  expect_distribution(logits, p);
}

}  // namespace
}  // namespace thermo
