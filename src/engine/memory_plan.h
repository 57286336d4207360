// Every byte the engine will take, computed before any of it is taken. Pure: configuration in, numbers out.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "model/model_config.h"
#include "model/sequence_state.h"

namespace thermo {

class GgufFile;

struct MemoryPlanInputs {
  int n_ctx = 0;  // 0: choose
  int n_sequences = 1;
  int max_draft_rows = 0;
  int n_batch = 512;
  int n_threads = 1;
  bool repack = true;
  KvType k_type = KvType::F16;
  KvType v_type = KvType::F16;
  uint64_t available_bytes = 0;  // memory that may be taken
};

struct MemoryPlanItem {
  std::string name;  // "experts", "dense weights", "kv cache", ...
  uint64_t bytes = 0;
  std::string detail;  // "131072 tokens x 1, f16"
};

struct MemoryPlan {
  int n_ctx = 0;
  std::vector<MemoryPlanItem> items;  // taken from main memory
  uint64_t mapped_bytes = 0;          // read through the file mapping; the system may drop and re-read it
  uint64_t total_bytes = 0;           // of the items
  uint64_t available_bytes = 0;

  // On a GPU; empty when the processor does everything.
  std::string device_name;
  std::vector<MemoryPlanItem> device_items;
  uint64_t device_total_bytes = 0;
  uint64_t device_available_bytes = 0;
  std::string note;  // why the processor does everything although a GPU might have been used; may be empty

  bool fits() const { return total_bytes <= available_bytes && device_total_bytes <= device_available_bytes; }
};

// With everything in main memory. Throws MemoryError when even the smallest context does not fit, naming what
// would.
MemoryPlan plan_memory(const ModelConfig& config, const GgufFile& file, const MemoryPlanInputs& inputs);

// With everything on a GPU that has `free_bytes`. Given the device's items for a context, halves an automatic
// context until they fit; the result does not fit() when none does.
using DeviceItemsFn = std::function<std::vector<MemoryPlanItem>(int n_ctx)>;
MemoryPlan plan_device_memory(const ModelConfig& config, const MemoryPlanInputs& inputs,
                              const std::string& device_name, uint64_t free_bytes,
                              const DeviceItemsFn& items);

}  // namespace thermo
