// Where a GPU step keeps the rows it reads and the activations between its kernels. Layouts only; GpuModel
// owns the memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/units.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/delta_net/delta_net_cuda.h"
#include "kernels/expert_ffn/decode_ffn_cuda.h"
#include "kernels/expert_ffn/expert_ffn_cuda.h"
#include "kernels/linear/linear_cuda.h"
#include "kernels/route_topk/route_topk_cuda.h"
#include "kernels/row_ops/row_ops_cuda.h"
#include "kernels/sample/sample_cuda.h"
#include "model/backend.h"
#include "model/model_config.h"
#include "model/weights.h"

namespace thermo {

inline constexpr int kBuckets[] = {1, 2, 4, 8, 16, 32, 64};
inline constexpr int kMaxBucket = 64;
inline constexpr int kLogitRows = 64;  // computed and copied at a time; as many as a draft has

// What groups a step has, which decides what it launches. Singles: committed, a row each.
enum class StepKind : uint8_t { Committed, Singles, Uncommitted, Mixed };
inline constexpr int kStepKinds = 4;

// Hands out aligned pieces of one buffer; with a null base it only counts.
class GpuCarver {
 public:
  explicit GpuCarver(std::byte* base) : base_(base) {}
  template <class T>
  T* take(size_t n) {
    T* const at = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += align_up<size_t>(n * sizeof(T), 256);
    return at;
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

// The rows of a step as DeviceRows wants them, in host or device memory: the same layout in both.
struct StepInputs {
  int32_t *n_valid, *n_groups, *n_logits, *token, *group, *position, *parent;
  int32_t *logit_row, *n_top;  // of each row of logits
  int32_t *group_sequence, *group_begin, *group_rows, *group_past, *group_uncommitted;
  uint64_t* ancestors;
  uint32_t* ticket;   // split experts: of the step
  int32_t* fetch_of;  // [kMaxFetchTable + 1]

  StepInputs() = default;
  StepInputs(std::byte* base, int max_rows);
  size_t bytes = 0;

  DeviceRows device_rows(StepKind kind) const {
    return {n_valid,
            n_groups,
            token,
            group,
            position,
            parent,
            ancestors,
            group_sequence,
            group_begin,
            group_rows,
            group_past,
            group_uncommitted,
            kind == StepKind::Uncommitted || kind == StepKind::Mixed};
  }
};

// Of recorded steps, of larger ones, of features, and the paths of a commit.
size_t input_bytes(const ModelConfig& config, const ModelOptions& options);

size_t rope_bytes(const ModelConfig& config);

inline size_t f16_columns(int columns) {
  return align_up<size_t>(static_cast<size_t>(columns), 32);
}

// Activations, sized for n_batch rows.
struct GpuWorkspace {
  float *x, *parts;
  DeviceActsOut h, mixed, hidden;
  float *q_full, *q, *k, *v, *gate, *partial;
  float *conv_input, *conv_output, *z, *alpha, *beta, *gates, *rule_out, *chunk_scores;
  float *router_logits, *shared_logit;
  float* norm_factor;  // of few rows
  std::byte* room;     // of products: DeviceLinearArgs
  size_t room_bytes;
  DeviceRoutes routes;
  uint32_t* expert_uses;                   // [layer][n_expert], of the main stack
  int16_t* drafted_experts;                // [sequence][layer][max_draft_rows][n_used] of uncommitted rows
  std::byte *exchange, *attention_tagged;  // of one or two decoded rows
  float* states;                           // [rows][states_width()] of another network, as they came
  DeviceActsOut joined;                    // [rows][those of StateProjection], for that product
  float* feature_kv;                       // [layer][K, V][rows][n_kv_dim] as projected
  uint64_t* draft_counters;                // of draft_attention_cuda()
  float* taps;                             // [taps of the network][n_batch][n_embd]
  float* logits;                           // [kLogitRows][n_vocab]
  float* top_scratch;                      // of each of these rows

  void carve(GpuCarver& carver, const ModelConfig& config, const ModelOptions& options, bool small_ffn,
             bool float_mixed, int n_multiprocessors);
};

// Columns of the widest projection of states of another network; 0: there is none.
int states_width(const ModelConfig& config);

// Whether a feed-forward block uses the experts' small form for any number of rows (expert_tiles_possible()),
// and whether an output projection multiplies with float weights.
bool any_small_ffn(const ModelConfig& config, const Weights& weights);
bool any_float_output(const ModelConfig& config, const Weights& weights);

}  // namespace thermo
