// Products of whole matrices with many rows; a part of linear_cuda.
#pragma once

#include "kernels/linear/linear_cuda.h"

namespace thermo {

// Into how many parts the sum of a float matrix that is multiplied alone is best cut, so that there are tiles
// for most of the card; 0: it has none. Parts times rows are at most kMaxFloatPartRows, or the rows.
inline constexpr int kMaxFloatParts = 16;
inline constexpr int kMaxFloatPartRows = 4096;
int float_tile_parts(const DeviceMatrix& w, const DeviceActs& x, int n_acts) noexcept;

// Whether linear_tiles_cuda does this job. Float weights: on compute capability 8.0, with rows of whole
// 16-byte pieces and enough tiles to fill half of the card, or cut into more than two parts.
bool has_tiles(const DeviceLinearArgs& args, int job) noexcept;

// Whether a step of at most kMaxSmallActs rows is better off with tiles. From kMaxPanelActs on the tensor
// cores of the few-row form see every weight more than once, or every warp loads all activations itself:
// 35B-A3B, 32 rows: input projections 63 us, here 27.
bool linear_prefers_tiles(const DeviceLinearArgs& args) noexcept;

// The jobs that have tiles, those of one weight type in one launch.
void linear_tiles_cuda(const DeviceLinearArgs& args, StreamView stream) noexcept;

}  // namespace thermo
