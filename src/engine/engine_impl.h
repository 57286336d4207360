// The inside of an engine; shared by engine.cpp (steps, sessions), engine_load.cpp (loading, heat, trace) and
// engine_warm_up.cpp.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "engine/engine.h"
#include "engine/memory_plan.h"
#include "engine/speculation.h"
#include "engine/step_watch.h"
#include "experts/heat.h"
#include "experts/heat_file.h"
#include "experts/trace.h"
#include "model/backend.h"

namespace thermo {

class Weights;

struct Engine::Impl {
  // Rows of the embedding, and more without repacking, are looked up in it.
  const GgufFile* model_file = nullptr;
  DraftOptions draft;
  EngineInfo info;
  MemoryPlan plan;
  int n_batch = 0;
  int n_sequences = 1;
  ThreadPool pool;
  int max_draft_rows = 0;
  std::unique_ptr<TraceWriter> trace;  // the backend adds to it
  std::optional<StepWatch> watch;      // with a trace
  std::unique_ptr<Backend> backend;
  std::unique_ptr<Speculation> speculation;  // nullptr: nothing is drafted
  std::unique_ptr<Speculation> paused;       // the same while sessions do not draft
  std::vector<bool> taken;                   // sequences that a Session holds
  // Of each sequence: the parents of its uncommitted rows, empty when it has none.
  std::vector<std::vector<int32_t>> uncommitted;
  ExpertTelemetry warm_up_telemetry;  // what of the backend's is not told
  std::vector<LayerUses> warm_up_uses;
  std::vector<Session::Impl*> unread;  // sessions whose logits are still on the device

  // What was read of the heat file, and where heat goes at the end; empty: nowhere.
  std::string heat_path;
  HeatFileInfo heat_info;
  HeatBase heat_base;
  std::optional<HeatMap> first_heat;  // right after loading; nullopt: nobody counts

  explicit Impl(const ThreadPoolOptions& threads) : pool(threads) {}

  void check_plan() const;
  void open_trace(const std::string& path, const GgufFile& file);
  std::optional<HeatMap> read_heat(const std::string& path, const ModelConfig& config, const Weights& weights,
                                   const GgufFile& file);
  void write_heat() noexcept;
  std::string heat_path_of(const std::string& name) const {
    return name.empty() ? heat_path
                        : std::filesystem::path(heat_path).replace_filename(name + ".json").string();
  }
  // What the backend counted so far was for nobody.
  void take_warm_up_counts() {
    warm_up_telemetry = backend->expert_telemetry();
    const std::span<const LayerUses> uses = backend->layer_uses();
    warm_up_uses.assign(uses.begin(), uses.end());
  }

  Status check(const StepBatch& batch) const;
  Status check_group(const SequenceRows& group) const;
  void save_unread_logits(const StepBatch& batch);
};

}  // namespace thermo
