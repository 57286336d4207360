// A slow sampler of the same order, written from the definitions, and what tests compare it with.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <vector>

#include "sampling/noise.h"
#include "sampling/sampler.h"

namespace thermo {

using Tokens = std::vector<int32_t>;

struct Story {
  Tokens prompt{}, reply{}, end_tokens{};
  TokenFilter filter{};
};

inline int count_of(const Tokens& tokens, int32_t token) {
  return static_cast<int>(std::count(tokens.begin(), tokens.end(), token));
}

inline std::shared_ptr<const DryBreakers> breakers_of(const std::vector<Tokens>& sequences) {
  auto breakers = std::make_shared<DryBreakers>();
  for (const Tokens& sequence : sequences) breakers->add(sequence);
  return breakers;
}

inline Tokens last_of(Tokens tokens, int n) {
  if (n >= 0 && static_cast<int>(tokens.size()) > n) tokens.erase(tokens.begin(), tokens.end() - n);
  return tokens;
}

// Longest run before each earlier position that equals the end of the history, by comparing token by token.
inline std::map<int32_t, int> naive_runs(const Tokens& history, int min_length, const DryBreakers* breakers) {
  // How much of the end is after every breaker.
  size_t free = history.size();
  for (size_t at = 0; at < history.size() && breakers != nullptr; ++at)
    if (const int n = breakers->length_at(history, at); n > 0)
      free = std::min(free, history.size() - at - static_cast<size_t>(n));
  std::map<int32_t, int> longest;
  for (size_t next = 1; next < history.size(); ++next) {
    int length = 0;
    while (static_cast<size_t>(length) < std::min(next, free)) {
      const int32_t token = history[history.size() - 1 - static_cast<size_t>(length)];
      if (token != history[next - 1 - static_cast<size_t>(length)] || token < 0) break;
      ++length;
    }
    if (length >= min_length && history[next] >= 0)
      longest[history[next]] = std::max(longest[history[next]], length);
  }
  return longest;
}

inline std::vector<float> naive_edit(std::vector<float> logits, const SamplingParams& p, const Story& story) {
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
    for (const auto& [token, run] : naive_runs(window, p.dry_allowed_length, p.dry_breakers.get()))
      logits[static_cast<size_t>(token)] -=
          static_cast<float>(p.dry_multiplier * std::pow(p.dry_base, run - p.dry_allowed_length));
  }
  return logits;
}

// Tokens that survive the cuts, most likely first.
inline std::vector<Candidate> naive_candidates(const std::vector<float>& logits, const SamplingParams& p) {
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

// What XTC leaves of the candidates at a position where it applies.
inline std::vector<Candidate> naive_xtc(const std::vector<Candidate>& kept, const SamplingParams& p) {
  double total = 0;
  for (const Candidate& c : kept) total += std::exp(static_cast<double>(c.logit) - kept[0].logit);
  size_t n_top = 0;
  while (n_top < kept.size() &&
         std::exp(static_cast<double>(kept[n_top].logit) - kept[0].logit) >= p.xtc_threshold * total)
    ++n_top;
  return {kept.begin() + static_cast<ptrdiff_t>(n_top > 0 ? n_top - 1 : 0), kept.end()};
}

inline std::map<int32_t, double> naive_distribution(const std::vector<float>& logits, const SamplingParams& p,
                                                    const Story& story = {}) {
  const std::vector<Candidate> kept = naive_candidates(naive_edit(logits, p, story), p);
  std::map<int32_t, double> probs;
  double total = 0;
  for (const Candidate& c : kept)
    total += probs[c.id] = std::exp((static_cast<double>(c.logit) - kept[0].logit) / p.temperature);
  for (auto& [id, prob] : probs) prob /= total;
  return probs;
}

inline int32_t naive_sample(const std::vector<float>& logits, const SamplingParams& p, const Story& story,
                            int64_t position) {
  std::vector<Candidate> kept = naive_candidates(naive_edit(logits, p, story), p);
  if (p.temperature == 0) {
    SamplingParams uncut;
    uncut.top_k = 0;
    uncut.top_p = 1;
    return naive_candidates(naive_edit(logits, p, story), uncut)[0].id;
  }
  const PositionNoise noise(*p.seed, p.choice, position);
  if (noise.uniform() < p.xtc_probability) kept = naive_xtc(kept, p);
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

inline SamplingParams uncut(float temperature = 1.0f) {
  SamplingParams p;
  p.temperature = temperature;
  p.top_k = 0;
  p.top_p = 1.0f;
  p.seed = 42;
  return p;
}

inline SamplingParams greedy() {
  return uncut(0.0f);
}

inline std::vector<float> random_logits(int n, uint32_t seed, float sigma = 2.0f) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0.0f, sigma);
  std::vector<float> logits(static_cast<size_t>(n));
  for (float& logit : logits) logit = normal(rng);
  return logits;
}

inline Sampler sampler_of(const SamplingParams& p, size_t n_vocab, const Story& story = {}) {
  Sampler sampler(p, static_cast<int>(n_vocab), story.end_tokens);
  sampler.accept_prompt(story.prompt);
  for (int32_t token : story.reply) sampler.accept(token);
  return sampler;
}

// Draws at many positions and compares the counts with the naive distribution. The seeds are fixed, so the
// outcome is; the limit of five deviations leaves room for any seed.
inline void expect_distribution(const std::vector<float>& logits, const SamplingParams& p,
                                const Story& story = {}) {
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

}  // namespace thermo
