// Products of whole matrices with many rows; a part of linear_cuda.
#pragma once

#include "kernels/linear/linear_cuda.h"

namespace thermo {

// Whether linear_tiles_cuda does this job. Float weights: on compute capability 8.0, with rows of whole
// 16-byte pieces and enough tiles to fill half of the card.
bool has_tiles(const DeviceLinearArgs& args, int job) noexcept;

// The jobs that have tiles, those of one weight type in one launch.
void linear_tiles_cuda(const DeviceLinearArgs& args, StreamView stream) noexcept;

}  // namespace thermo
