// Sampling from the top of a row against sampling from the row itself: the same token, or none.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>

#include "sampling/sampler.h"

namespace thermo {
namespace {

std::vector<float> random_row(int n_vocab, uint64_t seed, float deviation) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, deviation);
  std::vector<float> row(static_cast<size_t>(n_vocab));
  for (float& logit : row) logit = normal(random);
  return row;
}

// In another order than the definition, as a GPU lists it.
std::unique_ptr<TopLogits> top_of(std::span<const float> row, int n_wanted, uint64_t seed) {
  auto top = std::make_unique<TopLogits>();
  top_logits_ref(row, n_wanted, *top);
  std::mt19937_64 random(seed);
  if (top->n > 0) std::shuffle(top->tokens, top->tokens + top->n, random);
  // Its sum may be off by this much, either way.
  top->sum_exp *= 1.0f + 1e-5f * (random() % 2 == 0 ? 1.0f : -1.0f);
  return top;
}

TEST(SamplerTop, ChoosesWhatTheRowGivesOrNothing) {
  std::mt19937_64 random(5);
  const auto pick = [&](auto... values) {
    const std::vector<std::common_type_t<decltype(values)...>> all{values...};
    return all[random() % all.size()];
  };
  int n_settled[2] = {}, n_rounds[2] = {};  // without and with a filter
  for (int round = 0; round < 6000; ++round) {
    const int n_vocab = pick(1, 2, 20, 255, 256, 257, 1000, 5000);
    std::vector<float> row = random_row(n_vocab, random(), pick(0.3f, 2.0f, 8.0f));
    if (random() % 4 == 0)
      for (float& logit : row) logit = std::round(logit);
    if (random() % 4 == 0)
      for (float& logit : row)
        if (random() % 8 == 0) logit = pick(NAN, -INFINITY);
    if (random() % 16 == 0) row[random() % row.size()] = INFINITY;
    if (random() % 32 == 0) std::fill(row.begin(), row.end(), -INFINITY);

    SamplingParams p;
    p.seed = random();
    p.choice = static_cast<uint32_t>(random() % 3);
    p.temperature = pick(0.0f, 0.7f, 1.0f, 2.0f);
    p.top_k = std::min(n_vocab, pick(0, -1, 1, 20, 40, 256, 257));
    p.top_p = pick(0.0f, 0.5f, 0.9f, 0.95f, 1.0f);
    p.min_p = pick(0.0f, 0.0f, 0.05f, 0.3f, 1.0f);
    p.typical_p = pick(1.0f, 1.0f, 0.7f);
    p.top_n_sigma = pick(0.0f, 0.0f, 0.0f, 1.0f);
    p.xtc_probability = pick(0.0f, 0.0f, 0.5f);
    p.presence_penalty = pick(0.0f, 0.0f, 0.0f, 1.5f, 1.5f, -1.0f);
    p.frequency_penalty = pick(0.0f, 0.0f, 0.0f, 0.5f, 0.5f, -0.5f);
    p.repetition_penalty = pick(1.0f, 1.0f, 1.0f, 1.3f, 1.3f, 0.8f);
    p.dry_multiplier = pick(0.0f, 0.0f, 0.8f);
    p.ignore_eos = pick(false, true);
    p.min_tokens = pick(0, 50);
    const auto token = [&] { return static_cast<int32_t>(random() % static_cast<uint64_t>(n_vocab)); };
    // Penalties that matter fall on likely tokens.
    const auto likely = [&] {
      return static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
    };
    if (random() % 3 == 0)
      p.logit_bias = {{token(), pick(-100.0f, -3.0f, 4.0f)}, {likely(), pick(-2.0f, 1.0f)}};
    Sampler sampler(p, n_vocab, std::vector<int32_t>{likely(), token()});
    std::vector<int32_t> history;
    for (uint64_t i = random() % 20; i > 0; --i) history.push_back(random() % 2 == 0 ? token() : likely());
    sampler.accept_prompt(history);
    for (uint64_t i = random() % 10; i > 0; --i) sampler.accept(random() % 2 == 0 ? token() : likely());

    // What a grammar allows: most tokens, a few, one, or none.
    std::vector<bool> allowed(static_cast<size_t>(n_vocab));
    const uint64_t one_of = pick(uint64_t{1}, uint64_t{2}, uint64_t{50}, uint64_t{5000});
    for (size_t i = 0; i < allowed.size(); ++i) allowed[i] = random() % one_of == 0;
    if (random() % 3 == 0) allowed[static_cast<size_t>(likely())] = true;
    const TokenFilter some([&](int32_t id) { return allowed[static_cast<size_t>(id)]; });
    std::vector<uint64_t> bits((allowed.size() + 63) / 64);
    for (size_t i = 0; i < allowed.size(); ++i) bits[i / 64] |= uint64_t{allowed[i]} << (i % 64);
    TokenFilter masked = some;
    masked.mask = [&] { return std::span<const uint64_t>(bits); };
    // A mask only makes it quicker.
    ASSERT_EQ(sampler.sample(row, 77, masked), sampler.sample(row, 77, some)) << "round " << round;

    for (const int n_wanted : {kTopTokens, 20, 1}) {
      const auto top = top_of(row, n_wanted, random());
      for (const int64_t position : {0, 12345})
        for (const TokenFilter& filter : {TokenFilter{}, some}) {
          const std::optional<int32_t> got = sampler.sample(*top, position, filter);
          if (n_wanted == kTopTokens) {
            ++n_rounds[filter ? 1 : 0];
            n_settled[filter ? 1 : 0] += got.has_value();
          }
          if (got) {
            ASSERT_EQ(*got, sampler.sample(row, position, filter))
                << "round " << round << " top " << n_wanted << (filter ? " filtered" : "");
          }
        }
    }
  }
  EXPECT_GT(n_settled[0], n_rounds[0] / 4);
  EXPECT_GT(n_settled[1], n_rounds[1] / 4);
}

// A grammar leaves fewer tokens of the list than top_k. Where they hold the nucleus, the row is not needed.
TEST(SamplerTop, SettlesAFilteredNucleusWithoutTheRow) {
  constexpr int kVocab = 50000;
  int n_settled = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    std::vector<float> row = random_row(kVocab, seed, 1.0f);
    for (size_t i = 0; i < 40; ++i) row[i * 31] += 14.0f;
    SamplingParams p;
    p.seed = seed;
    p.top_k = seed % 2 == 0 ? 20 : 0;
    Sampler sampler(p, kVocab);
    const TokenFilter three = [](int32_t id) { return id == 31 || id == 62 || id == 93 || id > 49000; };
    const std::optional<int32_t> got = sampler.sample(*top_of(row, kTopTokens, seed), 3, three);
    n_settled += got.has_value();
    if (got) {
      ASSERT_EQ(*got, sampler.sample(row, 3, three));
    }
  }
  EXPECT_GT(n_settled, 150);
}

// What people set: the row is not needed for any of these, with a vocabulary and a spread like a model's.
TEST(SamplerTop, SettlesTheUsualParameters) {
  constexpr int kVocab = 50000;
  std::vector<SamplingParams> cases(7);
  cases[1].temperature = 0.0f;
  cases[2].temperature = 0.0f;
  cases[2].repetition_penalty = 1.1f;
  cases[3].top_k = 40;
  cases[3].repetition_penalty = 1.3f;
  cases[3].presence_penalty = 1.5f;
  cases[4].top_k = 0;
  cases[4].top_p = 0.8f;
  cases[5].top_k = 0;
  cases[5].top_p = 1.0f;
  cases[5].min_p = 0.05f;
  cases[6].top_k = 64;
  cases[6].dry_multiplier = 0.8f;
  cases[6].ignore_eos = true;
  for (size_t i = 0; i < cases.size(); ++i) {
    cases[i].seed = 7 + i;
    Sampler sampler(cases[i], kVocab, std::vector<int32_t>{3});
    EXPECT_NE(sampler.need(), LogitsNeed::Row) << i;
    for (int64_t position = 0; position < 60; ++position) {
      std::vector<float> row = random_row(kVocab, 1000 * i + static_cast<uint64_t>(position), 2.5f);
      for (int k = 0; k < 12; ++k) row[static_cast<size_t>(position * 37 + k * 4001) % kVocab] += 16.0f;
      const auto top = top_of(row, sampler.need() == LogitsNeed::Best ? 1 : kTopTokens, 1);
      const std::optional<int32_t> got = sampler.sample(*top, position);
      ASSERT_TRUE(got.has_value()) << "case " << i << " position " << position;
      ASSERT_EQ(*got, sampler.sample(row, position)) << "case " << i << " position " << position;
      sampler.accept(*got);
    }
  }
}

// A list of hundreds of tokens for each of many streams is not read where the best one is not touched.
TEST(SamplerTop, TakesTheBestTokenWithoutAListWhereNothingLowersIt) {
  constexpr int kVocab = 1000, kEnd = 3;
  SamplingParams params;
  params.temperature = 0.0f;
  params.ignore_eos = true;
  params.logit_bias = {{5, -2.0f}};
  Sampler sampler(params, kVocab, std::vector<int32_t>{kEnd});
  const auto choice_of_best = [&](int32_t best, const TokenFilter& filter = {}) {
    std::vector<float> row = random_row(kVocab, 1, 1.0f);
    row[static_cast<size_t>(best)] = 20.0f;
    return sampler.sample(*top_of(row, 1, 1), 0, filter);
  };
  EXPECT_EQ(choice_of_best(7), 7);
  EXPECT_EQ(choice_of_best(kEnd), std::nullopt);
  EXPECT_EQ(choice_of_best(5), std::nullopt);
  EXPECT_EQ(choice_of_best(7, TokenFilter([](int32_t token) { return token != 7; })), std::nullopt);
}

// The sum that comes with the top is rounded differently from the row's, so a nucleus that ends within
// rounding must not be cut with it.
TEST(SamplerTop, NeverCutsANucleusThatEndsWithinRounding) {
  int n_asked = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    std::vector<float> row = random_row(3000, seed, 1.0f);
    for (size_t i = 0; i < 8; ++i) row[i * 31] += 9.0f;
    std::vector<float> sorted = row;
    std::sort(sorted.rbegin(), sorted.rend());
    double total = 0.0, held = 0.0;
    for (const float logit : sorted) total += std::exp(static_cast<double>(logit) - sorted[0]);
    const size_t n_kept = 2 + seed % 4;
    for (size_t i = 0; i < n_kept; ++i) held += std::exp(static_cast<double>(sorted[i]) - sorted[0]);
    SamplingParams p;
    p.seed = seed;
    p.top_k = 0;
    p.top_p = static_cast<float>(held / total);
    p.temperature = 3.0f;
    Sampler sampler(p, 3000);
    const auto top = top_of(row, kTopTokens, seed);
    for (int64_t position = 0; position < 20; ++position) {
      const std::optional<int32_t> got = sampler.sample(*top, position);
      n_asked += !got;
      if (got) {
        ASSERT_EQ(*got, sampler.sample(row, position)) << "seed " << seed;
      }
    }
  }
  EXPECT_GT(n_asked, 0);
}

TEST(SamplerTop, AsksForTheRowWhenTheTopCannotSettleIt) {
  const std::vector<float> row = random_row(5000, 1, 0.1f);  // so flat that nothing is in its top
  const auto top = top_of(row, kTopTokens, 1);
  std::vector<SamplingParams> cases(6);
  cases[0].top_k = 257;
  cases[1].top_k = 0;
  cases[1].top_p = 1.0f;
  cases[2].top_k = 0;
  cases[2].top_p = 0.9f;
  cases[3].top_n_sigma = 1.0f;
  cases[4].top_k = 0;
  cases[4].top_p = 1.0f;
  cases[4].min_p = 0.01f;
  cases[5].logit_bias = {{17, 5.0f}};
  for (size_t i = 0; i < cases.size(); ++i) {
    cases[i].seed = 1;
    Sampler sampler(cases[i], 5000);
    EXPECT_FALSE(sampler.sample(*top, 0).has_value()) << i;
  }
}

}  // namespace
}  // namespace thermo
