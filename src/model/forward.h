// The parts that architectures are made of. An architecture (qwen35.cpp, laguna.cpp) is one function that
// calls them from the embedding to the last norm; each part works on all rows of the step at once.
#pragma once

#include <span>
#include <vector>

#include "base/host_buffer.h"
#include "base/thread_pool.h"
#include "experts/expert_runner.h"
#include "kernels/attention/attention.h"
#include "kernels/delta_net/delta_net.h"
#include "kernels/expert_ffn/expert_ffn.h"
#include "kernels/linear/linear.h"
#include "kernels/quant_matmul/quant_matmul.h"
#include "kernels/row_ops/row_ops.h"
#include "model/model_config.h"
#include "model/sequence_state.h"
#include "model/step.h"
#include "model/weights.h"

namespace thermo {

// The functions of one instruction-set path.
struct CpuKernels {
  const QuantMatmulKernels& matmul;
  const AttentionKernels& attention;
  const DeltaNetKernels& delta_net;
  const RowOpKernels& rows;

  explicit CpuKernels(Isa isa)
      : matmul(quant_matmul_kernels(isa)),
        attention(attention_kernels(isa)),
        delta_net(delta_net_kernels(isa)),
        rows(row_op_kernels(isa)) {}
};

// The running state of one step, sized for n_batch rows at load.
struct Activations {
  Activations(const ModelConfig& config, int n_batch, int n_threads, size_t max_panel_bytes);
  static uint64_t planned_bytes(const ModelConfig& config, int n_batch, int n_threads,
                                size_t max_panel_bytes);

  float* x;         // [rows][n_embd] residual stream
  ActBuffer h;      // [rows][n_embd] normed input of a block
  ActBuffer mixed;  // [rows][q_dim or ssm_inner] what attention or DeltaNet hands to its output projection

  // Attention.
  float* q_full;  // [rows][2 * q_dim] projected, gate inside for qwen35
  float* q;       // [rows][q_dim] normed, rotated
  float* k;       // [rows][n_kv_dim]
  float* v;
  float* gate;       // [rows][q_dim] laguna
  float* rope_full;  // [rows][n_rot] cos, sin
  float* rope_window;
  float* attention_scratch;

  // DeltaNet.
  float* conv_input;  // [rows][channels]
  float* conv_output;
  float* z;      // [rows][ssm_inner]
  float* alpha;  // [rows][n_head_v]; then log decay
  float* beta;
  float* delta_scratch;

  // Routing.
  float* router_logits;  // [rows][n_expert]
  int32_t* expert_ids;   // [rows][n_expert_used]
  float* expert_weights;
  float* shared_weights;  // [rows]
  int32_t* pair_rows;     // pairs sorted by expert, the shared expert's last
  float* pair_weights;
  std::vector<FfnGroup> groups;
  std::vector<int> expert_first;  // [n_expert + 1]
  ExpertFfnScratch ffn_scratch;
  ExpertSums expert_sums;  // [rows][n_embd]

  float* logits;  // [rows][n_vocab]; only rows that are asked for are ever touched
  LinearScratch linear_scratch;

 private:
  HostBuffer memory_;
};

// The rows of one sequence in a step.
struct RowGroup {
  SequenceState* sequence;
  int row_begin;
  int n_rows;
  bool uncommitted;        // leaves the sequence alone and writes its tape
  AncestorBits ancestors;  // empty: a chain
  const int32_t* parents;  // relative to row_begin; nullptr: a chain
};

class Forward {
 public:
  Forward(const ModelConfig& config, const Weights& weights, Activations& act, const CpuKernels& kernels,
          ThreadPool& pool)
      : config_(config),
        weights_(weights),
        act_(act),
        kernels_(kernels),
        pool_(pool),
        linear_{kernels.matmul, pool, act.linear_scratch} {}

  // Which rows the next calls work on. Spans must live until the pass ends.
  void begin(std::span<const RowGroup> groups, std::span<const TokenId> tokens,
             std::span<const int32_t> positions, std::span<const int32_t> row_numbers) noexcept;
  // Counts the uses of experts, and hands routed layers to `runner`. Either may be null.
  void attach(HeatMap* heat, ExpertRunner* runner) noexcept {
    heat_ = heat;
    runner_ = runner;
  }

  void embed(const Matrix& table) noexcept;
  // x += Attention(rms(x)), keys and values appended to the cache of `layer`.
  void attention(int layer, const RopeTable& rope, const float* angles) noexcept;
  // x += GatedDeltaNet(rms(x)).
  void delta_net(int layer) noexcept;
  // x += FFN(rms(x)), dense or routed as the layer has it.
  void feed_forward(int layer) noexcept;
  // Copies the residual stream of all rows.
  void capture(float* out) const noexcept;
  // h = rms(x; weight) of all rows, plus the form that `next` multiplies with.
  void final_norm(const std::vector<float>& weight, const Matrix& next) noexcept;
  // logits of the given rows from h.
  void head(const Matrix& output, std::span<const int32_t> rows) noexcept;

  void angles(const RopeTable& rope, float* out) noexcept;
  int n_rows() const noexcept { return static_cast<int>(tokens_.size()); }
  Activations& act() noexcept { return act_; }
  const ModelConfig& config() const noexcept { return config_; }
  const Weights& weights() const noexcept { return weights_; }

 private:
  template <class Body>
  void for_rows(const Body& body) noexcept;
  void norm(const std::vector<float>& weight, ActFormats formats) noexcept;
  void prepare_heads(int layer, const RopeTable& rope, const float* angles) noexcept;
  void gate_heads(int layer) noexcept;
  void delta_net_group(int layer, const RowGroup& group) noexcept;
  int route(const MoeWeights& moe) noexcept;  // returns the number of routed groups

  const ModelConfig& config_;
  const Weights& weights_;
  Activations& act_;
  const CpuKernels& kernels_;
  ThreadPool& pool_;
  LinearContext linear_;
  HeatMap* heat_ = nullptr;
  ExpertRunner* runner_ = nullptr;

  std::span<const RowGroup> groups_;
  std::span<const TokenId> tokens_;
  std::span<const int32_t> positions_;
  std::span<const int32_t> row_numbers_;  // 0, 1, 2, ...
};

// The architectures: from embedding to final norm (left in act.h). `hidden` as in StepBatch.
struct RopeTables {
  RopeTable full, window;
};
void forward_qwen35(Forward& pass, const RopeTables& rope, float* hidden) noexcept;
void forward_laguna(Forward& pass, const RopeTables& rope, float* hidden) noexcept;

}  // namespace thermo
