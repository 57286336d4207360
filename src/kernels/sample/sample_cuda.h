// The most likely tokens of rows of logits in GPU memory; see sample.h for what is found.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/stream.h"
#include "kernels/sample/sample.h"

namespace thermo {

struct TopLogitsArgs {
  const float* logits;  // [max_rows][n_vocab]
  int n_vocab;
  int max_rows;
  const int32_t* n_rows;    // in device memory: rows that are asked for
  const int32_t* n_wanted;  // in device memory, of each row: 0 nothing, 1 the best token, more: a list
  float* scratch;           // top_logits_scratch_floats() for each of max_rows
  TopLogits* out;           // [max_rows], device memory or page-locked host memory
};

size_t top_logits_scratch_floats();
void top_logits_cuda(const TopLogitsArgs& args, StreamView stream) noexcept;

}  // namespace thermo
