// Every byte the engine will take, computed before any of it is taken. Pure: configuration in, numbers out.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/model_config.h"
#include "model/sequence_layout.h"

namespace thermo {

class GgufFile;

struct MemoryPlanInputs {
  int n_ctx = 0;  // 0: choose
  int n_sequences = 1;
  int max_draft_rows = 0;
  int n_batch = 512;
  int min_ctx = 8192;                           // a context that nobody asked for is not made shorter
  uint64_t device_reserve = uint64_t{1} << 30;  // left free on a device, for its driver and other programs
  int n_pages = 0;                              // of keys and values, for all sequences together; 0: choose
  int n_threads = 1;
  bool repack = true;
  KvType k_type = KvType::F16;
  KvType v_type = KvType::F16;
  uint64_t available_bytes = 0;  // memory that may be taken
  uint64_t cache_bytes = 0;      // of it, for a prefix cache
  // Of a drafter: its weights and scratch, its cache or index for each token of a sequence, the states that
  // wait for it, for each sequence, and its uncommitted rows.
  uint64_t drafter_bytes = 0, drafter_token_bytes = 0, drafter_sequence_bytes = 0;
  int drafter_block = 0;

  // Routed experts; see experts/host_tier.h.
  std::optional<uint64_t> expert_ram;      // main memory for them; nullopt: what fits
  std::optional<uint64_t> stand_in_bytes;  // with the stand-in: its "device memory" for experts
  uint64_t ahead_bytes = 0;                // with the stand-in: to guess experts and send them ahead
};

inline constexpr const char* kDrafterItem = "drafter";
struct MemoryPlanItem {
  std::string name;  // "experts", "dense weights", "kv cache", ...
  uint64_t bytes = 0;
  std::string detail;  // "131072 tokens x 1, f16"
  bool later = false;  // not taken at load, or not by this program
};

struct MemoryPlan {
  int n_ctx = 0;
  int n_pages = 0;                    // of keys and values (kKvPage tokens each), for all sequences together
  int n_checkpoints = 0;              // that a session may keep
  int n_batch = 0;                    // most rows of a step
  std::vector<MemoryPlanItem> items;  // taken from main memory
  uint64_t mapped_bytes = 0;          // read through the file mapping; the system may drop and re-read it
  uint64_t total_bytes = 0;           // of the items
  uint64_t available_bytes = 0;
  uint64_t expert_bytes = 0;       // of all routed experts, packed
  uint64_t host_expert_bytes = 0;  // main memory for them; less than all: the rest stays in the file
  // A dense model that is larger than the device: each FFN is cut into so many parts (model/dense_parts.h),
  // which then are the experts. 0: it is not cut.
  int ffn_parts = 0;

  // On a GPU; empty when the processor does everything.
  std::string device_name;
  std::vector<MemoryPlanItem> device_items;
  uint64_t device_total_bytes = 0;
  uint64_t device_available_bytes = 0;
  std::string note;  // what is not as it was asked for or could be, for people; may be empty

  bool experts_in_file() const { return host_expert_bytes < expert_bytes; }
  bool fits() const { return total_bytes <= available_bytes && device_total_bytes <= device_available_bytes; }
};

inline constexpr uint64_t kProgramBytes = uint64_t{64} << 20;  // code, stacks, vocabulary, small vectors
// What is taken at load, of the items of one side.
uint64_t planned_at_load(const std::vector<MemoryPlanItem>& items);
// What to say where that is more than 5 percent, and more than 64 MiB, away from what was taken; else empty.
std::string plan_mistake(uint64_t planned, uint64_t taken);

// What to say of a pool of keys and values, on either side.
std::string kv_item_detail(KvKind kind, const SequenceConfig& sequence, int n_sequences);

// In main memory: everything where it fits, else the core weights and as many experts as there is room for.
// An automatic context is halved until it fits, but not below kRoomyContext to keep all experts in memory.
// Sequences share their pages of keys and values. Where all contexts together do not fit, there are fewer
// pages: enough for one whole context, and with an automatic context for kRoomyContext tokens of the others.
// Throws MemoryError when even the smallest context and the fewest experts do not fit, naming what would.
inline constexpr int kRoomyContext = 4096;
MemoryPlan plan_memory(const ModelConfig& config, const GgufFile& file, const MemoryPlanInputs& inputs);

// The same with keys and values as q8_0; nullopt: that is no less, or the model cannot have it. It is offered
// where a context that was asked for does not fit otherwise, and never chosen: another text is not what was
// asked for.
std::optional<MemoryPlanInputs> with_q8_cache(const ModelConfig& config, const MemoryPlanInputs& inputs);

// Adds checkpoints of `bytes` each to a plan: for every session as many as there is main memory for, at most
// kMaxCheckpoints.
inline constexpr int kMaxCheckpoints = 8;
void plan_checkpoints(MemoryPlan& plan, int n_sequences, uint64_t bytes);

// With everything on a GPU that has `free_bytes`. Given the device's items for a context and a number of
// pages, halves an automatic context until they fit, with fewer pages where it must be; the result does not
// fit() when none does. `few_pages`: more than the fewest only where that is little of the memory.
using DeviceItemsFn = std::function<std::vector<MemoryPlanItem>(int n_ctx, int n_pages)>;
MemoryPlan plan_device_memory(const ModelConfig& config, const MemoryPlanInputs& inputs,
                              const std::string& device_name, uint64_t free_bytes, const DeviceItemsFn& items,
                              bool few_pages = false);

}  // namespace thermo
