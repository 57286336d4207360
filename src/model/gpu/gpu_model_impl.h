// What a model on the GPU has; shared by gpu_model_load.cpp (loading, the plan), gpu_model.cpp (steps),
// gpu_sequences.cpp (checkpoints, pages) and gpu_forward.cpp (what a step launches).
#pragma once

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/cpu_info.h"
#include "base/host_buffer.h"
#include "device/buffer.h"
#include "device/device_info.h"
#include "device/graph.h"
#include "device/locked_pool.h"
#include "device/stream.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/delta_net/delta_net_cuda.h"
#include "kernels/draft_block/draft_block_cuda.h"
#include "kernels/expert_ffn/decode_ffn_cuda.h"
#include "kernels/linear/linear_cuda.h"
#include "kernels/row_ops/row_ops_cuda.h"
#include "kernels/sample/sample_cuda.h"
#include "model/gpu/gpu_model.h"
#include "model/gpu/gpu_weights.h"
#include "model/gpu/gpu_workspace.h"
#include "model/gpu/use_counts.h"
#include "model/kv_pages.h"

namespace thermo {

struct GpuModel::Impl {
  ModelConfig config;
  ModelOptions options;
  DeviceInfo device;
  std::shared_ptr<Stream> stream_owner;  // destroyed last; a drafter has its target's
  Stream& stream;
  std::unique_ptr<GpuExperts> experts;  // nullptr: they are with the other weights
  GpuWeights weights;
  SequenceLayout layout;
  std::array<DeviceBuffer, kKvKinds> kv;  // the pool of each kind
  DeviceBuffer recurrent, tape;           // all sequences
  DeviceBuffer tables;                    // [kind][sequence][page], as `table_entries` has them after a step
  std::vector<int32_t> table_entries;
  std::unique_ptr<KvPages> pages;
  DeviceBuffer workspace_memory;  // graphs hold addresses in all of these
  DeviceBuffer input_memory, rope_memory;
  PinnedBuffer input_pinned, logits_pinned, tops_pinned;
  HostBuffer logits_host;  // when more than kLogitRows rows are asked for
  GpuWorkspace act;
  std::unique_ptr<UseCounts> uses;  // nullptr: nobody counts, or `experts` does
  StepInputs small, small_host, large, large_host, feature, feature_host;
  DevicePath *paths, *paths_host;  // of a commit
  int n_paths = 0;                 // that wait in paths_host
  struct Rope {
    const float* inv_freq;
    int n_rot;
    float magnitude;
  };
  std::vector<Rope> ropes;
  std::vector<int> n_past;            // of each sequence
  std::vector<RowLogits> row_logits;  // of the last step
  int n_step_rows = 0;                // of the last step
  Event step_begin, step_end, features_end;
  // Copies of sequences in main memory: where they go, and the last one that was queued.
  static constexpr uint64_t kMostReadyBytes = uint64_t{1} << 30;
  std::shared_ptr<LockedPool> host_pool =
      std::make_shared<LockedPool>(device.index, std::min(kMostReadyBytes, cpu_info().memory_bytes / 64));
  std::shared_ptr<Event> copied = std::make_shared<Event>();
  Stream copies;        // of those that run beside the steps
  Event written;        // what they read
  struct StagedState {  // of a sequence, on its way
    DeviceBuffer memory;
    Event copied;
  };
  std::deque<StagedState> staged_states;  // empty: there is only one sequence, which waits
  size_t next_staged = 0;
  CapturedGraph graphs[kStepKinds][std::size(kBuckets)];  // destroyed first
  CapturedGraph feature_graphs[std::size(kBuckets)];
  std::string fault;
  float step_ms = 0.0f;
  int most_fused_rows = 0;                               // so many run without launches for norms
  bool drafts_blocks = false;                            // up to kMaxDraftRows rows in few launches
  bool reads_blocks256 = false, reads_blocks32 = false;  // projections of few rows

  Impl(ModelConfig config, const Weights& weights, const ModelOptions& options, ThreadPool& pool,
       const LoadProgressFn& progress, const Impl* target);

  void upload_rope();
  void record_graphs();
  void record(CapturedGraph& graph, const std::function<void()>& work);
  void record_features();
  // Makes room for rows that the caller knows there is room for.
  void reserve(int sequence, int n) noexcept;
  void flush_tables() noexcept;
  void flush_commits() noexcept;
  // Before pages of sequences change hands.
  void finish_commits() noexcept;
  void set_past(int sequence, int n) noexcept;
  void drop_commits(int sequence) noexcept;
  void lay_out(const StepBatch& batch, StepInputs& to, int n_rows) noexcept;
  void replay(const StepBatch& batch, CapturedGraph& graph, int n_rows) noexcept;
  StepKind kind_of(const StepBatch& batch) const noexcept;
  // Whether so many rows of as many sequences are a kind of step of their own.
  bool knows_singles(int n_rows) const noexcept { return options.n_sequences > 1 && n_rows > 1; }
  void queue(const StepBatch& batch, StepKind kind) noexcept;
  void copy_logits(const StepInputs& wanted, int n, int first) noexcept;
  void begin_copies() noexcept;
  void wait_for_copies() noexcept;
  void copy_pieces(int sequence, int n_tokens, bool with_kv, std::byte* checkpoint, bool restore) noexcept;
  void copy_block(const int32_t* table, const KvRange& range, std::byte* block, bool load) noexcept;
  void compute_more_logits(int n_logits, int n_rows) noexcept;
  void fetch_taps(int n_rows, float* to) noexcept;
  void enqueue(int n_rows, StepKind kind, int n_logits, const StepInputs& from) noexcept;
  struct Pass;  // a step while it is queued
  void enqueue_features(int n_rows) noexcept;
  // A drafter's layers by the kernels of draft_block, see gpu_draft_block.cpp.
  bool can_draft_blocks() noexcept;
  void draft_layers(const DeviceRows& rows, int n_rows) noexcept;
  void draft_features(int n_rows) noexcept;
  DraftStream draft_stream(const float* norm) const noexcept;
  DraftRows draft_normed(int n_squares) const noexcept;
  DraftHeadsArgs draft_heads(const DeviceRows& rows, int n_rows, int rope) const noexcept;
  DeviceActs round_few(const DeviceMatrix& w, const DeviceActsOut& rows, int n_rows) noexcept;
  void round_and_multiply(const DeviceLinearJob& job, const DeviceActs& x, const float* gate = nullptr,
                          const float* up = nullptr) noexcept;
  void project_states(const DeviceMatrix& w, int n_rows) noexcept;
  void nextn_input(Pass& pass, const GpuBlockWeights& w) noexcept;
  DeviceAttentionArgs attention_args(const DeviceRows& rows, int n_rows, int il, const Block& block,
                                     const GpuBlockWeights& w) noexcept;
  void run_block(Pass& pass, int il, size_t b, const Block& block, const GpuBlockWeights& w) noexcept;
  void begin_block(Pass& pass, const GpuBlockWeights& w) noexcept;
  void mix(Pass& pass, int il, const Block& block, const GpuBlockWeights& w) noexcept;
  void attention(Pass& pass, int il, const Block& block, const GpuBlockWeights& w,
                 const DeviceNormIn& norm) noexcept;
  DeviceAhead delta_ahead(const Pass& pass, int il, const GpuBlockWeights& w) noexcept;
  void delta_net(Pass& pass, int il, const GpuBlockWeights& w, const DeviceNormIn& norm) noexcept;
  void feed_forward(Pass& pass, int il, size_t b, const Block& block, const GpuBlockWeights& w) noexcept;
  DeviceActsOut expert_input(const RouteConfig& route, const GpuBlockWeights& w, int n_rows) const noexcept;
  DeviceUses uses_of(int il, const DeviceRows& rows, int n_rows) const noexcept;
  void run_experts(Pass& pass, int il, const Block& block, const GpuBlockWeights& w,
                   const DeviceCold& cold) noexcept;
  void head_block(Pass& pass, const GpuBlockWeights& w) noexcept;
  void tap(const Block& block, const float* from, int n_rows) noexcept;
  DecodeFfnArgs decode_ffn_args(const Block& block, const GpuBlockWeights& w, int n_rows) noexcept;
  void prefetch_next(int il, size_t b, DecodeFfnArgs& ffn) noexcept;
  bool is_wide_dense() noexcept;
  bool can_fuse_decode(int n_rows) noexcept;
  void project_in(std::initializer_list<DeviceLinearJob> jobs, const DeviceNormIn& norm, int n_rows,
                  const DeviceAhead& ahead = {}) noexcept;
  DeviceActsOut mixed_for(const DeviceMatrix& output) const noexcept;
  void project_out(const DeviceMatrix& w, const DeviceActsOut& x, const DeviceNormIn& norm,
                   int n_rows) noexcept;
  void head(int n_logits, const int32_t* rows, int n_rows) noexcept;
  // Of rows `first` and on of what is wanted, which the head computed.
  void top_of_head(int n_logits, const StepInputs& from, int first) noexcept;
  void linear(std::initializer_list<DeviceLinearJob> jobs, const DeviceActs& x, int n_acts,
              const int32_t* row_index = nullptr, const DeviceNormIn& norm = {},
              const DeviceAhead& ahead = {}) noexcept;
  // Normed rows as the projections of a step of n_rows read them.
  DeviceActsOut normed(int n_rows) const {
    DeviceActsOut h = act.h;
    if (!is_few(n_rows) || !reads_blocks256) h.blocks256 = nullptr;
    if (!is_few(n_rows) || !reads_blocks32) h.blocks32 = nullptr;
    return h;
  }
  static bool is_few(int n_rows) { return n_rows <= kMaxFewActs; }
  // The same rows rounded for `w`, where few of them and quantised weights ask for it.
  static bool rounds(const DeviceMatrix& w, int n_rows) { return is_few(n_rows) && !is_float_type(w.dtype); }
  static DeviceActsOut rounded_for(const DeviceMatrix& w, DeviceActsOut out) {
    if (act_format(w.dtype) == ActFormat::Q8x256)
      out.blocks32 = nullptr;
    else
      out.blocks256 = nullptr;
    return out;
  }
  int out_parts(const DeviceMatrix& w, int n_rows) const {
    return rounds(w, n_rows) ? linear_few_parts(w) : linear_parts(w, n_rows);
  }
  void find_block_forms() noexcept;
  bool dense_is_few(const Block& block, const GpuBlockWeights& w, int n_rows) const noexcept;
  void dense_ffn(Pass& pass, const GpuBlockWeights& w) noexcept;
  bool dense_is_many(const Block& block, const GpuBlockWeights& w, int n_rows) const noexcept;
  void dense_many_ffn(Pass& pass, const GpuBlockWeights& w) noexcept;
  bool check(const char* what) noexcept;
  void begin_split(int n_rows, StepInputs& inputs) noexcept {
    experts->begin(n_rows, *inputs.ticket, {inputs.fetch_of, kMaxFetchTable + 1}, stream.view());
  }

  float* delta_state(int il, int sequence) const {
    return reinterpret_cast<float*>(recurrent.data() + layout.recurrent(sequence, il).state);
  }
  float* conv_state(int il, int sequence) const {
    return reinterpret_cast<float*>(recurrent.data() + layout.recurrent(sequence, il).columns);
  }
  // Floats from one sequence to the next, of both.
  int64_t recurrent_stride() const { return static_cast<int64_t>(layout.recurrent_bytes() / sizeof(float)); }
  DeviceTape tape_of(int il, int sequence) const {
    const SequenceLayout::Tape at = layout.tape(sequence, il);
    const auto floats = [&](size_t offset) { return reinterpret_cast<float*>(tape.data() + offset); };
    return {.conv_input = floats(at.conv_input),
            .k = floats(at.k),
            .decay = floats(at.g),
            .delta = floats(at.delta),
            .sequence_stride = static_cast<int64_t>(layout.tape_bytes() / sizeof(float))};
  }
  std::byte* pool_of(KvKind kind) const { return kv[static_cast<size_t>(kind)].data(); }
  DeviceKv kv_of(int il) const {
    const KvKind kind = layout.kv_kind(il);
    const SequenceLayout::Kv at = layout.kv(il, 0);
    const int64_t table = static_cast<int64_t>(kind) * options.n_sequences * layout.table_pages();
    return {.k_type = options.sequence.k_type,
            .v_type = options.sequence.v_type,
            .k = pool_of(kind) + at.k,
            .v = pool_of(kind) + at.v,
            .pages = tables.as<const int32_t>() + table,
            .page_bytes = static_cast<int64_t>(layout.page_bytes(kind)),
            .table_pages = layout.table_pages()};
  }
};

}  // namespace thermo
