#include "base/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>

#include "base/clock.h"
#include "base/cpu_info.h"
#include "base/memory_nodes.h"
#include "base/pause.h"

namespace thermo {
namespace {

// Spins between two looks at the clock: so many that the clock costs nothing.
constexpr int kSpinsPerClockLook = 1024;

void bind_to_core(int core) noexcept {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(pthread_self(), sizeof(set), &set);  // a refusal only costs speed
}

// How long it has had a core. 0 if the system does not say.
int64_t on_core_ns(pthread_t thread) noexcept {
  clockid_t clock{};
  timespec time{};
  if (pthread_getcpuclockid(thread, &clock) != 0 || clock_gettime(clock, &time) != 0) return 0;
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

int thread_count(const ThreadPoolOptions& options) {
  return options.n_threads > 0 ? options.n_threads : static_cast<int>(usable_physical_cores().size());
}

}  // namespace

ThreadPool::ThreadPool(const ThreadPoolOptions& options)
    : ranges_(thread_count(options)),
      spin_us_(options.spin_us),
      places_(static_cast<size_t>(thread_count(options))) {
  std::vector<int> cores = usable_cores();
  if (options.spread) cores = cores_in_turn(cores, memory_nodes());
  const int n_threads = thread_count(options);
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
  gate_.fetch_add(1);
  gate_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::open_region(RegionFn fn, const void* context) noexcept {
  fn_ = fn;
  context_ = context;
  // Sequentially consistent here and in work(): either the worker sees the open gate before it parks, or we
  // see it parked; and either it sees the gate closed, or we see it inside.
  gate_.fetch_add(1);
  if (n_parked_.load() > 0) gate_.notify_all();
  fn(context, 0);
  gate_.fetch_add(1);
  int spins = 0;
  for (const Place& place : places_)
    while (place.in_region.load()) {
      pause_cpu();
      if (++spins == kSpinsPerClockLook) {  // a worker lost its core: let it have ours
        std::this_thread::yield();
        spins = 0;
      }
    }
}

void ThreadPool::offer(IdleFn idle, void* context) noexcept {
  idle_ = idle;
  idle_context_ = context;
  offered_.store(gate_.load(std::memory_order_relaxed) | 1);  // of the open region, or of the next one
}

// Sequentially consistent here and in be_idle(): either the worker sees that nothing is offered, or we see it
// inside.
void ThreadPool::withdraw() noexcept {
  offered_.store(0);
}

bool ThreadPool::everyone_left() const noexcept {
  return std::none_of(places_.begin(), places_.end(),
                      [](const Place& place) { return place.in_idle.load(); });
}

void ThreadPool::read_lost_ns(std::span<int64_t> lost) noexcept {
  for (size_t i = 0; i < workers_.size(); ++i) {
    const int64_t began = places_[i + 1].began_ns.load(), parked = places_[i + 1].parked_ns.load();
    const int64_t on_core = on_core_ns(workers_[i].native_handle());
    const int64_t awake = parked >= 0 ? now_ns() - began - parked : -parked;
    lost[i] = began == 0 || on_core == 0 ? 0 : std::max<int64_t>(0, awake - on_core);
  }
}

// `left`: the gate value of the last region the thread was in.
bool ThreadPool::be_idle(int thread, uint32_t left) noexcept {
  if (left == 0 || offered_.load(std::memory_order_relaxed) != left) return false;
  std::atomic<bool>& in_idle = places_[static_cast<size_t>(thread)].in_idle;
  in_idle.store(true);
  const bool did = offered_.load() == left && idle_(idle_context_, thread, [this, left] {
                     return offered_.load(std::memory_order_relaxed) != left;
                   });
  in_idle.store(false, std::memory_order_release);
  return did;
}

void ThreadPool::work(int thread) noexcept {
  using Clock = std::chrono::steady_clock;
  const auto is_open = [](uint32_t gate) { return gate % 2 == 1; };
  Place& place = places_[static_cast<size_t>(thread)];
  std::atomic<bool>& in_region = place.in_region;
  const int64_t began_ns = now_ns();
  int64_t parked_ns = 0;
  place.began_ns.store(began_ns);
  uint32_t done = 0;  // the gate value of the last region we were inside
  for (;;) {
    // Spin for an open gate, then park.
    uint32_t now = gate_.load();
    auto deadline = Clock::now() + std::chrono::microseconds(spin_us_);
    for (int spins = 0; (!is_open(now) || now == done) && !stop_.load(std::memory_order_relaxed);
         now = gate_.load()) {
      if (be_idle(thread, done)) continue;
      pause_cpu();
      if (++spins < kSpinsPerClockLook) continue;
      spins = 0;
      if (Clock::now() < deadline) continue;
      const int64_t awake_ns = now_ns() - began_ns - parked_ns;
      place.parked_ns.store(-awake_ns);
      n_parked_.fetch_add(1);
      gate_.wait(now);
      n_parked_.fetch_sub(1);
      parked_ns = now_ns() - began_ns - awake_ns;
      place.parked_ns.store(parked_ns);
      deadline = Clock::now() + std::chrono::microseconds(spin_us_);
    }
    if (stop_.load()) return;
    in_region.store(true);
    if (gate_.load() == now) {
      fn_(context_, thread);
      done = now;
    }
    in_region.store(false, std::memory_order_release);
  }
}

}  // namespace thermo
