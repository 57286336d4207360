#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
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

TEST(ThreadPool, WaitingWorkersDoWhatIsOfferedUntilItIsWithdrawn) {
  ThreadPool pool({.n_threads = 3, .pin = false});
  struct Work {
    std::atomic<int> n_done{0};
    int limit = 0;  // a plain int: only changed while nothing is offered
  } work;
  const auto idle = [](void* context, int thread, const std::function<bool()>& over) {
    EXPECT_GT(thread, 0);  // the caller helps itself
    Work& w = *static_cast<Work*>(context);
    bool did = false;
    for (; !over() && w.n_done.load() < w.limit; did = true) w.n_done.fetch_add(1);
    return did;
  };
  for (int round = 1; round <= 200; ++round) {
    work.limit = 5 * round;
    pool.offer(idle, &work);
    std::atomic<int> count{0}, n_threads{0};
    pool.run_threads([&](int) {
      EXPECT_EQ(work.n_done.load() % 5, 0) << "a worker began before the region";
      n_threads.fetch_add(1);
      while (n_threads.load() < 3) std::this_thread::yield();  // all have come
    });
    while (work.n_done.load() < work.limit) std::this_thread::yield();
    pool.withdraw();
    while (!pool.everyone_left()) std::this_thread::yield();
    pool.run(8, [&](int, int) { count.fetch_add(1); });
    EXPECT_EQ(count.load(), 8);
    const int done = work.n_done.load();
    work.limit += 100;
    EXPECT_EQ(work.n_done.load(), done);
    work.n_done.store(5 * round);
  }
}

TEST(ThreadPool, RegionsDoNotWaitForAWorkerThatIsStuckInWhatWasOffered) {
  ThreadPool pool({.n_threads = 3, .pin = false});
  struct Stuck {
    std::atomic<int> n_inside{0};
    std::atomic<bool> go{false};
  } stuck;
  pool.offer(
      [](void* context, int thread, const std::function<bool()>& over) {
        Stuck& s = *static_cast<Stuck*>(context);
        if (s.n_inside.fetch_add(1) == 0)
          while (!s.go.load()) std::this_thread::yield();
        while (!over()) std::this_thread::yield();
        EXPECT_GT(thread, 0);
        return true;
      },
      &stuck);
  std::atomic<int> n_threads{0};
  pool.run_threads([&](int) {
    n_threads.fetch_add(1);
    while (n_threads.load() < 3) std::this_thread::yield();
  });
  while (stuck.n_inside.load() < 2) std::this_thread::yield();
  pool.withdraw();
  std::atomic<int> count{0};
  for (int round = 0; round < 20; ++round) pool.run(8, [&](int, int) { count.fetch_add(1); });
  EXPECT_EQ(count.load(), 160);
  EXPECT_FALSE(pool.everyone_left());
  stuck.go.store(true);
  while (!pool.everyone_left()) std::this_thread::yield();
}

TEST(ThreadPool, KnowsHowLongWorkersHadNoCore) {
  const auto lost_of = [](ThreadPool& pool) {
    std::vector<int64_t> lost(static_cast<size_t>(pool.size() - 1));
    pool.read_lost_ns(lost);
    return lost;
  };
  const auto busy = [](int, int) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(20);
    while (std::chrono::steady_clock::now() < until) {
    }
  };
  // Parked workers miss nothing.
  ThreadPool parked({.n_threads = 2, .pin = false, .spin_us = 0});
  parked.run(2, busy);
  int64_t least = INT64_MAX;  // on a busy machine it may be long on its way to where it parks
  for (int i = 0; i < 10 && least >= 20'000'000; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const std::vector<int64_t> before = lost_of(parked);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    least = std::min(least, lost_of(parked)[0] - before[0]);
  }
  EXPECT_LT(least, 20'000'000);

  // More busy threads than cores: together they lose what they would need beyond the cores there are.
  const int n_threads = 4 * static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  ThreadPool crowd({.n_threads = n_threads, .pin = false});
  crowd.run(10 * n_threads, busy);
  const std::vector<int64_t> lost = lost_of(crowd);
  EXPECT_GT(std::accumulate(lost.begin(), lost.end(), int64_t{0}), 20'000'000);
}

TEST(TaskRanges, KeepsToTheSharesItWasDealt) {
  TaskRanges ranges(3);
  ranges.deal(0, 0, 1);
  ranges.deal(1, 1, 1);
  ranges.deal(2, 1, 5);
  std::vector<std::pair<int, int>> seen;
  ranges.drain(1, [&](int task, int owner) { seen.emplace_back(task, owner); });
  const std::vector<std::pair<int, int>> expected = {{1, 2}, {2, 2}, {3, 2}, {4, 2}, {0, 0}};
  EXPECT_EQ(seen, expected);
}

}  // namespace
}  // namespace thermo
