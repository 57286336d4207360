#include "engine/prompt_turns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace thermo {
namespace {

using ::testing::ElementsAre;

std::vector<std::pair<size_t, size_t>> turns(const std::vector<size_t>& n_left, size_t n_rows) {
  std::vector<std::pair<size_t, size_t>> out;
  for (const PromptTurn& turn : prompt_turns(n_left, n_rows)) out.emplace_back(turn.prompt, turn.most);
  return out;
}

TEST(PromptTurns, LetShortPromptsPassALongOne) {
  EXPECT_THAT(turns({100'000, 40}, 512), ElementsAre(std::pair(1, 40), std::pair(0, 100'000)));
  EXPECT_THAT(turns({100'000, 200, 0, 300, 9}, 512),
              ElementsAre(std::pair(1, 200), std::pair(3, 56), std::pair(0, 100'000)));
}

TEST(PromptTurns, LeaveHalfOfTheRowsToTheLongOnes) {
  for (const size_t n_rows : {size_t{2}, size_t{16}, size_t{511}}) {
    size_t n_short = 0;
    for (const auto& [prompt, most] : turns({9000, 512, 512, 8000}, n_rows))
      if (prompt == 1 || prompt == 2) n_short += most;
    EXPECT_EQ(n_short, n_rows / 2);
  }
}

TEST(PromptTurns, GoByAgeAmongEqualOnes) {
  EXPECT_THAT(turns({300, 400}, 512), ElementsAre(std::pair(0, 300), std::pair(1, 212)));
  EXPECT_THAT(turns({900, 800}, 512), ElementsAre(std::pair(0, 900), std::pair(1, 800)));
  EXPECT_THAT(turns({}, 512), ElementsAre());
}

}  // namespace
}  // namespace thermo
