#include "base/json_limits.h"

#include <gtest/gtest.h>

namespace thermo {
namespace {

std::string object_of(size_t n) {
  std::string text = "{";
  for (size_t i = 0; i < n; ++i) text += (i == 0 ? "\"k" : ",\"k") + std::to_string(i) + "\":1";
  return text + "}";
}
std::string list_of(size_t n, const std::string& element) {
  std::string text = "[";
  for (size_t i = 0; i < n; ++i) text += (i == 0 ? "" : ",") + element;
  return text + "]";
}

TEST(JsonLimits, CountWhatStandsOutsideOfTexts) {
  EXPECT_EQ(beyond_limits(R"({"a": "[[{{,,,\"", "b": [1, {}]})", {.depth = 3, .elements = 2, .members = 2}),
            "");
  EXPECT_EQ(beyond_limits("[[1]]", {.depth = 1}), "it is nested deeper than 1 levels");
  EXPECT_EQ(beyond_limits("[1,2,3]", {.elements = 2}), "it has a list of more than 2 elements");
  EXPECT_EQ(beyond_limits(object_of(3), {.members = 2}), "it has an object of more than 2 members");
  EXPECT_EQ(beyond_limits("]]}}"), "");
}

TEST(JsonLimits, AddUpWhatManyLargeObjectsTake) {
  EXPECT_EQ(beyond_limits(object_of(10'000)), "");
  EXPECT_EQ(beyond_limits(list_of(3, object_of(10'000))), "");
  EXPECT_EQ(beyond_limits(list_of(5, object_of(10'000))), "it has too many large objects");
  EXPECT_EQ(beyond_limits(list_of(1'000'000, object_of(3))), "");
}

}  // namespace
}  // namespace thermo
