#include "speculative/oracle_drafter.h"

#include <gtest/gtest.h>

#include "speculative/lookup_drafter.h"

namespace thermo {
namespace {

std::vector<TokenId> counting(int n) {
  std::vector<TokenId> ids;
  for (int i = 0; i < n; ++i) ids.push_back(i % 50);
  return ids;
}

TEST(OracleDrafter, IsRightAsOftenAsItWasTold) {
  const std::vector<TokenId> text = counting(4000);
  OracleDrafter drafter(std::make_unique<LookupDrafter>(1, 4096),
                        {.probabilities = {0.7f, 0.2f}, .seed = 3, .text = text}, 50, 1);
  int right[2] = {0, 0}, n = 0;
  for (size_t at = 0; at + 16 < text.size(); ++at) {
    const DraftRequest request{.sequence = 0, .root = text[at], .n_depths = 8, .n_ranks = 4};
    Draft draft;
    drafter.draft({&request, 1}, {&draft, 1});
    ASSERT_EQ(draft.n_depths, 8);
    ASSERT_EQ(draft.n_ranks, 2);
    ++n;
    for (size_t k = 0; k < 2; ++k) {
      if (draft.tokens_at(1)[k] == text[at + 1]) ++right[k];
      ASSERT_GE(draft.tokens_at(1)[k], 0);
      ASSERT_LT(draft.tokens_at(1)[k], 50);
    }
    ASSERT_NE(draft.tokens_at(1)[0], draft.tokens_at(1)[1]);
    drafter.commit(0, std::span(text).subspan(at, 1), {});
  }
  EXPECT_NEAR(right[0] / static_cast<double>(n), 0.7, 0.03);
  EXPECT_NEAR(right[1] / static_cast<double>(n), 0.2, 0.03);
}

TEST(OracleDrafter, SaysTheSameOfAPositionAgain) {
  const std::vector<TokenId> text = counting(100);
  OracleDrafter drafter(std::make_unique<LookupDrafter>(1, 4096),
                        {.probabilities = {0.5f}, .seed = 1, .text = text}, 50, 1);
  const DraftRequest request{.sequence = 0, .root = text[20], .n_depths = 5, .n_ranks = 1};
  Draft first, again;
  drafter.commit(0, std::span(text).first(20), {});
  drafter.draft({&request, 1}, {&first, 1});
  drafter.commit(0, std::span(text).subspan(20, 30), {});
  drafter.truncate(0, 20);
  drafter.draft({&request, 1}, {&again, 1});
  EXPECT_EQ(first.tokens, again.tokens);
}

TEST(OracleDrafter, KnowsNothingAfterTheText) {
  const std::vector<TokenId> text = counting(10);
  OracleDrafter drafter(std::make_unique<LookupDrafter>(1, 4096),
                        {.probabilities = {1.0f}, .seed = 1, .text = text}, 50, 1);
  drafter.commit(0, std::span(text).first(7), {});
  const DraftRequest request{.sequence = 0, .root = text[7], .n_depths = 6, .n_ranks = 2};
  Draft draft;
  drafter.draft({&request, 1}, {&draft, 1});
  ASSERT_EQ(draft.n_depths, 2);
  EXPECT_EQ(draft.tokens, (std::vector<int32_t>{text[8], text[9]}));
}

}  // namespace
}  // namespace thermo
