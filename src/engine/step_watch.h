// What the system took from a step: cores, and time for pages that came from disk. A trace uses it to explain
// why a step was slow when no lane can. It asks the system about every worker.
#pragma once

#include <cstdint>
#include <vector>

#include "experts/trace.h"

namespace thermo {

class ThreadPool;

class StepWatch {
 public:
  // `pool` must outlive it.
  explicit StepWatch(ThreadPool& pool);

  // Around a step, on the thread that runs it.
  void begin() noexcept;
  TraceEvent end(int n_rows) noexcept;

 private:
  struct Taken {
    int64_t on_core_ns = 0;        // this thread had a core
    std::vector<int64_t> lost_ns;  // each worker of the pool had none
    int64_t n_preempted = 0;       // threads of the program lost theirs to another one
    int64_t n_disk_faults = 0;
  };
  void read(Taken& taken) noexcept;

  ThreadPool& pool_;
  int64_t begin_ns_ = 0;
  Taken before_, after_;
};

}  // namespace thermo
