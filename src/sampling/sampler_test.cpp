#include "sampling/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>

#include "sampling/noise.h"

namespace thermo {
namespace {

using Tokens = std::vector<int32_t>;

// ---- a slow sampler of the same order, written from the definitions

struct Story {
  Tokens prompt{}, reply{}, end_tokens{};
  TokenFilter filter{};
};

int count_of(const Tokens& tokens, int32_t token) {
  return static_cast<int>(std::count(tokens.begin(), tokens.end(), token));
}

Tokens last_of(Tokens tokens, int n) {
  if (n >= 0 && static_cast<int>(tokens.size()) > n) tokens.erase(tokens.begin(), tokens.end() - n);
  return tokens;
}

// Longest run before each earlier position that equals the end of the history, by comparing token by token.
std::map<int32_t, int> naive_runs(const Tokens& history, int min_length, const Tokens& breakers) {
  std::map<int32_t, int> longest;
  for (size_t next = 1; next < history.size(); ++next) {
    int length = 0;
    while (static_cast<size_t>(length) < next) {
      const int32_t token = history[history.size() - 1 - static_cast<size_t>(length)];
      if (token != history[next - 1 - static_cast<size_t>(length)] || token < 0 ||
          count_of(breakers, token) > 0)
        break;
      ++length;
    }
    if (length >= min_length && history[next] >= 0)
      longest[history[next]] = std::max(longest[history[next]], length);
  }
  return longest;
}

std::vector<float> naive_edit(std::vector<float> logits, const SamplingParams& p, const Story& story) {
  for (const auto& [token, bias] : p.logit_bias)
    logits[static_cast<size_t>(token)] += bias <= -100.0f ? -INFINITY : bias;
  if (p.ignore_eos || static_cast<int>(story.reply.size()) < p.min_tokens)
    for (int32_t token : story.end_tokens) logits[static_cast<size_t>(token)] = -INFINITY;
  Tokens all = story.prompt;
  all.insert(all.end(), story.reply.begin(), story.reply.end());
  const Tokens recent = last_of(all, p.repeat_last_n);
  for (size_t id = 0; id < logits.size(); ++id) {
    const auto token = static_cast<int32_t>(id);
    float& logit = logits[id];
    if (count_of(recent, token) > 0)
      logit = logit > 0 ? logit / p.repetition_penalty : logit * p.repetition_penalty;
    const int count = count_of(story.reply, token);
    if (count > 0) logit -= p.presence_penalty + p.frequency_penalty * static_cast<float>(count);
    if (story.filter && !story.filter(token)) logit = -INFINITY;
  }
  if (p.dry_multiplier > 0.0f) {
    const Tokens window = last_of(all, p.dry_penalty_last_n.value_or(p.repeat_last_n));
    for (const auto& [token, run] : naive_runs(window, p.dry_allowed_length, p.dry_sequence_breakers))
      logits[static_cast<size_t>(token)] -=
          static_cast<float>(p.dry_multiplier * std::pow(p.dry_base, run - p.dry_allowed_length));
  }
  return logits;
}

// Tokens that survive the cuts, most likely first.
std::vector<Candidate> naive_candidates(const std::vector<float>& logits, const SamplingParams& p) {
  std::vector<Candidate> kept;
  double sum = 0, squares = 0;
  for (size_t id = 0; id < logits.size(); ++id)
    if (logits[id] > -INFINITY) kept.push_back({logits[id], static_cast<int32_t>(id)});
  std::sort(kept.begin(), kept.end(), comes_first);
  const auto softmax = [&] {
    std::vector<double> probs;
    double total = 0;
    for (const Candidate& c : kept) probs.push_back(std::exp(static_cast<double>(c.logit) - kept[0].logit));
    for (double q : probs) total += q;
    for (double& q : probs) q /= total;
    return probs;
  };
  if (p.top_n_sigma > 0) {
    for (const Candidate& c : kept) sum += c.logit;
    const double n = static_cast<double>(kept.size()), mean = sum / n;
    for (const Candidate& c : kept) squares += (c.logit - mean) * (c.logit - mean);
    const double lowest = kept[0].logit - p.top_n_sigma * std::sqrt(squares / n);
    std::erase_if(kept, [&](const Candidate& c) { return c.logit < lowest; });
  }
  if (p.top_k > 0 && static_cast<size_t>(p.top_k) < kept.size()) kept.resize(static_cast<size_t>(p.top_k));
  if (p.typical_p < 1) {
    const std::vector<double> probs = softmax();
    double entropy = 0, held = 0;
    for (double q : probs) entropy -= q > 0 ? q * std::log(q) : 0;
    std::vector<size_t> order;
    for (size_t i = 0; i < kept.size(); ++i) order.push_back(i);
    const auto distance = [&](size_t i) { return std::fabs(-std::log(probs[i]) - entropy); };
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return distance(a) < distance(b); });
    std::vector<Candidate> typical;
    for (size_t i : order) {
      if (!typical.empty() && held >= p.typical_p) break;
      typical.push_back(kept[i]);
      held += probs[i];
    }
    std::sort(typical.begin(), typical.end(), comes_first);
    kept = typical;
  }
  if (p.top_p < 1) {
    const std::vector<double> probs = softmax();
    size_t n = 0;
    for (double held = 0; n < kept.size() && (n == 0 || held < p.top_p); ++n) held += probs[n];
    kept.resize(n);
  }
  if (p.min_p > 0) {
    const std::vector<double> probs = softmax();
    size_t n = 0;
    while (n < kept.size() && probs[n] >= p.min_p * probs[0] * (1 - 1e-12)) ++n;
    kept.resize(n);
  }
  return kept;
}

std::map<int32_t, double> naive_distribution(const std::vector<float>& logits, const SamplingParams& p,
                                             const Story& story = {}) {
  const std::vector<Candidate> kept = naive_candidates(naive_edit(logits, p, story), p);
  std::map<int32_t, double> probs;
  double total = 0;
  for (const Candidate& c : kept)
    total += probs[c.id] = std::exp((static_cast<double>(c.logit) - kept[0].logit) / p.temperature);
  for (auto& [id, prob] : probs) prob /= total;
  return probs;
}

int32_t naive_sample(const std::vector<float>& logits, const SamplingParams& p, const Story& story,
                     int64_t position) {
  const std::vector<Candidate> kept = naive_candidates(naive_edit(logits, p, story), p);
  if (p.temperature == 0) {
    SamplingParams uncut;
    uncut.top_k = 0;
    uncut.top_p = 1;
    return naive_candidates(naive_edit(logits, p, story), uncut)[0].id;
  }
  const PositionNoise noise(*p.seed, p.choice, position);
  int32_t best = -1;
  double best_score = -INFINITY;
  for (const Candidate& c : kept) {
    const double score = (static_cast<double>(c.logit) - kept[0].logit) / p.temperature + noise.gumbel(c.id);
    if (score > best_score) {
      best_score = score;
      best = c.id;
    }
  }
  return best;
}

// ---- helpers

SamplingParams uncut(float temperature = 1.0f) {
  SamplingParams p;
  p.temperature = temperature;
  p.top_k = 0;
  p.top_p = 1.0f;
  p.seed = 42;
  return p;
}

SamplingParams greedy() {
  return uncut(0.0f);
}

std::vector<float> random_logits(int n, uint32_t seed, float sigma = 2.0f) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> logits(static_cast<size_t>(n));
  for (float& logit : logits) logit = normal(rng);
  return logits;
}

Sampler sampler_of(const SamplingParams& p, size_t n_vocab, const Story& story = {}) {
  Sampler sampler(p, static_cast<int>(n_vocab), story.end_tokens);
  sampler.accept_prompt(story.prompt);
  for (int32_t token : story.reply) sampler.accept(token);
  return sampler;
}

// Draws at many positions and compares the counts with the naive distribution. The seeds are fixed, so the
// outcome is; the limit of five deviations leaves room for any seed.
void expect_distribution(const std::vector<float>& logits, const SamplingParams& p, const Story& story = {}) {
  constexpr int kDraws = 20000;
  const std::map<int32_t, double> want = naive_distribution(logits, p, story);
  Sampler sampler = sampler_of(p, logits.size(), story);
  std::map<int32_t, int> counts;
  for (int i = 0; i < kDraws; ++i) ++counts[sampler.sample(logits, i, story.filter)];
  for (const auto& [id, count] : counts) ASSERT_TRUE(want.contains(id)) << "token " << id << " was cut";
  double chi_square = 0, rare_want = 0, rare_got = 0;
  int freedom = -1;
  for (const auto& [id, prob] : want) {
    const double expected = prob * kDraws, got = counts.contains(id) ? counts[id] : 0;
    if (expected < 5) {
      rare_want += expected;
      rare_got += got;
      continue;
    }
    chi_square += (got - expected) * (got - expected) / expected;
    ++freedom;
  }
  if (rare_want > 1) {
    chi_square += (rare_got - rare_want) * (rare_got - rare_want) / rare_want;
    ++freedom;
  }
  EXPECT_LE(chi_square, freedom + 5 * std::sqrt(2.0 * std::max(freedom, 1)))
      << freedom << " degrees of freedom";
}

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
      p.dry_sequence_breakers = {token()};
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

// ---- penalties, bans, filter

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
  p.dry_sequence_breakers = {1};
  EXPECT_EQ(sampler_of(p, 5, {.prompt = {0, 1, 2, 3, 0, 1, 2}}).sample(logits, 7), 3);
  p.dry_sequence_breakers = {};
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
    const Tokens breakers = rng() % 2 == 0 ? Tokens{} : Tokens{2};
    RunFinder finder;
    std::map<int32_t, int> got;
    for (const RepeatedRun& run : finder.find(history, min_length, {breakers.begin(), breakers.end()}))
      got[run.next] = run.length;
    ASSERT_EQ(got, naive_runs(history, min_length, breakers)) << "round " << round;
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
