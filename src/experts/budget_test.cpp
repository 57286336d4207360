#include "experts/budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace thermo {
namespace {

ExpertBudget parsed(const char* text) {
  Result<ExpertBudget> budget = parse_expert_budget(text);
  EXPECT_TRUE(budget) << text;
  return budget ? *budget : ExpertBudget{};
}

TEST(ExpertBudget, ReadsSizesSharesAndAuto) {
  EXPECT_TRUE(parsed("auto").is_auto());
  EXPECT_EQ(parsed("auto").resolve(1000, 700), 700u);
  EXPECT_EQ(parsed("0").resolve(1000, 700), 0u);
  EXPECT_EQ(parsed("512").resolve(1000, 700), 512u);
  EXPECT_EQ(parsed("11G").bytes, 11ull << 30);
  EXPECT_EQ(parsed("11G").resolve(1000, 700), 1000u);
  EXPECT_EQ(parsed("60%").resolve(1000, 700), 600u);
  EXPECT_EQ(parsed("33.3 %").resolve(1000, 0), 333u);
  EXPECT_EQ(parsed("100%").resolve(0xFFFFFFFFFFull, 0), 0xFFFFFFFFFFull);
  EXPECT_EQ(parsed("0%").resolve(1000, 700), 0u);
}

TEST(ExpertBudget, RefusesWhatIsNoBudget) {
  for (const char* text :
       {"", "%", "150%", "-5%", "100.1%", "nan%", "-1", "-4G", "much", "5 percent", "60%%", "Auto"}) {
    const Result<ExpertBudget> budget = parse_expert_budget(text);
    ASSERT_FALSE(budget) << text;
    EXPECT_THAT(budget.error().message, testing::HasSubstr("was expected")) << text;
  }
}

TEST(ExpertBudget, DescribesItself) {
  EXPECT_EQ(parsed("60%").describe(), "60 % of the experts");
  EXPECT_EQ(parsed("1G").describe(), "1.00 GiB");
  EXPECT_EQ(parsed("auto").describe(), "auto");
}

}  // namespace
}  // namespace thermo
