#include "engine/step_watch.h"

#include <sys/resource.h>
#include <time.h>

#include <algorithm>

#include "base/thread_pool.h"

namespace thermo {

StepWatch::StepWatch(ThreadPool& pool) : pool_(pool) {
  const auto n_workers = static_cast<size_t>(pool.size() - 1);
  before_.lost_ns.resize(n_workers);
  after_.lost_ns.resize(n_workers);
}

void StepWatch::read(Taken& taken) noexcept {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  timespec on_core{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &on_core);
  taken.on_core_ns = on_core.tv_sec * 1'000'000'000 + on_core.tv_nsec;
  taken.n_preempted = usage.ru_nivcsw;
  taken.n_disk_faults = usage.ru_majflt;
  pool_.read_lost_ns(taken.lost_ns);
}

void StepWatch::begin() noexcept {
  read(before_);
  begin_ns_ = now_ns();
}

TraceEvent StepWatch::end(int n_rows) noexcept {
  const int64_t took_ns = now_ns() - begin_ns_;
  read(after_);
  // Between the clock of the step and those of the threads lie microseconds: no thread missed more than all
  // of it.
  const int64_t lost_ns = took_ns - (after_.on_core_ns - before_.on_core_ns);
  int64_t worst_ns = 0;
  for (size_t i = 0; i < after_.lost_ns.size(); ++i)
    worst_ns = std::max(worst_ns, after_.lost_ns[i] - before_.lost_ns[i]);
  return {.lane = TraceLane::Step,
          .name = n_rows == 1 ? "token" : "step",
          .category = "step",
          .begin_ns = begin_ns_,
          .duration_ns = took_ns,
          .args = {{{"rows", n_rows},
                    {"off_core_us", std::clamp<int64_t>(lost_ns, 0, took_ns) / 1000},
                    {"worker_off_core_us", std::min(worst_ns, took_ns) / 1000},
                    {"preempted", after_.n_preempted - before_.n_preempted},
                    {"disk_faults", after_.n_disk_faults - before_.n_disk_faults}}}};
}

}  // namespace thermo
