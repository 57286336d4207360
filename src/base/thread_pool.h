// Workers for fork and join regions of a few microseconds.
//
// A step of the model is a few hundred short regions, so waking a sleeping thread for each (5 to 50 us)
// would cost more than the work. Workers therefore spin between regions and park only after a pause
// (`spin_us`) without work: during a generation they never sleep, between generations they cost nothing.
//
// One thread at a time may call run(); regions do not nest.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <vector>

namespace thermo {

// Tasks 0..n-1 dealt to threads: each thread takes its own consecutive share first, then steals what is left
// of the others' shares.
//
// Consecutive, because tasks are tiles of one long stream of weights: two cores that take neighbouring tiles
// in turn make each other's prefetching useless (measured on two cores: 39 GB/s, against 59 GB/s with one
// half each).
class TaskRanges {
 public:
  explicit TaskRanges(int n_threads) : cursors_(static_cast<size_t>(n_threads)) {}

  // Before the region opens. Even shares.
  void deal(int n_tasks) noexcept {
    const int n_threads = static_cast<int>(cursors_.size());
    for (int i = 0; i < n_threads; ++i)
      deal(i, static_cast<int>(static_cast<int64_t>(n_tasks) * i / n_threads),
           static_cast<int>(static_cast<int64_t>(n_tasks) * (i + 1) / n_threads));
  }
  // The share [begin, end) of one thread, for callers that deal unevenly.
  void deal(int thread, int begin, int end) noexcept {
    Cursor& cursor = cursors_[static_cast<size_t>(thread)];
    cursor.next.store(begin, std::memory_order_relaxed);
    cursor.end = end;
  }

  // Calls body(task, owner) for tasks until none is left; owner: the thread whose share it was.
  template <class Body>
  void drain(int thread, const Body& body) noexcept {
    const int n_threads = static_cast<int>(cursors_.size());
    for (int i = 0; i < n_threads; ++i) {
      const int owner = (thread + i) % n_threads;
      Cursor& cursor = cursors_[static_cast<size_t>(owner)];
      while (cursor.next.load(std::memory_order_relaxed) < cursor.end) {
        const int task = cursor.next.fetch_add(1, std::memory_order_relaxed);
        if (task >= cursor.end) break;
        body(task, owner);
      }
    }
  }

 private:
  struct alignas(64) Cursor {
    std::atomic<int> next{0};
    int end = 0;
  };
  std::vector<Cursor> cursors_;
};

struct ThreadPoolOptions {
  int n_threads = 0;    // including the caller of run(); 0: one for each physical core
  bool pin = true;      // bind worker i to the i-th usable core; the caller is never bound
  bool spread = false;  // count those cores over the memory nodes in turn, not node by node
  uint32_t spin_us = 50'000;
};

class ThreadPool {
 public:
  explicit ThreadPool(const ThreadPoolOptions& options = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const noexcept { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, thread) for every task in [0, n_tasks), dealt as TaskRanges says, thread in [0, size()).
  // Returns when all are done. `body` must not throw.
  template <class Body>
  void run(int n_tasks, const Body& body) {
    if (n_tasks <= 0) return;
    if (n_tasks == 1 || workers_.empty()) {
      for (int task = 0; task < n_tasks; ++task) body(task, 0);
      return;
    }
    ranges_.deal(n_tasks);
    run_threads([&](int thread) { ranges_.drain(thread, [&](int task, int) { body(task, thread); }); });
  }

  // Calls body(thread) once on each thread that comes. The caller always comes; a worker that the system has
  // not scheduled may not. For regions that deal out several kinds of tasks themselves.
  template <class Body>
  void run_threads(const Body& body) {
    open_region([](const void* context, int thread) { (*static_cast<const Body*>(context))(thread); }, &body);
  }

  // Background work. Workers start it when they leave the next region and stop when it is withdrawn. Withdraw
  // it before opening the region after that. If it is offered inside a region, it is for workers that leave
  // that region later. idle(context, thread, over) works until over() or until it finds nothing to do, calls
  // over() at least every microsecond, and returns whether it found anything. One offer at a time, by the
  // thread that calls run(), once everyone has left the previous one.
  using IdleFn = bool (*)(void* context, int thread, const std::function<bool()>& over);
  void offer(IdleFn idle, void* context) noexcept;
  // No worker starts it any more, and those inside leave soon, unless one has lost its core there. Regions
  // need not wait for that.
  void withdraw() noexcept;
  bool everyone_left() const noexcept;

  // How long each worker, [size() - 1], has been without a core since it began, not counting time parked or
  // before it was first scheduled: other programs had the core, or another virtual machine. One system call
  // for each.
  void read_lost_ns(std::span<int64_t> lost) noexcept;

 private:
  using RegionFn = void (*)(const void* context, int thread);

  void open_region(RegionFn fn, const void* context) noexcept;
  void work(int thread) noexcept;
  bool be_idle(int thread, uint32_t left) noexcept;

  // The current region; written while it is closed and no thread is inside, read by workers inside it.
  RegionFn fn_ = nullptr;
  const void* context_ = nullptr;
  TaskRanges ranges_;

  // Even: closed. Odd: open. A worker is inside a region only if it entered while the region was open. So the
  // caller waits for the workers that came, not for one that the system has not scheduled.
  alignas(64) std::atomic<uint32_t> gate_{0};
  alignas(64) std::atomic<int> n_parked_{0};
  std::atomic<bool> stop_{false};
  uint32_t spin_us_;

  // Where each thread is, with a cache line for each: all threads of a region would fight for the line of a
  // shared counter, twice.
  struct alignas(128) Place {
    std::atomic<bool> in_region{false};
    std::atomic<bool> in_idle{false};
    std::atomic<int64_t> began_ns{0};  // 0: not yet
    // While it is awake: how long it has been parked. While it is parked: minus how long it has been awake.
    std::atomic<int64_t> parked_ns{0};
  };
  std::vector<Place> places_;

  // What is offered; written while it is not.
  alignas(64) std::atomic<uint32_t> offered_{0};  // gate value of the region it starts after; 0: nothing
  IdleFn idle_ = nullptr;
  void* idle_context_ = nullptr;
  std::vector<std::thread> workers_;
};

}  // namespace thermo
