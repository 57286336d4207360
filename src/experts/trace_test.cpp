#include "experts/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <thread>

#include "base/json.h"

namespace thermo {
namespace {

class TraceTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::temp_directory_path() / ("trace_test." + std::to_string(getpid()) + ".json");
  }
  void TearDown() override { std::filesystem::remove(path_); }
  std::string read() const {
    std::ifstream in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  }
  std::unique_ptr<TraceWriter> open() {
    Result<std::unique_ptr<TraceWriter>> writer = TraceWriter::open(path_, "a \"title\"");
    EXPECT_TRUE(writer);
    return std::move(writer).value();
  }
  // The complete events.
  static std::vector<Json> events_of(const std::string& text) {
    const Json all = Json::parse(text);
    EXPECT_TRUE(all.is_array());
    std::vector<Json> events;
    for (const Json& event : all)
      if (event.at("ph") == "X") events.push_back(event);
    return events;
  }

  std::string path_;
};

TEST_F(TraceTest, WritesEventsThatAViewerUnderstands) {
  const int64_t t0 = now_ns();
  {
    const std::unique_ptr<TraceWriter> writer = open();
    writer->add({.lane = TraceLane::Cpu,
                 .name = "experts",
                 .category = "cold",
                 .begin_ns = t0 + 5000000,
                 .duration_ns = 1250,
                 .args = {{{"layer", 7}, {"bytes", 1ll << 40}}}});
    writer->add(
        {.lane = TraceLane::Disk, .name = "read", .category = "tier", .begin_ns = t0, .duration_ns = 0});
  }
  const std::vector<Json> events = events_of(read());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(events[0].at("name"), "experts");
  EXPECT_EQ(events[0].at("cat"), "cold");
  EXPECT_EQ(events[0].at("tid"), static_cast<int>(TraceLane::Cpu));
  EXPECT_DOUBLE_EQ(events[0].at("dur").get<double>(), 1.25);
  EXPECT_NEAR(events[0].at("ts").get<double>() - events[1].at("ts").get<double>(), 5000.0, 0.002);
  EXPECT_EQ(events[0].at("args"), (Json{{"layer", 7}, {"bytes", 1ll << 40}}));
  EXPECT_FALSE(events[1].contains("args"));
}

TEST_F(TraceTest, NamesEveryLane) {
  open().reset();
  std::map<int, std::string> names;
  std::string title;
  for (const Json& event : Json::parse(read())) {
    if (event.at("name") == "thread_name") names[event.at("tid")] = event.at("args").at("name");
    if (event.at("name") == "process_name") title = event.at("args").at("name");
  }
  EXPECT_EQ(title, "a  title ");
  EXPECT_EQ(names, (std::map<int, std::string>{
                       {0, "step"}, {1, "device"}, {2, "cpu"}, {3, "fetch"}, {4, "copy"}, {5, "disk"}}));
}

TEST_F(TraceTest, TakesEventsFromSeveralThreads) {
  {
    const std::unique_ptr<TraceWriter> writer = open();
    std::vector<std::thread> threads;
    for (int lane = 0; lane < 4; ++lane)
      threads.emplace_back([&writer, lane] {
        for (int i = 0; i < 5000; ++i)
          writer->add({.lane = static_cast<TraceLane>(lane),
                       .name = "work",
                       .category = "test",
                       .begin_ns = now_ns(),
                       .duration_ns = 1,
                       .args = {{{"i", i}}}});
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(writer->n_dropped(), 0u);
  }
  std::map<int, int> next;
  for (const Json& event : events_of(read())) EXPECT_EQ(event.at("args").at("i"), next[event.at("tid")]++);
  for (int lane = 0; lane < 4; ++lane) EXPECT_EQ(next[lane], 5000);
}

TEST_F(TraceTest, LeavesALoadableFileWhenTheProgramIsKilled) {
  const std::unique_ptr<TraceWriter> writer = open();
  writer->add({.name = "before", .category = "test", .begin_ns = now_ns(), .duration_ns = 1});
  // What is on disk while the program still runs is what a kill leaves.
  std::string text;
  for (int i = 0; i < 500 && text.find("before") == std::string::npos; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    text = read();
  }
  EXPECT_FALSE(Json::accept(text));  // no end yet
  EXPECT_EQ(events_of(text + "]").size(), 1u);
}

TEST_F(TraceTest, CountsWhatItHadToDrop) {
  constexpr int kMany = 3000000;
  uint64_t dropped = 0;
  {
    const std::unique_ptr<TraceWriter> writer = open();
    for (int i = 0; i < kMany && writer->n_dropped() < 10; ++i)
      for (int k = 0; k < 100; ++k) writer->add({.name = "x", .category = "y"});
    dropped = writer->n_dropped();
  }
  ASSERT_GT(dropped, 0u);
  const std::string text = read();
  EXPECT_NE(text.find("\"dropped_events\",\"args\":{\"n\":" + std::to_string(dropped)), std::string::npos);
}

TEST_F(TraceTest, SaysWhyItCannotBeWritten) {
  const auto writer = TraceWriter::open("/nowhere/trace.json", "t");
  ASSERT_FALSE(writer);
  EXPECT_THAT(writer.error().message,
              testing::HasSubstr("/nowhere/trace.json: the trace cannot be written (No such"));
}

TEST_F(TraceTest, GoesOnWhenTheDiskIsFull) {
  if (access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full here";
  Result<std::unique_ptr<TraceWriter>> writer = TraceWriter::open("/dev/full", "t");
  ASSERT_TRUE(writer);
  (*writer)->add({.name = "lost", .category = "test"});
}

}  // namespace
}  // namespace thermo
