// The layers of a drafter's block on the GPU: up to 16 rows, five launches a layer.
//
//   [q, k, v: norm, product, heads] [attention] [output: product, residual] [gate, up: norm, product, swiglu]
//   [down: product, residual]
//
// A drafter only proposes, so its rows need no bits in common with other ways to compute them: activations
// are f16, sums f32. They have the same bits in every run.
//
// A norm has no launch: who completes the residual stream leaves x * weight in f16 and the squares of what it
// added up, and who reads that multiplies its sums by 1 / sqrt(mean square).
#pragma once

#include <cstdint>

#include "device/stream.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/linear/device_matrix.h"

namespace thermo {

inline constexpr int kMaxDraftRows = 16;
// Columns of the residual stream that one group of blocks completes, and rows of squares it takes.
inline constexpr int kDraftOutColumns = 64;
constexpr int draft_squares(int n_embd) {
  return (n_embd + kDraftOutColumns - 1) / kDraftOutColumns;
}

// Rows that a product reads: the f16 form of DeviceActs.
struct DraftRows {
  const void* f16 = nullptr;
  int64_t stride = 0;
  float scale = 1.0f;
  // Not null: the rows are x * weight of a norm, and [n_squares][kMaxDraftRows] sums of squares of x.
  const float* squares = nullptr;
  int n_squares = 0;
  float eps = 0.0f;
};

// What completes the residual stream leaves: x itself, and for the next norm what DraftRows has.
struct DraftStream {
  float* x;  // [rows][n_embd]
  int n_embd;
  const float* norm;  // weights of the next norm
  void* f16;
  int64_t stride;
  float scale;
  float* squares;  // [draft_squares(n_embd)][kMaxDraftRows]
};

// Whether the card can do this at all: clusters of blocks. Whether a matrix can be read so: of the type Q8_0
// and not too wide.
bool draft_block_possible() noexcept;
bool draft_heads_possible(const DeviceMatrix& w, int head_dim) noexcept;
bool draft_out_possible(const DeviceMatrix& w) noexcept;
bool draft_gate_possible(const DeviceMatrix& w) noexcept;

// Heads from rows: projected, queries and keys normed and rotated; keys and values go to the cache, queries
// to `q` as draft_attention_cuda() reads them.
enum class DraftHead : int32_t { Query, Key, Value };
inline constexpr int kMaxDraftHeadJobs = 32;
struct DraftHeadsArgs {
  struct Job {
    DeviceMatrix w;               // heads of head_dim rows
    const float* norm = nullptr;  // [head_dim]
    DraftHead kind = DraftHead::Query;
    int64_t kv_offset = 0;  // of the layer, from that of `kv`
  } jobs[kMaxDraftHeadJobs];
  int n_jobs = 0;
  DraftRows in;
  int n_rows = 0;
  DeviceRows rows;
  DeviceKv kv;
  int n_head = 0, n_head_kv = 0, head_dim = 0;
  float eps = 0.0f;
  const float* inv_freq = nullptr;  // [n_rot / 2]
  int n_rot = 0;
  float rope_magnitude = 1.0f;
  void* q = nullptr;  // [rows][n_head][head_dim] f16
  float q_scale = 1.0f;
};
void draft_heads_cuda(const DraftHeadsArgs& args, StreamView stream) noexcept;

// Rows over their sequences' caches, to args.out.f16. Reads `args` but for what makes heads; `q` is what
// draft_heads_cuda() left, made with the scale draft_query_scale().
struct DraftAttentionArgs {
  DeviceAttentionArgs args;
  const void* q = nullptr;
  uint64_t* counters = nullptr;  // [n_head_kv], zero when made
};
bool draft_attention_possible(int n_head, int n_head_kv, int head_dim, KvType k, KvType v) noexcept;
float draft_query_scale(float scale) noexcept;
void draft_attention_cuda(const DraftAttentionArgs& args, StreamView stream) noexcept;

// The stream = W rows, or with `add` it and that.
struct DraftOutArgs {
  DeviceMatrix w;
  DraftRows in;
  int n_rows = 0;
  bool add = true;
  DraftStream stream{};
};
void draft_out_cuda(const DraftOutArgs& args, StreamView stream) noexcept;

// silu(gate) * up, to the f16 form.
struct DraftGateArgs {
  DeviceMatrix gate, up;
  DraftRows in;
  int n_rows = 0;
  void* f16 = nullptr;
  int64_t stride = 0;
  float scale = 1.0f;
};
void draft_gate_cuda(const DraftGateArgs& args, StreamView stream) noexcept;

// The stream = rows of an embedding table, all squares in the first row of them.
void draft_embed_cuda(const DeviceMatrix& table, const int32_t* tokens, int n_rows, const DraftStream& to,
                      StreamView stream) noexcept;

}  // namespace thermo
