#include "speculative/lookup_drafter.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

namespace thermo {
namespace {

std::vector<TokenId> proposal(LookupDrafter& drafter, TokenId root, int n_depths, int sequence = 0) {
  const DraftRequest request{.sequence = sequence, .root = root, .n_depths = n_depths, .n_ranks = 1};
  Draft draft;
  drafter.draft({&request, 1}, {&draft, 1});
  return draft.tokens;
}

void commit(LookupDrafter& drafter, const std::vector<TokenId>& tokens, int sequence = 0) {
  drafter.commit(sequence, tokens, {});
}

TEST(LookupDrafter, ContinuesTheLastPlaceThatAgreesLongest) {
  LookupDrafter drafter(2, 64);
  commit(drafter, {9, 1, 2, 3, 4, 5, 8, 1, 2, 3, 6, 7, 9, 1, 2});
  EXPECT_EQ(proposal(drafter, 3, 2), (std::vector<TokenId>{4, 5})) << "9 1 2 3 agrees longer than 1 2 3";
  EXPECT_TRUE(proposal(drafter, 4, 2).empty()) << "1 2 4 was never seen";
  EXPECT_TRUE(proposal(drafter, 3, 2, 1).empty()) << "another sequence";
  commit(drafter, {3}, 0);
  EXPECT_EQ(proposal(drafter, 4, 1), (std::vector<TokenId>{5}));
}

TEST(LookupDrafter, GoesOnWithARepeatedPattern) {
  LookupDrafter drafter(1, 64);
  commit(drafter, {1, 2, 1, 2, 1, 2});
  EXPECT_EQ(proposal(drafter, 1, 6), (std::vector<TokenId>{2, 1, 2, 1, 2, 1}));
}

TEST(LookupDrafter, ForgetsWhatWasCutOff) {
  LookupDrafter drafter(1, 64);
  commit(drafter, {1, 2, 3, 4, 5, 6, 7});
  drafter.truncate(0, 3);
  commit(drafter, {8, 9, 1, 2});
  EXPECT_EQ(proposal(drafter, 3, 1), (std::vector<TokenId>{8})) << "4 was cut off";
  drafter.truncate(0, 0);
  EXPECT_TRUE(proposal(drafter, 3, 1).empty());
}

// What followed the last tokens of `text` where most of them stood before; empty: they did not.
std::vector<TokenId> looked_up(const std::vector<TokenId>& text) {
  size_t best = 0, most = 0, n_tries = 0;
  for (size_t end = text.size() - 1; end >= LookupDrafter::kMinMatch && n_tries < 16 && most < 32; --end) {
    size_t n = 0;
    while (n < std::min<size_t>(end, 32) && text[end - 1 - n] == text[text.size() - 1 - n]) ++n;
    if (n < LookupDrafter::kMinMatch) continue;
    ++n_tries;
    if (n > most) best = end, most = n;
  }
  return best == 0 ? std::vector<TokenId>() : std::vector<TokenId>{text[best]};
}

// Runs of tokens share places of the index, in a text that grows and is cut off.
TEST(LookupDrafter, FindsWhatASearchOfTheTextFinds) {
  constexpr size_t kMost = 400;
  LookupDrafter drafter(1, kMost);
  std::mt19937 random(1);
  std::vector<TokenId> text;
  int n_found = 0;
  for (int i = 0; i < 3000; ++i) {
    if (text.size() + 1 == kMost || random() % 100 == 0) {
      text.resize(text.size() / 2);
      drafter.truncate(0, static_cast<int>(text.size()));
    }
    const auto token = static_cast<TokenId>(random() % 8);
    text.push_back(token);
    if (text.size() > LookupDrafter::kMinMatch) {
      const std::vector<TokenId> want = looked_up(text);
      ASSERT_EQ(proposal(drafter, token, 1), want) << i;
      n_found += want.empty() ? 0 : 1;
    }
    commit(drafter, {token});
  }
  EXPECT_GT(n_found, 300);
}

TEST(BestCandidates, AreExactAndRefuseWhatIsNoNumber) {
  std::vector<float> logits = {0.5f, 2.0f, -1.0f, 2.0f, 0.0f};
  std::vector<int32_t> tokens(3);
  std::vector<float> logprobs(3);
  best_candidates(logits, tokens, logprobs);
  EXPECT_EQ(tokens, (std::vector<int32_t>{1, 3, 0})) << "of equals the lowest id first";
  double sum = 0.0;
  for (const float value : logits) sum += std::exp(static_cast<double>(value));
  EXPECT_NEAR(logprobs[0], 2.0 - std::log(sum), 1e-6);
  EXPECT_NEAR(logprobs[2], 0.5 - std::log(sum), 1e-6);
  logits[4] = std::numeric_limits<float>::quiet_NaN();
  best_candidates(logits, tokens, logprobs);
  EXPECT_EQ(logprobs[0], -std::numeric_limits<float>::infinity());
}

// More than a block, the best ones anywhere in it.
TEST(BestCandidates, AreFoundInLongRows) {
  std::vector<float> logits(1000, -3.0f);
  logits[0] = 0.5f, logits[77] = 4.0f, logits[130] = 2.0f, logits[131] = 5.0f, logits[999] = 4.5f;
  std::vector<int32_t> tokens(4);
  std::vector<float> logprobs(4);
  best_candidates(logits, tokens, logprobs);
  EXPECT_EQ(tokens, (std::vector<int32_t>{131, 999, 77, 130}));
  double sum = 0.0;
  for (const float value : logits) sum += std::exp(static_cast<double>(value));
  EXPECT_NEAR(logprobs[3], 2.0 - std::log(sum), 1e-6);
  logits[640] = std::numeric_limits<float>::quiet_NaN();
  best_candidates(logits, tokens, logprobs);
  EXPECT_EQ(logprobs[0], -std::numeric_limits<float>::infinity());
}

}  // namespace
}  // namespace thermo
