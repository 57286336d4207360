#include "base/process_watch.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/host_buffer.h"
#include "base/units.h"

namespace thermo {
namespace {

namespace fs = std::filesystem;

TEST(ProcessWatch, CountsMemoryThatIsTaken) {
  const auto before = private_bytes();
  if (!before) GTEST_SKIP() << "not known under a sanitizer";
  const HostBuffer taken(256 * MiB);
  EXPECT_GE(*private_bytes(), *before + 255 * MiB);  // whether anything is written to it or not
  std::atomic<bool> stop = false;
  std::thread thread([&] { stop.wait(false); });
  EXPECT_LT(*private_bytes(), *before + 260 * MiB);  // its stack does not count
  stop = true;
  stop.notify_one();
  thread.join();
  EXPECT_GT(resident_bytes(), 1 * MiB);
  EXPECT_GT(virtual_bytes(), resident_bytes());
}

TEST(ProcessWatch, CountsThreadsThatRun) {
  std::atomic<bool> stop = false;
  std::thread sleeping([&] { stop.wait(false); });
  std::thread busy([&] {
    while (!stop.load()) {
    }
  });
  // The busy one and this one. A thread that has just begun runs, too, until it sleeps.
  const auto late = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (n_running_threads() != 2 && std::chrono::steady_clock::now() < late)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(n_running_threads(), 2);
  stop = true;
  stop.notify_all();
  sleeping.join();
  busy.join();
}

TEST(ProcessWatch, AddsUpWhatTheProcessorCounts) {
  const fs::path folder = fs::path(testing::TempDir()) / "resctrl";
  fs::remove_all(folder);
  EXPECT_EQ(memory_traffic_bytes(folder), std::nullopt);
  const auto write = [&](const char* domain, const char* text) {
    fs::create_directories(folder / "mon_data" / domain);
    std::ofstream(folder / "mon_data" / domain / "mbm_total_bytes") << text << "\n";
  };
  write("mon_L3_00", "1000");
  write("mon_L3_01", "234");
  EXPECT_EQ(memory_traffic_bytes(folder), 1234u);
  write("mon_L3_01", "Unavailable");
  EXPECT_EQ(memory_traffic_bytes(folder), std::nullopt);  // half of it would be wrong
  fs::remove_all(folder);
}

}  // namespace
}  // namespace thermo
