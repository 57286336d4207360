#include "speculative/lookup_drafter.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

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
  LookupDrafter drafter(2);
  commit(drafter, {9, 1, 2, 3, 4, 5, 8, 1, 2, 3, 6, 7, 9, 1, 2});
  EXPECT_EQ(proposal(drafter, 3, 2), (std::vector<TokenId>{4, 5})) << "9 1 2 3 agrees longer than 1 2 3";
  EXPECT_TRUE(proposal(drafter, 4, 2).empty()) << "1 2 4 was never seen";
  EXPECT_TRUE(proposal(drafter, 3, 2, 1).empty()) << "another sequence";
  commit(drafter, {3}, 0);
  EXPECT_EQ(proposal(drafter, 4, 1), (std::vector<TokenId>{5}));
}

TEST(LookupDrafter, GoesOnWithARepeatedPattern) {
  LookupDrafter drafter(1);
  commit(drafter, {1, 2, 1, 2, 1, 2});
  EXPECT_EQ(proposal(drafter, 1, 6), (std::vector<TokenId>{2, 1, 2, 1, 2, 1}));
}

TEST(LookupDrafter, ForgetsWhatWasCutOff) {
  LookupDrafter drafter(1);
  commit(drafter, {1, 2, 3, 4, 5, 6, 7});
  drafter.truncate(0, 3);
  commit(drafter, {8, 9, 1, 2});
  EXPECT_EQ(proposal(drafter, 3, 1), (std::vector<TokenId>{8})) << "4 was cut off";
  drafter.truncate(0, 0);
  EXPECT_TRUE(proposal(drafter, 3, 1).empty());
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
