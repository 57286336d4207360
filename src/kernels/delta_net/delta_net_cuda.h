// Gated DeltaNet on the GPU for rows of any number of sequences: convolution, norms, gates, the delta rule
// and the gated norm. See delta_net.h for the arithmetic. The convolution columns of committed groups are
// shifted by residual_norm_cuda afterwards.
#pragma once

#include <cstdint>

#include "device/stream.h"
#include "kernels/attention/attention_cuda.h"  // DeviceRows
#include "kernels/row_ops/row_ops_cuda.h"

namespace thermo {

inline constexpr int kMaxDeltaRows = 64;       // of an uncommitted group
inline constexpr int kMaxFusedDeltaRows = 64;  // of a step that one kernel does
inline constexpr int kDeltaChunkRows = 32;     // that a large step takes at a time

// The tape of one layer, sequence s at + s * sequence_stride floats: what delta_net_commit_cuda needs of each
// uncommitted row.
struct DeviceTape {
  float* conv_input = nullptr;  // [rows][n_channels]
  float* k = nullptr;           // [rows][n_head_k * dim]
  float* decay = nullptr;       // [rows][n_head_v]
  float* delta = nullptr;       // [rows][n_head_v * dim]
  int64_t sequence_stride = 0;
};

struct DeviceDeltaNetArgs {
  DeviceRows rows;
  int n_rows, max_groups;
  int max_group_rows;        // of committed groups; 0: there are none
  int max_uncommitted_rows;  // of uncommitted groups, at most kMaxDeltaRows: these leave the state alone and
                             // write the tape
  int n_head_k, n_head_v, dim, taps;
  float eps;
  const float* u;      // [rows][n_channels] projected, raw
  const float* z;      // [rows][n_head_v * dim]
  const float* alpha;  // [rows][n_head_v]
  const float* beta;
  const float* conv_weight;  // [n_channels][taps]
  const float* a;            // [n_head_v]
  const float* dt_bias;
  const float* norm;        // [dim]
  float* state;             // [n_head_v][dim][dim] of sequence 0
  float* conv_state;        // [taps - 1][n_channels]
  int64_t sequence_stride;  // floats between sequences, of both
  DeviceTape tape;

  float* mixed;     // [rows][n_channels] scratch
  float* gates;     // [rows][n_head_v][2] scratch of large steps
  float* rule_out;  // [rows][n_head_v * dim] scratch of large steps
  float* scores;    // [rows][n_head_v][kDeltaChunkRows] scratch of large steps
  DeviceActsOut out;
  int short_rows = 0;  // set by delta_net_cuda: committed groups of a large step that another kernel has
  int max_stages = 2;  // fewer for tests: what cards with less memory do

  constexpr int n_channels() const { return (2 * n_head_k + n_head_v) * dim; }
  constexpr const float* z_of(int64_t row, int head) const { return z + (row * n_head_v + head) * dim; }
};

// Rows of an uncommitted group that this device has the shared memory for, at most kMaxDeltaRows. dim as
// below.
int max_uncommitted_delta_rows(int dim) noexcept;

// dim 16, 32, 64 or 128.
void delta_net_cuda(const DeviceDeltaNetArgs& args, StreamView stream) noexcept;

// Commits: applies the rows of paths, in all layers. Pointers are of sequence 0 in the first layer, the next
// layer lies *_layer_stride floats further.
struct DeviceDeltaCommitArgs {
  DevicePaths paths;
  int n_layers;
  DeviceTape tape;
  int64_t tape_layer_stride;
  float* state;
  float* conv_state;
  int64_t sequence_stride;  // of both, in floats
  int64_t layer_stride;
  int n_head_k, n_head_v, dim, taps, n_channels;
};
void delta_net_commit_cuda(const DeviceDeltaCommitArgs& args, StreamView stream) noexcept;

}  // namespace thermo
