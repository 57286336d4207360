#include "tokenizer/stop_matcher.h"

#include <gtest/gtest.h>

#include <random>

namespace thermo {
namespace {

struct Outcome {
  std::string visible;
  std::string stop;
  bool operator==(const Outcome&) const = default;
};

// The definition, on the whole text.
Outcome find_naively(const std::vector<std::string>& stops, const std::string& text) {
  for (size_t pos = 0; pos < text.size(); ++pos) {
    std::string longest;
    for (const std::string& stop : stops) {
      if (!stop.empty() && text.compare(pos, stop.size(), stop) == 0 && stop.size() > longest.size())
        longest = stop;
    }
    if (!longest.empty()) return {text.substr(0, pos), longest};
  }
  return {text, ""};
}

TEST(StopMatcher, HoldsBackWhatMayBecomeAStop) {
  StopMatcher matcher({"STOP"});
  EXPECT_EQ(matcher.push("abcST"), "abc");
  EXPECT_EQ(matcher.push("O"), "");
  EXPECT_EQ(matcher.push("X"), "STOX");
  EXPECT_EQ(matcher.push("ST"), "");
  EXPECT_EQ(matcher.push("OPmore"), "");
  EXPECT_TRUE(matcher.matched());
  EXPECT_EQ(matcher.matched_stop(), "STOP");
  EXPECT_EQ(matcher.push("even more"), "");
  EXPECT_EQ(matcher.flush(), "");
}

TEST(StopMatcher, FlushGivesBackAnUnfinishedStop) {
  StopMatcher matcher({"STOP"});
  EXPECT_EQ(matcher.push("aST"), "a");
  EXPECT_EQ(matcher.flush(), "ST");
  EXPECT_FALSE(matcher.matched());
  EXPECT_EQ(matcher.matched_stop(), "");
}

TEST(StopMatcher, WaitsForAStopThatBeganEarlier) {
  StopMatcher complete({"bc", "abcd"});
  EXPECT_EQ(complete.push("xabc"), "x");
  EXPECT_FALSE(complete.matched());
  EXPECT_EQ(complete.push("d"), "");
  EXPECT_EQ(complete.matched_stop(), "abcd");

  StopMatcher broken({"bc", "abcd"});
  EXPECT_EQ(broken.push("xabc"), "x");
  EXPECT_EQ(broken.push("e"), "a");
  EXPECT_EQ(broken.matched_stop(), "bc");
}

TEST(StopMatcher, FlushDecidesForTheShorterStop) {
  StopMatcher matcher({"\n", "\n\n"});
  EXPECT_EQ(matcher.push("a\n"), "a");
  EXPECT_EQ(matcher.flush(), "");
  EXPECT_EQ(matcher.matched_stop(), "\n");
}

TEST(StopMatcher, WithoutStopsLetsEverythingThrough) {
  StopMatcher matcher({""});
  EXPECT_EQ(matcher.push("abc"), "abc");
  EXPECT_EQ(matcher.flush(), "");
  EXPECT_FALSE(matcher.matched());
}

TEST(StopMatcher, EqualsANaiveSearchHoweverTheTextIsCut) {
  std::mt19937 random(13);
  const auto random_text = [&](size_t n) {
    std::string text;
    for (size_t i = 0; i < n; ++i) text += static_cast<char>('a' + random() % 3);
    return text;
  };
  for (int round = 0; round < 30000; ++round) {
    std::vector<std::string> stops;
    const size_t n_stops = random() % 4;
    for (size_t i = 0; i < n_stops; ++i) stops.push_back(random_text(1 + random() % 6));
    const std::string text = random_text(random() % 24);
    StopMatcher matcher(stops);
    Outcome outcome;
    for (size_t i = 0; i < text.size();) {
      const size_t n = 1 + random() % 5;
      outcome.visible += matcher.push(std::string_view(text).substr(i, n));
      i += n;
    }
    outcome.visible += matcher.flush();
    outcome.stop = matcher.matched_stop();
    ASSERT_EQ(outcome, find_naively(stops, text)) << ::testing::PrintToString(stops) << text;
  }
}

TEST(StopMatcher, NeverHoldsMoreThanAProperPrefix) {
  StopMatcher matcher({"aab"});
  std::string visible;
  for (int i = 0; i < 100; ++i) visible += matcher.push("a");
  EXPECT_EQ(visible.size(), 98u);
}

}  // namespace
}  // namespace thermo
