// Products of whole matrices with the rows of a step, on the GPU.
#pragma once

#include <cstdint>

#include "device/stream.h"
#include "kernels/linear/device_matrix.h"

namespace thermo {

struct DeviceLinearJob {
  DeviceMatrix w;
  float* y = nullptr;    // y[a * y_stride + row], overwritten
  int64_t y_stride = 0;  // floats
  // More than 1: the sum over columns is cut into parts, part p written part_stride floats further; the
  // reader adds them. As many as linear_parts() says, or 1. The same for all jobs beyond kMaxSmallActs rows.
  int k_parts = 1;
  int64_t part_stride = 0;
  bool add = false;  // y += instead; only where linear_reads_norm()
};

// Activation rows x * weight / sqrt(mean(x^2) + eps), made by whoever reads them: a norm without a launch.
struct DeviceNormIn {
  const float* x = nullptr;       // [kMaxNormActs or fewer][n_cols]
  const float* weight = nullptr;  // [n_cols]
  float eps = 0.0f;
};

inline constexpr int kMaxNormActs = 2;

inline constexpr int kMaxLinearJobs = 4;

// What the next launch reads besides these products: asked into L2 by blocks that wait for their input. The
// first two pieces lie sequence_stride floats apart for each sequence. A hint: it may be incomplete.
struct DeviceAhead {
  static constexpr int kPieces = 3;
  const float* from[kPieces] = {};
  int n_floats[kPieces] = {};
  int64_t sequence_stride = 0;
  const int32_t* sequence = nullptr;  // [1]; nullptr: nothing is asked for
};

// Several products over the same activation rows.
struct DeviceLinearArgs {
  DeviceLinearJob jobs[kMaxLinearJobs];
  int n_jobs = 0;
  DeviceActs x;
  DeviceNormIn norm;  // not null: instead of x; only where linear_reads_norm()
  DeviceAhead ahead;  // one row through a norm only
  // One row that the product rounds itself, only where linear_rounds_row(): x in its f16 or f32 form, or with
  // `gate` silu(gate) * up.
  bool rounds = false;
  const float *gate = nullptr, *up = nullptr;
  const int32_t* row_index = nullptr;  // activation row of each of the n_acts inputs; nullptr: 0, 1, 2, ...
  int n_acts = 0;
  // For more than kMaxFewActs rows as tiles, which some cards multiply faster; less than linear_room(): they
  // stay rows.
  void* room = nullptr;
  size_t room_bytes = 0;
};

// From 2 rows up to here quantised weights multiply x.blocks256 and x.blocks32, where these are there.
inline constexpr int kMaxFewActs = 64;
// Into how many parts their sum is cut where the reader adds them up (DeviceLinearJob::k_parts): by the shape
// alone, so that a row's sum does not depend on the number of rows.
int linear_few_parts(const DeviceMatrix& w) noexcept;
inline constexpr int kMaxPanelActs = 8;   // beyond, types that have them use tiles
inline constexpr int kMaxSmallActs = 32;  // up to here one launch serves all jobs and reads each weight once

// Into how many parts the sum of a matrix that is multiplied alone is best cut: one with few panels and many
// columns leaves most of the card idle otherwise.
inline constexpr int kMaxLinearParts = 8;
inline constexpr int kMaxCutActs = 512;
int linear_parts(const DeviceMatrix& w, int n_acts) noexcept;

// Whether products of n_acts rows, kMaxNormActs at most, with this matrix can read through a norm and add to
// y.
bool linear_reads_norm(const DeviceMatrix& w, int n_acts) noexcept;

// Whether a product of one row with this matrix alone, in linear_few_parts(), can round the row.
bool linear_rounds_row(const DeviceMatrix& w) noexcept;

// What DeviceLinearArgs::room needs for n_acts rows on this card; 0: nothing.
size_t linear_room(int n_acts, int n_cols) noexcept;

void linear_cuda(const DeviceLinearArgs& args, StreamView stream) noexcept;

}  // namespace thermo
