// How a model's experts are spread over the tiers; decided by the engine from the memory plan.
#pragma once

#include <cstdint>
#include <vector>

namespace thermo {

class HeatMap;
class MappedFile;
class TraceWriter;

struct SplitOptions {
  bool split = false;         // false: every expert is where it is computed
  uint64_t budget_bytes = 0;  // device memory for hot experts
  uint64_t host_bytes = 0;    // main memory for experts; 0: all of them
  int pin_layers = 0;
  bool swaps = true;
  bool fetch = true;              // the fetch lane; without it every cold expert is computed by the processor
  bool cpu = true;                // the cpu lane; without it every cold expert is fetched
  uint64_t link_limit = 0;        // bytes a second to the device, to measure slower links; 0: what it can
  bool read_ahead = true;         // guess the next layer's cold experts and read them early
  const HeatMap* heat = nullptr;  // to place by; it is copied
  TraceWriter* trace = nullptr;   // must outlive the model, as must the files
  std::vector<const MappedFile*> files = {};  // that the experts are in; see HostTierOptions
};

}  // namespace thermo
