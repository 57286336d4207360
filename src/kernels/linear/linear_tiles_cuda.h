// Products of whole matrices with many rows; a part of linear_cuda.
#pragma once

#include "kernels/linear/linear_cuda.h"

namespace thermo {

// Whether linear_tiles_cuda can do this job: float weights need compute capability 8.0 and rows of whole
// 16-byte pieces.
bool has_tiles(const DeviceLinearJob& job, const DeviceActs& x) noexcept;

// The jobs that have tiles, those of one weight type in one launch.
void linear_tiles_cuda(const DeviceLinearArgs& args, StreamView stream) noexcept;

}  // namespace thermo
