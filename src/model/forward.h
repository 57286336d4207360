// A step on the processor: runs the blocks of the network in turn, each on all rows of the step at once.
#pragma once

#include <algorithm>
#include <optional>
#include <span>
#include <vector>

#include "base/host_buffer.h"
#include "base/thread_pool.h"
#include "experts/expert_runner.h"
#include "kernels/attention/attention.h"
#include "kernels/delta_net/delta_net.h"
#include "kernels/expert_ffn/expert_ffn.h"
#include "kernels/expert_ffn/whole_experts.h"
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
  // All but untouched_bytes().
  static uint64_t planned_bytes(const ModelConfig& config, int n_batch, int n_threads,
                                size_t max_panel_bytes);
  // Logit rows are taken from the system when they are written: one, unless somebody asks for more.
  static uint64_t untouched_bytes(const ModelConfig& config, int n_batch);

  float* x;     // [rows][n_embd] residual stream
  ActBuffer h;  // [rows][n_embd] normed input of a block
  // [rows][q_dim or ssm_inner] what attention or DeltaNet hands to its output projection; or states, gathered
  ActBuffer mixed;

  // Attention.
  float* q_full;  // [rows][q_dim, or twice that with the gate inside] projected
  float* q;       // [rows][q_dim] normed, rotated
  float* k;       // [rows][n_kv_dim]
  float* v;
  float* gate;    // [rows][n_head or q_dim]
  float* angles;  // [ropes][rows][n_rot] cos, sin
  float* attention_scratch;
  std::vector<AttentionArgs> attention;  // of each sequence

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
  WholeExperts whole_experts;
  ExpertSums expert_sums;  // [rows][n_embd]

  float* taps;    // [taps of the network][rows of the step][n_embd]
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
  // Uncommitted: the experts that each row chose, [layer][row][n_expert_used]. They count when the row is
  // accepted.
  int32_t* experts = nullptr;
};

class Forward {
 public:
  Forward(const ModelConfig& config, const Weights& weights, Activations& act, const CpuKernels& kernels,
          ThreadPool& pool);

  // Which rows the next call works on. Spans must live until it ends. `logit_rows`: rows that get logits.
  void begin(std::span<const RowGroup> groups, std::span<const TokenId> tokens,
             std::span<const int32_t> positions, std::span<const int32_t> row_numbers,
             std::span<const int32_t> logit_rows, std::span<const StateRows> states = {}) noexcept;
  // Counts the uses of experts, and hands routed layers to `runner`. Either may be null.
  void attach(HeatMap* heat, ExpertRunner* runner) noexcept {
    heat_ = heat;
    runner_ = runner;
  }

  // Routed layers run so far, and the distinct experts that they used.
  uint64_t n_routed_layers() const noexcept { return n_routed_layers_; }
  uint64_t n_distinct_experts() const noexcept { return n_distinct_experts_; }

  // The whole network: from the embedding to logits.
  void run() noexcept;
  // Instead of run(): keys and values of the rows, of every layer, from hidden states of another network.
  void run_features(const StateRows& states) noexcept;

 private:
  template <class Body>
  void for_rows(const Body& body) noexcept;
  template <class Body>
  void for_row_blocks(const Body& body) noexcept;
  // What every core may read from its own cache.
  static bool is_small(const Matrix& w) noexcept;
  // Whether each thread multiplies some rows with the whole matrix, instead of all rows with a part of it:
  // then nothing of a row has to move to another core.
  bool goes_by_rows(const Matrix& w) const noexcept;
  int n_rows() const noexcept { return static_cast<int>(tokens_.size()); }
  // Blocks of layer `il` (-1: before the layers, n_layer: after them).
  void run_block(int il, const Block& block, const BlockWeights& w) noexcept;
  void embed(const BlockWeights& w) noexcept;
  void embed_row(const Matrix& table, int row, float* out) const noexcept;
  void nextn_input(const BlockWeights& w) noexcept;
  void attention(int il, const Block& block, const BlockWeights& w) noexcept;
  void delta_net(int il, const BlockWeights& w) noexcept;
  void feed_forward(int il, const Block& block, const BlockWeights& w) noexcept;
  void head(const BlockWeights& w) noexcept;
  bool some_rows_end() const noexcept;
  void end_rows(const Block& next, const BlockWeights& w) noexcept;
  void tap(const Block& block) const noexcept;

  // h = rms(x) of all rows, plus the forms that the matrices of these roles multiply with.
  void norm(const BlockWeights& w, std::initializer_list<Role> readers) noexcept;
  void norm(const BlockWeights& w, ActFormats formats) noexcept;
  void norm_row(const BlockWeights& w, ActFormats formats, int row) noexcept;
  // Rows [first, first + n) on the calling thread: row r of y = W * row r of x.
  void multiply_rows(const Matrix& w, const ActBuffer& x, int first, int n, float* y, int64_t stride,
                     int thread) noexcept;
  void find_angles(int row) noexcept;
  void project_heads(int il, const Block& block, const BlockWeights& w) noexcept;
  template <class Visit>
  void for_each_attention(const Visit& visit) noexcept;
  void prepare_heads(const Block& block, const BlockWeights& w, int row) noexcept;
  void prepare_keys(const Block& block, const BlockWeights& w, int row) noexcept;
  void append_keys(int il, int first, int n) noexcept;
  void gate_heads(const Block& block, int row) noexcept;
  template <class Prepare>
  void add_output(const Matrix& w, const Prepare& prepare) noexcept;
  bool goes_by_heads(const BlockWeights& w) const noexcept;
  void project_head(const BlockWeights& w, int kh, int thread, float* g, float* beta) noexcept;
  void delta_net_head(int il, const BlockWeights& w, const RowGroup& group, int kh, int thread, float* g,
                      float* beta) noexcept;
  void count_uses(int il, const Block& block, const BlockWeights& w, int n_routed) noexcept;
  void choose_experts(const RouteConfig& config, const BlockWeights& w, ActFormats formats) noexcept;
  int group_pairs(const RouteConfig& config, const BlockWeights& w) noexcept;
  float* angles_of(int rope, int row) const noexcept {
    return act_.angles + (static_cast<size_t>(rope) * tokens_.size() + static_cast<size_t>(row)) *
                             static_cast<size_t>(max_n_rot_);
  }

  static constexpr int kFewRows = 64;

  const ModelConfig& config_;
  const std::optional<size_t> single_rows_from_;  // block of the last layer
  const Weights& weights_;
  Activations& act_;
  const CpuKernels& kernels_;
  ThreadPool& pool_;
  LinearContext linear_;
  std::vector<RopeTable> ropes_;
  int max_n_rot_ = 0;
  HeatMap* heat_ = nullptr;
  ExpertRunner* runner_ = nullptr;
  uint64_t n_routed_layers_ = 0, n_distinct_experts_ = 0;

  std::span<const RowGroup> groups_;
  std::span<const TokenId> tokens_;
  std::span<const int32_t> positions_;
  std::span<const int32_t> row_numbers_;  // 0, 1, 2, ...
  std::span<const int32_t> logit_rows_;
  std::span<const StateRows> states_;
};

// A single row is not worth waking anybody for.
template <class Body>
void Forward::for_rows(const Body& body) noexcept {
  pool_.run(n_rows(), [&](int row, int) { body(row); });
}

// Rows in as many blocks as there are threads: body(first, n, thread).
template <class Body>
void Forward::for_row_blocks(const Body& body) noexcept {
  const int n_blocks = pool_.size();
  pool_.run(n_blocks, [&](int block, int thread) {
    const int first = n_rows() * block / n_blocks, end = n_rows() * (block + 1) / n_blocks;
    body(first, end - first, thread);
  });
}

// x += W mixed, where prepare(row) finishes the row of `mixed` before it is multiplied.
template <class Prepare>
void Forward::add_output(const Matrix& w, const Prepare& prepare) noexcept {
  ActFormats formats;
  formats.add(w);
  const auto finish = [&](int r) {
    prepare(r);
    act_.mixed.quantize(r, w.n_cols, formats, kernels_.matmul);
  };
  if (!goes_by_rows(w)) {
    for_rows(finish);
    const LinearJob job{.w = &w, .x = &act_.mixed, .y = act_.x, .y_stride = config_.n_embd, .add = true};
    linear_cpu({&job, 1}, n_rows(), nullptr, linear_);
    return;
  }
  for_row_blocks([&](int first, int n, int thread) {
    for (int r = first; r < first + n; ++r) finish(r);
    float* const tile = act_.linear_scratch.tile(thread, 0);
    for (int panel = 0; panel < n_panels(w.n_rows); panel += LinearScratch::kTilePanels) {
      const int n_outputs = std::min(LinearScratch::kTilePanels * kPanelRows, w.n_rows - panel * kPanelRows);
      multiply_tile(w, panel, n_panels(n_outputs), {.x = &act_.mixed, .first = first, .n = n}, tile,
                    n_outputs, act_.linear_scratch.panels(thread), kernels_.matmul);
      for (int i = 0; i < n; ++i) {
        float* const x = act_.x + static_cast<int64_t>(first + i) * config_.n_embd + panel * kPanelRows;
        for (int c = 0; c < n_outputs; ++c) x[c] += tile[static_cast<int64_t>(i) * n_outputs + c];
      }
    }
  });
}

}  // namespace thermo
