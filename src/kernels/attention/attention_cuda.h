// Attention on the GPU for rows of any number of sequences: heads prepared and appended to the cache,
// attended, gated. See attention.h for what a row sees.
#pragma once

#include <cstdint>

#include "device/stream.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/head_gate.h"
#include "kernels/row_ops/row_ops_cuda.h"

namespace thermo {

// The rows of a step, in device memory: a recorded graph reads whatever the host put there. Rows of one
// sequence are a group.
struct DeviceRows {
  const int32_t* n_valid;     // [1] rows from here on are padding: computed, stored nowhere, seen by nobody
  const int32_t* n_groups;    // [1]
  const int32_t* token;       // [rows]
  const int32_t* group;       // [rows] -1: padding
  const int32_t* position;    // [rows]
  const int32_t* parent;      // [rows] relative to the group's first row, -1: none
  const uint64_t* ancestors;  // [rows] bit j: row j of the group is this row or an ancestor; uncommitted rows
  const int32_t* group_sequence;  // [groups]
  const int32_t* group_begin;
  const int32_t* group_rows;
  const int32_t* group_past;         // committed length of the sequence
  const int32_t* group_uncommitted;  // 1: the rows may be a tree, at most 64 of them; 0: a chain
  bool any_uncommitted;              // false: no group is

  constexpr bool is_uncommitted(int g) const { return any_uncommitted && group_uncommitted[g] != 0; }
};

// The cache of one layer in pages, see KvView. The table of sequence s lies at pages + s * table_pages, in
// device memory: a recorded graph follows whatever page the table names.
struct DeviceKv {
  KvType k_type, v_type;
  std::byte* k;
  std::byte* v;
  const int32_t* pages;
  int64_t page_bytes;
  int table_pages;
};

// Writes entries of a table. Their numbers travel with the launch.
inline constexpr int kMaxPageEntries = 64;
struct DevicePageEntries {
  int32_t* to;
  int n;
  int32_t pages[kMaxPageEntries];
};
void put_pages_cuda(const DevicePageEntries& entries, StreamView stream) noexcept;

struct DeviceAttentionArgs {
  DeviceRows rows;
  DeviceKv kv;
  int n_rows, n_head, n_head_kv, head_dim;
  float scale;
  int window;      // 0: none
  bool both_ways;  // the rows of a group are a chain and see the ones after them, too
  bool singles;    // no two rows are of one sequence
  float eps;

  const float* q_full;  // [rows][n_head][head_dim, or twice that with the gate after it]
  const float* k;       // [rows][n_head_kv][head_dim] as projected
  const float* v;
  const float* gate;  // [rows][n_head, or that times head_dim] with a softplus gate
  HeadGate head_gate;
  const float* q_norm;
  const float* k_norm;
  const float* inv_freq;  // [n_rot / 2]
  int n_rot;
  float rope_magnitude;

  float* q;           // [rows][n_head][head_dim] scratch
  float* partial;     // rows * n_head * n_splits * (head_dim + 2) scratch
  int n_splits;       // attention_splits()
  DeviceActsOut out;  // [rows][n_head * head_dim]

  // Of up to kMaxTaggedRows rows, which are attended in one launch where the card and the shape allow it:
  // what its blocks tell each other, zero when made, and the number of the launch, which no earlier launch
  // over that memory had. nullptr: in three launches.
  void* tagged = nullptr;  // attention_tagged_bytes()
  const uint32_t* launch = nullptr;
};

inline constexpr int kMaxTaggedRows = 2;
size_t attention_tagged_bytes(int n_rows, int n_head, int n_splits, int head_dim) noexcept;

// Parts into which the cache of a row is cut, so that few rows still fill the card.
int attention_splits(int n_rows, int n_head, int n_head_kv, int n_multiprocessors) noexcept;
inline constexpr int kMaxAttentionSplits = 64;

// head_dim 16 (f32, f16 and bf16), 32, 64, 128 or 256.
void attention_cuda(const DeviceAttentionArgs& args, StreamView stream) noexcept;

// Only keys and values, of several layers that are alike: normed, rotated and appended. `kv`, `k` and `v` are
// of the first layer, the next one lies layer_bytes and layer_stride floats further.
inline constexpr int kMaxAppendLayers = 64;
struct DeviceKvAppendArgs {
  DeviceRows rows;
  DeviceKv kv;
  int64_t layer_bytes;
  int n_layers, n_rows, n_head_kv, head_dim;
  float eps;
  const float* k;  // [layer][rows][n_head_kv][head_dim] as projected
  const float* v;
  int64_t layer_stride;
  const float* k_norm[kMaxAppendLayers];
  const float* inv_freq;  // [n_rot / 2]
  int n_rot;
  float rope_magnitude;
};
void kv_append_cuda(const DeviceKvAppendArgs& args, StreamView stream) noexcept;

// What a commit makes part of some sequences, in device memory: of each its number, its committed length, the
// length of the path, and the path, which is uncommitted rows.
inline constexpr int kMaxPathRows = 64;
struct DevicePath {
  int32_t sequence, past, n;
  int32_t rows[kMaxPathRows];
};
struct DevicePaths {
  const DevicePath* paths;
  int n;
};

// Moves the rows of paths down after the committed ones: slot past + rows[d] to past + d, in all layers. `kv`
// is of the first layer, the next one lies layer_bytes further.
struct DeviceKvMoveArgs {
  DeviceKv kv;
  int64_t layer_bytes;
  int n_layers;
  DevicePaths paths;
  int n_head_kv, head_dim;
};
void kv_move_cuda(const DeviceKvMoveArgs& args, StreamView stream) noexcept;

}  // namespace thermo
