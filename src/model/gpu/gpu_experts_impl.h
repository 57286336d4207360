// What split experts on a GPU have in addition to the core (experts/expert_core.h); shared by
// gpu_experts_load.cpp, gpu_experts.cpp (steps that are graphs) and gpu_experts_large.cpp (prompts).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/host_buffer.h"
#include "base/thread_pool.h"
#include "base/units.h"
#include "device/buffer.h"
#include "experts/cpu_lane.h"
#include "experts/expert_core.h"
#include "experts/trace.h"
#include "model/draft_uses.h"
#include "model/gpu/cuda_slots.h"
#include "model/gpu/gpu_experts.h"

namespace thermo {

inline constexpr int kMaxBatchExperts = 16;  // streamed together
inline constexpr int kBatches = 8;           // of lent memory: what is copied while others are computed
// From here on nearly every expert of a layer is chosen, and the processor computes none: the GPU's products
// are then of another form, and outputs must not depend on where an expert is.
inline constexpr int kStreamAllRows = kExpertSmallRows + 1;
inline constexpr int kMaxCpuPairs = 512;  // of a layer of a larger step

// Of a small model a small part is streamed at once.
int batch_experts_of(const ExpertCatalog& catalog);
// Device memory that prompts stream through; between prompts it holds experts.
uint64_t lent_bytes(const ExpertCatalog& catalog);

struct GpuExperts::Impl {
  ExpertCore core;
  const ExpertCatalog& catalog;
  const SplitOptions& options;
  HostTier& host;
  HeatMap& heat;
  DraftUses draft_uses;
  ExpertTelemetry& count;
  ThreadPool& pool;
  int n_layer, n_expert, n_used, n_embd, n_batch;
  int batch_experts;
  PageLock arena_lock;

  // Device memory that steps look at, and its source: the table, the places of parcels, then n_cold.
  PinnedBuffer control_host;
  DeviceBuffer control;
  DeviceBuffer host_table;  // where cold experts lie in host memory
  DeviceBuffer n_pairs;     // [n_layer], and `near` of each layer
  DeviceBuffer slots, lent;
  DeviceBuffer parcels, announced, came;  // places; [n_layer][kMaxParcels] each
  LinkLimit limit;
  CudaSlots device;
  CudaParcels link;

  PinnedBuffer mail_memory, x, y, records, chosen;
  std::unique_ptr<CpuLane> lane;
  uint32_t ticket = 0, last_posted = 0;

  // Larger steps.
  struct Batch {
    int layer = 0;
    int n = 0;
    int32_t experts[kMaxBatchExperts];
  };
  PinnedBuffer batch_tables_host;  // [batches of a step][n_expert]
  DeviceBuffer batch_tables;       // [kBatches][n_expert]
  std::vector<Batch> batches;
  std::vector<size_t> layer_first_batch;  // of a step that streams everything
  size_t n_issued = 0;                    // batches whose copies are queued
  Event copied[kBatches], consumed[kBatches], decided;
  std::vector<Event> wanted, arrived;  // by batch: the device came to it, its copies had ended
  PinnedBuffer counts;                 // [n_layer][n_expert + 1] first pair of each expert
  PinnedBuffer large_x;                // [kStreamAllRows][n_embd]
  PinnedBuffer large_rows;             // pair -> row
  PinnedBuffer large_y;                // [kMaxCpuPairs][n_embd]
  std::unique_ptr<CpuLane> large_lane;
  HostBuffer gathered;  // [kMaxCpuPairs][n_embd]
  std::vector<ColdPair> large_pairs;
  PinnedBuffer large_drafted;      // DraftedExperts of one sequence
  std::vector<int32_t> n_drafted;  // [n_layer][n_expert] uses by uncommitted rows

  const char* fault = nullptr;
  std::string file_fault;             // what `fault` points to when the file could not be read
  std::vector<int64_t> answer_begin;  // of each layer in this step; 0: none

  Impl(const ExpertCatalog& experts, const ModelConfig& config, const Weights& weights,
       const ModelOptions& options, ThreadPool& pool, const LoadProgressFn& progress);
  ~Impl();

  size_t table_bytes() const {
    return static_cast<size_t>(n_layer) * static_cast<size_t>(n_expert) * sizeof(const uint8_t*);
  }
  size_t n_cold_at() const {
    return table_bytes() + Courier::place_sizes(catalog).size() * sizeof(const uint8_t*);
  }
  size_t n_words() const { return static_cast<size_t>(n_layer * kMaxParcels); }
  size_t chosen_of_layer() const { return static_cast<size_t>(kMaxMailRows) * static_cast<size_t>(n_used); }
  ColdMail& mail() const { return *mail_memory.as<ColdMail>(); }

  // Kernels that read host memory do so at the link's own speed, so a limit takes this from them.
  bool can_read_host() const { return arena_lock.locked() && host.complete() && options.link_limit == 0; }

  void take_mail();
  void take_large_step(Isa isa);
  void attach(const ModelConfig& config, const Weights& weights, const LoadProgressFn& progress);
  void upload_host_table();
  void upload_control(StreamView stream) noexcept;
  void check_file() noexcept;
  void answer(uint32_t posted, int n_rows, int n_valid) noexcept;
  void trace_step() noexcept;
  void count_uses(int il, const int16_t* ids, std::span<const SequenceRows> groups) noexcept;
  // How many uncommitted rows there are; counts what they chose and keeps it for commit().
  int take_drafted(std::span<const SequenceRows> groups, const DraftedExperts& drafted,
                   StreamView stream) noexcept;
  void stream_all() noexcept;
  void add_batches(int layer, const int32_t* experts, int n) noexcept;
  void issue(size_t end) noexcept;
  void compute_batches(size_t begin, size_t end, const DeviceExpertArgs& args, StreamView stream) noexcept;
  void compute_few(int layer, const int32_t* first, const DeviceExpertArgs& args, StreamView stream) noexcept;
};

}  // namespace thermo
