#include "base/thread_pool.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>

#include "base/cpu_info.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace thermo {
namespace {

void pause_cpu() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Long enough between looks at the clock that the clock costs nothing.
constexpr int kSpinsPerClockLook = 1024;

void bind_to_core(int core) noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // a refusal only costs speed
}

}  // namespace

ThreadPool::ThreadPool(const ThreadPoolOptions& options) : spin_us_(options.spin_us) {
  const std::vector<int> cores = usable_cores();
  const int n_threads = options.n_threads > 0 ? options.n_threads : static_cast<int>(usable_physical_cores().size());
  // More threads than cores would wait for each other inside a region: binding makes that worse.
  const bool pin = options.pin && n_threads <= static_cast<int>(cores.size());
  if (n_threads > static_cast<int>(cores.size())) spin_us_ = 0;
  workers_.reserve(static_cast<size_t>(n_threads - 1));
  for (int i = 1; i < n_threads; ++i) {
    workers_.emplace_back([this, i, pin, core = pin ? cores[static_cast<size_t>(i)] : -1] {
      if (pin) bind_to_core(core);
      work(i);
    });
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run_erased(int n_tasks, TaskFn fn, void* context) noexcept {
  fn_ = fn;
  context_ = context;
  n_tasks_ = n_tasks;
  next_task_.store(0, std::memory_order_relaxed);
  n_busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  // seq_cst here and in work(): either the worker sees the new epoch before it parks, or we see it parked.
  epoch_.fetch_add(1);
  if (n_parked_.load() > 0) epoch_.notify_all();
  drain(0);
  // Every worker checks out of every region, so the region's data can be overwritten afterwards.
  int spins = 0;
  while (n_busy_.load(std::memory_order_acquire) != 0) {
    pause_cpu();
    if (++spins == kSpinsPerClockLook * 16) {  // a worker lost its core: let it have ours
      std::this_thread::yield();
      spins = 0;
    }
  }
}

void ThreadPool::drain(int thread) noexcept {
  const TaskFn fn = fn_;
  void* const context = context_;
  const int n_tasks = n_tasks_;
  for (;;) {
    const int task = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task >= n_tasks) return;
    fn(context, task, thread);
  }
}

void ThreadPool::work(int thread) noexcept {
  using Clock = std::chrono::steady_clock;
  uint32_t seen = 0;
  for (;;) {
    // Spin for the next region, then park.
    uint32_t now = epoch_.load(std::memory_order_acquire);
    if (now == seen) {
      const auto deadline = Clock::now() + std::chrono::microseconds(spin_us_);
      int spins = 0;
      while ((now = epoch_.load(std::memory_order_acquire)) == seen) {
        pause_cpu();
        if (++spins < kSpinsPerClockLook) continue;
        spins = 0;
        if (Clock::now() < deadline) continue;
        n_parked_.fetch_add(1);
        epoch_.wait(seen);
        n_parked_.fetch_sub(1);
      }
    }
    seen = now;
    if (stop_.load(std::memory_order_relaxed)) return;
    drain(thread);
    n_busy_.fetch_sub(1, std::memory_order_release);
  }
}

}  // namespace thermo
