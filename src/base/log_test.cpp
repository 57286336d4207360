#include "base/log.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <iterator>

#include "base/log_control.h"
#include "base/log_fields.h"

namespace thermo {
namespace {

TEST(Log, KeepsTheLastWarningsAndErrors) {
  const uint64_t before = n_recent_warnings();
  log_warning("test", "one {}", 1);
  log_info("test", "not kept");
  log_error("test", "two");
  const std::vector<LogLine> lines = recent_warnings(before);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0].message, "one 1");
  EXPECT_EQ(lines[0].component, "test");
  EXPECT_EQ(lines[0].level, LogLevel::Warning);
  EXPECT_TRUE(lines[0].time.ends_with("Z"));
  EXPECT_EQ(lines[1].level, LogLevel::Error);
  EXPECT_EQ(recent_warnings(lines[0].number).size(), 1u);
  EXPECT_TRUE(recent_warnings(lines[1].number).empty());
  for (int i = 0; i < 100; ++i) log_warning("test", "many {}", i);
  EXPECT_EQ(recent_warnings(before).size(), 64u);
  EXPECT_EQ(n_recent_warnings(), before + 102);
}

// A fault that comes again and again must not bury everything else.
TEST(Log, WritesAWarningThatRepeatsOnceAndSaysHowOftenItCame) {
  const std::string path = testing::TempDir() + "/repeated.log";
  std::remove(path.c_str());
  configure_log({.level = LogLevel::Info, .prefix = false, .timestamps = false, .file = path});
  for (int i = 0; i < 37; ++i) log_warning("test", "again");
  log_info("test", "something else");
  log_warning("test", "again");
  log_info("test", "plain");
  log_info("test", "plain");
  configure_log({});
  std::ifstream in(path);
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  EXPECT_EQ(text, "again\nagain (x 37)\nsomething else\nagain\nplain\nplain\n");
}

TEST(Log, GivesMachinesTheFieldsOfAMessage) {
  const std::string path = testing::TempDir() + "/fields.log";
  for (const LogFormat format : {LogFormat::JsonLines, LogFormat::Text}) {
    std::remove(path.c_str());
    configure_log(
        {.level = LogLevel::Info, .format = format, .prefix = false, .timestamps = false, .file = path});
    log_with_fields(LogLevel::Info, "test", "it took 1.5 s",
                    {{"req", "a\"b"}, {"status", int64_t{200}}, {"seconds", 1.5}});
    configure_log({});
    std::ifstream in(path);
    const std::string text{std::istreambuf_iterator<char>(in), {}};
    if (format == LogFormat::Text)
      EXPECT_EQ(text, "it took 1.5 s\n");
    else
      EXPECT_NE(
          text.find(R"("component":"test","msg":"it took 1.5 s","req":"a\"b","status":200,"seconds":1.5})"),
          std::string::npos)
          << text;
  }
}

}  // namespace
}  // namespace thermo
