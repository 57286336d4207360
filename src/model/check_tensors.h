// Looks at every weight of a file on request: a damaged file, or one that was converted wrongly, often has
// numbers that no model can have.
#pragma once

#include "base/thread_pool.h"
#include "gguf/gguf_file.h"
#include "model/load_progress.h"

namespace thermo {

// Decodes all weights. Throws LoadError with the first tensor, in the order of the file, that has a number
// that is not finite.
void check_tensors(const GgufFile& file, ThreadPool& pool, const LoadProgressFn& progress);

// The same for tensors of floats with at most a million elements: norms, biases and most routers. A bad one
// spoils every answer, and they are read in no time, so whoever answers looks at them first.
void check_small_tensors(const GgufFile& file);

}  // namespace thermo
