#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <numeric>
#include <thread>
#include <vector>

namespace thermo {
namespace {

TEST(ThreadPool, RunsEveryTaskExactlyOnce) {
  for (int n_threads : {1, 2, 3, 8}) {
    ThreadPool pool({.n_threads = n_threads});
    EXPECT_EQ(pool.size(), n_threads);
    for (int n_tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> hits(static_cast<size_t>(n_tasks));
      pool.run(n_tasks, [&](int task, int thread) {
        EXPECT_LT(thread, n_threads);
        hits[static_cast<size_t>(task)].fetch_add(1);
      });
      for (const auto& hit : hits) EXPECT_EQ(hit.load(), 1);
    }
  }
}

TEST(ThreadPool, MakesTheWritesOfARegionVisibleToTheCaller) {
  ThreadPool pool({.n_threads = 4});
  std::vector<int> values(64, 0);
  for (int round = 1; round <= 2000; ++round) {
    pool.run(64, [&](int task, int) { values[static_cast<size_t>(task)] += task; });
    ASSERT_EQ(std::accumulate(values.begin(), values.end(), 0), round * 2016);
  }
}

TEST(ThreadPool, WakesParkedWorkers) {
  ThreadPool pool({.n_threads = 3, .pin = false, .spin_us = 0});
  for (int round = 0; round < 50; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::atomic<int> count{0};
    pool.run(8, [&](int, int) { count.fetch_add(1); });
    ASSERT_EQ(count.load(), 8);
  }
}

TEST(ThreadPool, ServesCallersOnDifferentThreadsOneAfterAnother) {
  ThreadPool pool({.n_threads = 2});
  std::atomic<int> count{0};
  for (int i = 0; i < 4; ++i)
    std::thread([&] { pool.run(10, [&](int, int) { count.fetch_add(1); }); }).join();
  EXPECT_EQ(count.load(), 40);
}

}  // namespace
}  // namespace thermo
