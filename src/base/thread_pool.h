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
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

namespace thermo {

struct ThreadPoolOptions {
  int n_threads = 0;  // including the caller of run(); 0: one for each physical core
  bool pin = true;    // bind worker i to the i-th usable core; the caller is never bound
  uint32_t spin_us = 50'000;
};

class ThreadPool {
 public:
  explicit ThreadPool(const ThreadPoolOptions& options = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const noexcept { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, thread) for every task in [0, n_tasks), task order increasing per hand-out, thread in
  // [0, size()). Returns when all are done. `body` must not throw.
  template <class Body>
  void run(int n_tasks, Body&& body) {
    if (n_tasks <= 0) return;
    if (n_tasks == 1 || workers_.empty()) {
      for (int task = 0; task < n_tasks; ++task) body(task, 0);
      return;
    }
    using Plain = std::remove_reference_t<Body>;
    run_erased(
        n_tasks, [](void* context, int task, int thread) { (*static_cast<Plain*>(context))(task, thread); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  using TaskFn = void (*)(void* context, int task, int thread);

  void run_erased(int n_tasks, TaskFn fn, void* context) noexcept;
  void work(int thread) noexcept;
  void drain(int thread) noexcept;

  // The current region; written while it is closed and nobody is inside, read by workers inside it.
  TaskFn fn_ = nullptr;
  void* context_ = nullptr;
  int n_tasks_ = 0;

  // Even: closed. Odd: open. A worker is inside a region only if it entered while it was open, so the caller
  // waits for those that came and not for one that the system has not scheduled.
  alignas(64) std::atomic<uint32_t> gate_{0};
  alignas(64) std::atomic<int> next_task_{0};
  alignas(64) std::atomic<int> n_inside_{0};
  alignas(64) std::atomic<int> n_parked_{0};
  std::atomic<bool> stop_{false};
  uint32_t spin_us_;
  std::vector<std::thread> workers_;
};

}  // namespace thermo
