// Makes the model that runs on the processor: with all weights in memory, with experts in the file, or with
// the stand-in device.
#pragma once

#include <memory>
#include <optional>

#include "base/thread_pool.h"
#include "engine/backend.h"
#include "engine/engine.h"
#include "experts/split_options.h"

namespace thermo {

struct CpuBackendOptions {
  int n_batch = 0;
  int n_sequences = 1;
  SequenceConfig sequence;
  Isa isa = Isa::Portable;
  bool stand_in = false;  // experts.split says how
  SplitOptions experts;   // host_bytes: main memory for experts where they do not all fit; 0: all
};

// `weights` loaded without experts when experts are split or in the file, see keeps_experts().
bool keeps_experts(const CpuBackendOptions& options);
std::unique_ptr<Backend> make_cpu_backend(ModelConfig config, Weights weights,
                                          const CpuBackendOptions& options, ThreadPool& pool,
                                          const LoadProgressFn& progress);

}  // namespace thermo
