// Loads a model as it was planned, and keeps its heat file and trace.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <new>

#include "base/cpu_info.h"
#include "base/error.h"
#include "base/host_buffer.h"
#include "base/log.h"
#include "base/process_watch.h"
#include "base/units.h"
#include "engine/cpu_backend.h"
#include "engine/engine_impl.h"
#include "engine/engine_plan.h"
#include "engine/gpu_backend.h"
#include "engine/memory_plan.h"
#include "gguf/gguf_file.h"
#include "model/check_tensors.h"
#include "model/dense_parts.h"
#include "model/model.h"
#include "model/weights.h"

namespace thermo {
namespace {

Isa choose_isa(const std::optional<Isa>& wanted) {
  if (!wanted) return best_isa();
  if (!isa_available(*wanted))
    throw ConfigError(fmt::format("{} is not available on this CPU ({}); the best here is {}",
                                  isa_name(*wanted), cpu_info().name, isa_name(best_isa())));
  return *wanted;
}

// Address space that a drafter nobody asked for by name leaves to the stacks of threads that start later.
constexpr size_t kRoomForThreads = 32 * MiB;

// Whether the system refused memory, or the address space for it.
bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const MemoryError*>(&error) != nullptr ||
         dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
}

// GPU memory that was free when the plan was made was not any more: another program took it.
class GpuMemoryLost : public MemoryError {
 public:
  using MemoryError::MemoryError;
};

}  // namespace

Engine::Engine(const GgufFile& file, const EngineOptions& options) {
  check_options(options);
  EngineOptions now = options;
  for (int tries = 1;; ++tries) {
    try {
      load(file, now);
      return;
    } catch (const GpuMemoryLost& error) {
      // Plan again with what is free now; after that without the GPU, where that was left to us.
      impl_.reset();
      if (tries > 2 || (tries == 2 && options.device.kind != DeviceChoice::Kind::Auto)) throw;
      if (tries == 2) now.device.kind = DeviceChoice::Kind::Cpu;
      log_warning("engine", "{}; another program may have taken it: {}", error.what(),
                  tries == 1 ? "planning again with what is free now" : "the CPU does everything");
    }
  }
}

void Engine::load(const GgufFile& file, const EngineOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  // What the caller has is not in this plan: texts, recorded outputs, another engine. Its vocabulary is.
  const uint64_t before = private_bytes().value_or(0), of_caller = before - std::min(before, kProgramBytes);
  ModelConfig config = describe_model(file, options);
  EnginePlan plan = plan_engine(config, file, options);
  insert_taps(config.network, config.n_layer, plan.draft.states);
  if (plan.memory.ffn_parts > 0) cut_dense(config, plan.memory.ffn_parts);
  ModelOptions& model = plan.model;
  // Threads that spin between regions keep the readers of the file and the lane of the stand-in off the
  // cores.
  const bool shares_cores = model.stand_in || (!plan.gpu && model.experts.host_bytes > 0);
  impl_ = std::make_unique<Impl>(
      ThreadPoolOptions{.n_threads = options.n_threads,
                        .pin = options.pin_threads,
                        .spread = options.spread_threads,
                        .spin_us = options.spin_us.value_or(shares_cores ? 200u : 50'000u)});
  Impl& e = *impl_;
  e.open_trace(options.trace_file, file);
  model.experts.trace = e.trace.get();
  for (int i = 0; i < file.n_parts(); ++i)
    if (file.part(i)) model.experts.files.push_back(file.part(i));
  model.isa = choose_isa(options.isa);

  if (options.check_tensors) check_tensors(file, e.pool, options.progress);
  // On a GPU the weights stay views of the file until they are uploaded.
  Weights weights = Weights::load(config, file, options.repack && !plan.gpu, e.pool, options.progress,
                                  keeps_experts(model));
  e.info = {.device = plan.gpu         ? plan.gpu->name
                      : model.stand_in ? "sim"
                                       : "cpu",
            .bus_id = plan.gpu ? plan.gpu->bus_id : "",
            .isa = model.isa,
            .n_threads = e.pool.size(),
            .repacked = options.repack || plan.gpu,
            .n_params = weights.n_params,
            .file_bytes = file.total_tensor_bytes(),
            .bytes_per_token = weights.bytes_per_token,
            .load_seconds = 0.0,
            .k_type = model.sequence.k_type,
            .v_type = model.sequence.v_type};
  e.plan = std::move(plan.memory);
  e.draft = options.draft;
  e.n_batch = model.n_batch;
  e.n_sequences = model.n_sequences;
  e.max_draft_rows = model.sequence.max_draft_rows;
  const auto n_sequences = static_cast<size_t>(model.n_sequences);
  e.taken.assign(n_sequences, false);
  e.uncommitted.resize(n_sequences);
  for (auto& parents : e.uncommitted) parents.reserve(static_cast<size_t>(e.max_draft_rows));
  e.unread.reserve(n_sequences);
  std::optional<HeatMap> heat;
  if (!options.heat_file.empty()) {
    heat = e.read_heat(options.heat_file, config, weights, file);
    if (heat) model.experts.heat = &*heat;
  }
  // Matrices of a drafter are shared with `weights`, wherever those are then.
  const auto draft = [&](const Weights& target) {
    if (plan.draft.kind == DraftOptions::Kind::None) return;
    e.speculation = std::make_unique<Speculation>(
        make_drafter(plan.draft, options.draft, *e.backend, target, model, e.pool), *e.backend,
        SpeculationOptions{.budget = options.draft.budget,
                           .max_depth = options.draft.max_depth,
                           .min_depth = options.draft.min_depth,
                           .min_probability = options.draft.min_probability,
                           .max_candidates = options.draft.max_candidates,
                           .cautious = options.draft.kind == DraftOptions::Kind::Auto,
                           .trace = e.trace.get(),
                           .n_sequences = model.n_sequences,
                           .max_rows = std::min(plan.draft.max_rows, model.n_batch),
                           .max_uncommitted = e.max_draft_rows});
  };
  const uint64_t free_before = plan.gpu ? gpu_free_bytes(plan.gpu->index) : 0;
  if (plan.gpu) {
    try {
      e.backend = make_gpu_backend(std::move(config), weights, model, e.pool, options.progress);
      draft(weights);
    } catch (const MemoryError& error) {
      throw GpuMemoryLost(error.what());
    }
  } else {
    e.backend = make_cpu_backend(std::move(config), std::move(weights), model, e.pool, options.progress);
    try {
      HostBuffer room;
      if (options.draft.kind == DraftOptions::Kind::Auto) room = HostBuffer(kRoomForThreads);
      draft(static_cast<const Model&>(*e.backend).weights());
      // Steps for nobody only where they read nothing from the file.
      if (e.speculation && !options.draft.oracle) e.speculation->warm_up(options.repack && !shares_cores);
    } catch (const std::exception& error) {  // one that was not asked for by name is left out
      if (options.draft.kind != DraftOptions::Kind::Auto || !is_out_of_memory(error)) throw;
      log_warning("engine", "nothing is drafted, there is no memory for it: {}", error.what());
      e.speculation.reset();
      std::erase_if(e.plan.items, [&](const MemoryPlanItem& item) {
        const bool is_its = item.name == kDrafterItem;
        if (is_its) e.plan.total_bytes -= item.bytes;
        return is_its;
      });
    }
    e.take_warm_up_counts();
  }
  if (e.backend->heat() != nullptr) e.first_heat = *e.backend->heat();
  if (plan.gpu) {
    const uint64_t free_now = gpu_free_bytes(plan.gpu->index);
    e.info.device_taken_bytes = free_before - std::min(free_before, free_now);
  } else {
    const uint64_t untouched =
        Model::untouched_bytes(e.backend->config(), model) + (e.speculation ? plan.draft.untouched_bytes : 0);
    if (const std::optional<uint64_t> bytes = private_bytes())  // beside a driver nobody knows whose it is
      e.info.host_taken_bytes = *bytes - std::min(*bytes, untouched + of_caller);
  }
  e.check_plan();
  e.model_file = &file;
  if (const std::string fault = file.fault(); !fault.empty()) throw LoadError(fault);
  e.info.load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  log_info("engine", "loaded {} on {} in {:.2f} s: {} threads, {}, context {}", file.path(), e.info.device,
           e.info.load_seconds, e.info.n_threads, isa_name(e.info.isa), e.plan.n_ctx);
}

// What is planned wrongly runs out later, or is missing elsewhere.
void Engine::Impl::check_plan() const {
  const auto check = [](const char* where, const std::vector<MemoryPlanItem>& items,
                        const std::optional<uint64_t>& real) {
    const std::string mistake = real ? plan_mistake(planned_at_load(items), *real) : "";
    if (!mistake.empty())
      log_warning("engine",
                  "the memory plan was wrong: of {}, {}; other programs may have taken or freed some", where,
                  mistake);
  };
  check("main memory", plan.items, info.host_taken_bytes);
  check("GPU memory", plan.device_items, info.device_taken_bytes);
}

void Engine::Impl::open_trace(const std::string& path, const GgufFile& file) {
  if (path.empty()) return;
  auto writer = TraceWriter::open(path, file.path());
  if (!writer) throw ConfigError("the trace: " + writer.error().message);
  trace = std::move(*writer);
  watch.emplace(pool);
}

// The heat to start from; nullopt: a model without experts. A file of another model is not overwritten.
std::optional<HeatMap> Engine::Impl::read_heat(const std::string& path, const ModelConfig& config,
                                               const Weights& weights, const GgufFile& file) {
  const ExpertCatalog catalog = expert_catalog(config, weights);
  if (!config.is_moe()) {
    log_warning("engine", "{} is not used: this model has no experts", path);
    return std::nullopt;
  }
  heat_info = HeatFileInfo::of(catalog, config.arch_name,
                               std::string(file.find_string("general.name").value_or(file.path())));
  HeatMap heat(catalog);
  std::error_code error;
  if (std::filesystem::exists(path, error)) {
    if (const Status status = thermo::load_heat(path, heat_info, heat); !status) {
      log_warning("engine", "{}; it is left as it is, and every expert counts the same",
                  status.error().message);
      return heat;
    }
    log_info("engine", "heat of {} tokens from {}", heat.n_tokens(), path);
  }
  heat_path = path;
  heat_base = {.ours = heat, .file = heat};
  return heat;
}

void Engine::Impl::write_heat() noexcept {
  if (heat_path.empty() || !backend || !backend->heat()) return;
  if (const Status status = add_heat(heat_path, heat_info, *backend->heat(), heat_base); !status)
    log_warning("engine", "{}", status.error().message);
}

}  // namespace thermo
