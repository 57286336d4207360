// Makes the model that runs on the processor: with all weights in memory, with experts in the file, or with
// the stand-in device.
#pragma once

#include <memory>

#include "base/thread_pool.h"
#include "model/backend.h"
#include "model/weights.h"

namespace thermo {

// Whether the model has all experts among its weights; else `weights` is loaded without them.
bool keeps_experts(const ModelOptions& options);
std::unique_ptr<Backend> make_cpu_backend(ModelConfig config, Weights weights, const ModelOptions& options,
                                          ThreadPool& pool, const LoadProgressFn& progress);

}  // namespace thermo
