#include "engine/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>

#include "base/cpu_info.h"
#include "base/error.h"
#include "base/log.h"
#include "base/units.h"
#include "engine/backend.h"
#include "engine/cpu_backend.h"
#include "engine/gpu_backend.h"
#include "engine/session.h"
#include "engine/step_watch.h"
#include "experts/budget.h"
#include "experts/courier.h"
#include "experts/forecast.h"
#include "experts/heat_file.h"
#include "experts/host_tier.h"
#include "experts/placement.h"
#include "experts/split_options.h"
#include "experts/trace.h"
#include "gguf/gguf_file.h"
#include "model/model.h"

namespace thermo {

struct Engine::Impl {
  // Rows of the embedding, and more without repacking, are looked up in it.
  const GgufFile* model_file = nullptr;
  EngineInfo info;
  MemoryPlan plan;
  int n_batch = 0;
  int n_sequences = 1;
  ThreadPool pool;
  int max_draft_rows = 0;
  std::unique_ptr<TraceWriter> trace;  // the backend adds to it
  std::optional<StepWatch> watch;      // with a trace
  std::unique_ptr<Backend> backend;
  std::vector<bool> taken;  // sequences that a Session holds
  // Of each sequence: the parents of its uncommitted rows, empty when it has none.
  std::vector<std::vector<int32_t>> uncommitted;
  std::vector<Session::Impl*> unread;  // sessions whose logits are still on the device

  // What was read of the heat file, and where heat goes at the end; empty: nowhere.
  std::string heat_path;
  HeatFileInfo heat_info;

  explicit Impl(const ThreadPoolOptions& threads) : pool(threads) {}

  void open_trace(const std::string& path, const GgufFile& file);
  std::optional<HeatMap> read_heat(const std::string& path, const ModelConfig& config, const Weights& weights,
                                   const GgufFile& file);
  void write_heat() noexcept;

  Status check(const StepBatch& batch) const;
  Status check_group(const SequenceRows& group) const;
  void save_unread_logits(const StepBatch& batch);
};

namespace {

Isa choose_isa(const std::optional<Isa>& wanted) {
  if (!wanted) return best_isa();
  if (!isa_available(*wanted))
    throw ConfigError(fmt::format("--isa {}: this processor ({}) does not have it; the best here is {}",
                                  isa_name(*wanted), cpu_info().name, isa_name(best_isa())));
  return *wanted;
}

void check_options(const EngineOptions& o) {
  const auto range = [](const char* name, int value, int low, int high) {
    if (value < low || value > high)
      throw ConfigError(fmt::format("{} is {}, expected {} to {}", name, value, low, high));
  };
  range("--ctx-size", o.n_ctx, 0, 1 << 24);
  range("--parallel", o.n_sequences, 1, 256);
  range("--threads", o.n_threads, 0, 1024);
  range("--ubatch-size", o.n_batch, 0, 16384);
  range("draft rows", o.max_draft_rows, 0, kDeltaChunk);
  range("--pin-layers", o.pin_layers, 0, 1 << 16);
}

// Where a model runs and what it takes there.
struct Place {
  std::optional<GpuChoice> gpu;  // nullopt: the processor
  bool stand_in = false;         // the processor, and a stand-in for a GPU
  MemoryPlan plan;
  int n_batch = 0;
  SequenceConfig sequence;
  SplitOptions experts;
};

constexpr int kBatchCpu = 512, kBatchGpu = 2048;

struct ExpertBudgets {
  ExpertBudget cache, ram;
};
ExpertBudgets read_budgets(const EngineOptions& o) {
  const Result<ExpertBudget> cache = parse_expert_budget(o.expert_cache),
                             ram = parse_expert_budget(o.expert_ram);
  if (!cache)
    throw ConfigError(fmt::format("--expert-cache '{}': {}", o.expert_cache, cache.error().message));
  if (!ram) throw ConfigError(fmt::format("--expert-ram '{}': {}", o.expert_ram, ram.error().message));
  return {*cache, *ram};
}

void append_note(std::string& note, const std::string& more) {
  if (!note.empty() && !more.empty()) note += "; ";
  note += more;
}

// What to know about a device budget that holds fewer experts of a layer than a step and the one after it
// choose; empty: nothing.
std::string floor_note(const ExpertCatalog& catalog, const SplitOptions& experts) {
  if (!experts.split || experts.budget_bytes == 0) return "";  // none is what was asked for
  const thermo::Placement placement = place_experts({.catalog = &catalog,
                                                     .heat = nullptr,
                                                     .budget_bytes = experts.budget_bytes,
                                                     .floor = 0,
                                                     .pin_layers = experts.pin_layers});
  const int wanted = 2 * catalog.n_active;
  if (placement.floor >= wanted) return "";
  return fmt::format(
      "{} for experts hold {} of each layer, {} or more keep a layer on the device; the processor computes "
      "most of them",
      format_bytes(experts.budget_bytes), placement.floor, wanted);
}

// With everything in GPU memory where it fits, else with the experts split: as many hot as there is room for,
// or as was asked for.
void plan_on_gpu(Place& place, const ModelConfig& config, const Weights& weights,
                 const MemoryPlanInputs& inputs, const EngineOptions& o) {
  const ExpertCatalog catalog = expert_catalog(config, weights);
  const uint64_t total = catalog.total_bytes();
  const auto [cache, ram] = read_budgets(o);
  const auto items = [&](int n_ctx) {
    place.sequence.n_ctx = n_ctx;
    return plan_gpu_memory(config, weights, *place.gpu,
                           {.n_batch = place.n_batch,
                            .n_sequences = o.n_sequences,
                            .sequence = place.sequence,
                            .experts = place.experts});
  };
  const auto plan = [&] {
    place.plan = plan_device_memory(config, inputs, place.gpu->name, place.gpu->free_bytes, items);
  };
  const bool asked = !cache.is_auto();
  if (total == 0 || !asked || cache.resolve(total, total) >= total) {
    plan();
    if (place.plan.fits() || total == 0 || asked) return;
  }
  place.experts.split = true;
  place.experts.pin_layers = o.pin_layers;
  place.experts.swaps = o.expert_swaps;
  place.experts.budget_bytes = asked ? cache.resolve(total, 0) : 0;
  plan();
  if (!asked && place.plan.fits()) {
    place.experts.budget_bytes =
        std::min(total, place.plan.device_available_bytes - place.plan.device_total_bytes);
    plan();
  }
  // In main memory: all of them, or what there is room for.
  const uint64_t room = inputs.available_bytes - std::min(inputs.available_bytes, place.plan.total_bytes);
  const uint64_t host =
      std::min(std::max(ram.resolve(total, total), HostTier::min_bytes(catalog)), room - room / 16);
  place.experts.host_bytes = host >= total ? 0 : host;
  place.plan.items.push_back({"experts", std::min(host, total),
                              host >= total
                                  ? "all of them, page-locked"
                                  : fmt::format("of {}, the rest in the file", format_bytes(total))});
  const uint64_t routers = host >= total ? 2 * ExpertForecast::planned_bytes(catalog) : 0;
  if (routers > 0)
    place.plan.items.push_back({"working ahead", routers, "routers in four bits, to guess experts early"});
  place.plan.total_bytes += std::min(host, total) + routers;
  append_note(place.plan.note, floor_note(catalog, place.experts));
}

// On the processor, with or without the stand-in device.
void plan_on_cpu(Place& place, const ModelConfig& config, const GgufFile& file, MemoryPlanInputs& inputs,
                 const EngineOptions& o) {
  place.n_batch = inputs.n_batch = o.n_batch > 0 ? o.n_batch : kBatchCpu;
  const auto [cache, ram] = read_budgets(o);
  const ExpertCatalog catalog = expert_catalog(config, Weights::bind(config, file));
  const uint64_t total = catalog.total_bytes();
  if (place.stand_in && (total == 0 || !o.repack)) {
    place.stand_in = false;
    append_note(place.plan.note, total == 0 ? "this model has no experts to split; the CPU does everything"
                                            : "--device sim needs repacked weights; the CPU does everything");
  }
  std::string note = place.plan.note;
  if (!ram.is_auto()) inputs.expert_ram = ram.resolve(total, total);
  if (place.stand_in) {
    place.experts.split = true;
    place.experts.budget_bytes = cache.resolve(total, total);
    inputs.stand_in_bytes = place.experts.budget_bytes;
    inputs.ahead_bytes = 2 * ExpertForecast::planned_bytes(catalog) + Courier::places_bytes(catalog);
  }
  place.experts.pin_layers = o.pin_layers;
  place.experts.swaps = o.expert_swaps;
  place.plan = plan_memory(config, file, inputs);
  if (place.plan.experts_in_file()) place.experts.host_bytes = place.plan.host_expert_bytes;
  append_note(note, place.plan.note);
  append_note(note, floor_note(catalog, place.experts));
  place.plan.note = note;
}

Place choose_place(const ModelConfig& config, const GgufFile& file, const EngineOptions& o) {
  Place place;
  place.sequence = {.n_ctx = o.n_ctx,
                    .max_draft_rows = o.max_draft_rows,
                    .k_type = o.k_type.value_or(KvType::F16),
                    .v_type = o.v_type.value_or(KvType::F16)};
  for (const KvType type : {place.sequence.k_type, place.sequence.v_type})
    if (type == KvType::Q8_0 && config.head_dim % 32 != 0)
      throw ConfigError(fmt::format(
          "a q8_0 cache needs heads of a multiple of 32, this model has {}; use f16", config.head_dim));
  MemoryPlanInputs inputs;
  inputs.n_ctx = o.n_ctx;
  inputs.n_sequences = o.n_sequences;
  inputs.max_draft_rows = o.max_draft_rows;
  inputs.n_threads = o.n_threads > 0 ? o.n_threads : cpu_info().n_cores;
  inputs.repack = o.repack;
  inputs.k_type = place.sequence.k_type;
  inputs.v_type = place.sequence.v_type;
  inputs.available_bytes = available_memory_bytes();

  if (o.pin_layers > config.n_layer)
    throw ConfigError(fmt::format("--pin-layers {}: this model has {} layers", o.pin_layers, config.n_layer));

  std::string note;
  place.stand_in = o.device == "sim";
  if (!place.stand_in) place.gpu = choose_gpu(o.device, note);
  if (place.gpu) {
    place.n_batch = o.n_batch > 0 ? o.n_batch : kBatchGpu;
    plan_on_gpu(place, config, Weights::bind(config, file), inputs, o);
    if (!place.plan.fits()) {
      const std::string shortage =
          fmt::format("{} needs {} of GPU memory with a context of {}, but {} has {} free", file.path(),
                      format_bytes(place.plan.device_total_bytes), place.plan.n_ctx, place.gpu->name,
                      format_bytes(place.gpu->free_bytes));
      if (o.device != "auto")
        throw MemoryError(shortage + "; use --device cpu, a smaller --ctx-size or a smaller quantisation");
      note = shortage + "; the CPU does everything";
      place.gpu.reset();
    }
  }
  if (!place.gpu) {
    place.plan.note.clear();
    place.experts = {};
    plan_on_cpu(place, config, file, inputs, o);
  }
  append_note(note, place.plan.note);
  place.plan.note = note;
  place.sequence.n_ctx = place.plan.n_ctx;
  return place;
}

Error invalid(std::string message) {
  return {ErrorCode::InvalidArgument, std::move(message)};
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
      if (tries > 2 || (tries == 2 && options.device != "auto")) throw;
      if (tries == 2) now.device = "cpu";
      log_warning("engine", "{}; another program may have taken it: {}", error.what(),
                  tries == 1 ? "planning again with what is free now" : "the CPU does everything");
    }
  }
}

void Engine::load(const GgufFile& file, const EngineOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  ModelConfig config = read_model_config(file);
  Place place = choose_place(config, file, options);
  // Threads that spin between regions keep the readers of the file and the lane of the stand-in off the
  // cores.
  const bool shares_cores = place.stand_in || (!place.gpu && place.experts.host_bytes > 0);
  impl_ = std::make_unique<Impl>(ThreadPoolOptions{
      .n_threads = options.n_threads, .pin = options.pin_threads, .spin_us = shares_cores ? 200u : 50'000u});
  Impl& e = *impl_;
  e.open_trace(options.trace_file, file);
  place.experts.trace = e.trace.get();
  for (int i = 0; i < file.n_parts(); ++i)
    if (file.part(i)) place.experts.files.push_back(file.part(i));
  const Isa isa = choose_isa(options.isa);
  const CpuBackendOptions cpu{.n_batch = place.n_batch,
                              .n_sequences = options.n_sequences,
                              .sequence = place.sequence,
                              .isa = isa,
                              .stand_in = place.stand_in,
                              .experts = place.experts};

  // On a GPU the weights stay views of the file until they are uploaded.
  Weights weights =
      Weights::load(config, file, options.repack && !place.gpu, e.pool, options.progress, keeps_experts(cpu));
  e.info = {.device = place.gpu        ? place.gpu->name
                      : place.stand_in ? "sim"
                                       : "cpu",
            .isa = isa,
            .n_threads = e.pool.size(),
            .repacked = options.repack || place.gpu,
            .n_params = weights.n_params,
            .file_bytes = file.total_tensor_bytes(),
            .bytes_per_token = weights.bytes_per_token,
            .load_seconds = 0.0,
            .k_type = place.sequence.k_type,
            .v_type = place.sequence.v_type};
  e.plan = std::move(place.plan);
  e.n_batch = place.n_batch;
  e.n_sequences = options.n_sequences;
  e.max_draft_rows = options.max_draft_rows;
  e.taken.assign(static_cast<size_t>(options.n_sequences), false);
  e.uncommitted.resize(static_cast<size_t>(options.n_sequences));
  for (auto& parents : e.uncommitted) parents.reserve(static_cast<size_t>(options.max_draft_rows));
  e.unread.reserve(static_cast<size_t>(options.n_sequences));
  std::optional<HeatMap> heat;
  if (!options.heat_file.empty()) {
    heat = e.read_heat(options.heat_file, config, weights, file);
    if (heat) place.experts.heat = &*heat;
  }
  if (place.gpu) {
    try {
      e.backend = make_gpu_backend(std::move(config), weights, *place.gpu,
                                   {.n_batch = place.n_batch,
                                    .n_sequences = options.n_sequences,
                                    .sequence = place.sequence,
                                    .experts = place.experts,
                                    .isa = e.info.isa},
                                   e.pool, options.progress);
    } catch (const MemoryError& error) {
      throw GpuMemoryLost(error.what());
    }
  } else {
    CpuBackendOptions with_heat = cpu;
    with_heat.experts.heat = place.experts.heat;
    e.backend = make_cpu_backend(std::move(config), std::move(weights), with_heat, e.pool, options.progress);
  }
  e.model_file = &file;
  if (const std::string fault = file.fault(); !fault.empty()) throw LoadError(fault);
  e.info.load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  log_info("engine", "loaded {} on {} in {:.2f} s: {} threads, {}, context {}", file.path(), e.info.device,
           e.info.load_seconds, e.info.n_threads, isa_name(e.info.isa), e.plan.n_ctx);
}

void Engine::Impl::open_trace(const std::string& path, const GgufFile& file) {
  if (path.empty()) return;
  auto writer = TraceWriter::open(path, file.path());
  if (!writer) throw ConfigError("--trace: " + writer.error().message);
  trace = std::move(*writer);
  watch.emplace(pool);
}

// The heat to start from; nullopt: a model without experts. A file of another model is not overwritten.
std::optional<HeatMap> Engine::Impl::read_heat(const std::string& path, const ModelConfig& config,
                                               const Weights& weights, const GgufFile& file) {
  const ExpertCatalog catalog = expert_catalog(config, weights);
  if (catalog.total_bytes() == 0) {
    log_warning("engine", "--heat-file {}: this model has no experts; the file is not used", path);
    return std::nullopt;
  }
  heat_info = HeatFileInfo::of(catalog, config.arch_name,
                               std::string(file.find_string("general.name").value_or(file.path())));
  HeatMap heat(catalog);
  std::error_code error;
  if (std::filesystem::exists(path, error)) {
    if (const Status status = load_heat(path, heat_info, heat); !status) {
      log_warning("engine", "{}; it is left as it is, and every expert counts the same",
                  status.error().message);
      return heat;
    }
    log_info("engine", "heat of {} tokens from {}", heat.n_tokens(), path);
  }
  heat_path = path;
  return heat;
}

void Engine::Impl::write_heat() noexcept {
  if (heat_path.empty() || !backend || !backend->heat()) return;
  if (const Status status = save_heat(heat_path, heat_info, *backend->heat()); !status)
    log_warning("engine", "{}", status.error().message);
}

MemoryPlan Engine::plan_for(const GgufFile& file, const EngineOptions& options) {
  check_options(options);
  return choose_place(read_model_config(file), file, options).plan;
}

Engine::~Engine() {
  if (impl_) impl_->write_heat();
}

const ModelConfig& Engine::config() const {
  return impl_->backend->config();
}
const EngineInfo& Engine::info() const {
  return impl_->info;
}
const MemoryPlan& Engine::plan() const {
  return impl_->plan;
}
int Engine::n_ctx() const {
  return impl_->plan.n_ctx;
}
int Engine::n_batch() const {
  return impl_->n_batch;
}
bool Engine::reset_experts() {
  return impl_->backend->reset_experts();
}

ExpertTelemetry Engine::expert_telemetry() const {
  return impl_->backend->expert_telemetry();
}
const HeatMap* Engine::heat() const {
  return impl_->backend->heat();
}

Status Engine::Impl::check(const StepBatch& batch) const {
  const int n_rows = batch.n_rows();
  if (n_rows == 0) return invalid("a step without rows");
  if (n_rows > n_batch) return invalid(fmt::format("a step of {} rows, at most {} fit", n_rows, n_batch));
  for (size_t g = 0; g < batch.groups.size(); ++g) {
    const SequenceRows& group = batch.groups[g];
    for (const SequenceRows& other : batch.groups.first(g))
      if (other.sequence == group.sequence)
        return invalid(fmt::format("sequence {} is in the step twice", group.sequence));
    if (Status status = check_group(group); !status) return status;
  }
  return {};
}

Status Engine::Impl::check_group(const SequenceRows& group) const {
  if (group.sequence < 0 || group.sequence >= n_sequences)
    return invalid(fmt::format("sequence {} is outside 0..{}", group.sequence, n_sequences - 1));
  if (!uncommitted[static_cast<size_t>(group.sequence)].empty())
    return invalid(fmt::format("sequence {} has uncommitted rows", group.sequence));
  const int n_past = backend->n_past(group.sequence), n = static_cast<int>(group.rows.size());
  if (n == 0) return invalid(fmt::format("sequence {} is in the step without rows", group.sequence));
  if (group.uncommitted && n > max_draft_rows)
    return invalid(fmt::format("{} uncommitted rows, at most {} were planned", n, max_draft_rows));
  if (n_past + n > plan.n_ctx)
    return Error{ErrorCode::ContextFull,
                 fmt::format("{} tokens and {} more do not fit into a context of {}; use a larger one",
                             n_past, n, plan.n_ctx)};
  for (int r = 0; r < n; ++r) {
    const Row& row = group.rows[static_cast<size_t>(r)];
    if (row.token < 0 || row.token >= backend->config().n_vocab)
      return invalid(
          fmt::format("token {} is outside the vocabulary of {}", row.token, backend->config().n_vocab));
    if (!group.uncommitted && row.parent != r - 1)
      return invalid(fmt::format("row {} has parent {}, expected {}: only uncommitted rows may branch", r,
                                 row.parent, r - 1));
    if (row.parent < -1 || row.parent >= r)
      return invalid(fmt::format("row {} has parent {}, expected -1 or an earlier row", r, row.parent));
  }
  return {};
}

Result<StepOutput> Engine::step(const StepBatch& batch) {
  Impl& e = *impl_;
  if (Status status = e.check(batch); !status) return status.error();
  e.save_unread_logits(batch);
  for (const SequenceRows& group : batch.groups)
    if (group.uncommitted)
      for (const Row& row : group.rows)
        e.uncommitted[static_cast<size_t>(group.sequence)].push_back(row.parent);
  if (e.watch) e.watch->begin();
  const StepOutput output = e.backend->step(batch);
  if (e.watch) e.trace->add(e.watch->end(batch.n_rows()));
  if (!e.backend->fault().empty()) return device_fault(*e.backend);
  if (const std::string fault = e.model_file->fault(); !fault.empty())
    return Error{ErrorCode::DeviceFault, fault};
  return output;
}

std::span<const float> Engine::fetch_logits(int i) {
  return impl_->backend->fetch_logits(i);
}

// A step of a session's own timeline replaces its logits; any other one would only overwrite them.
void Engine::Impl::save_unread_logits(const StepBatch& batch) {
  while (!unread.empty()) {
    Session::Impl& session = *unread.back();
    const bool replaced = std::any_of(batch.groups.begin(), batch.groups.end(), [&](const auto& group) {
      return group.sequence == session.sequence && !group.uncommitted;
    });
    if (replaced)
      session.drop_logits();
    else
      session.fetch_logits();
  }
}

Error device_fault(const Backend& backend) {
  return {ErrorCode::DeviceFault,
          fmt::format("{}{}; start again", backend.is_gpu() ? "the GPU failed: " : "", backend.fault())};
}

Status Engine::commit(int sequence, std::span<const int32_t> path) {
  Impl& e = *impl_;
  if (sequence < 0 || sequence >= e.n_sequences)
    return invalid(fmt::format("sequence {} is outside 0..{}", sequence, e.n_sequences - 1));
  std::vector<int32_t>& parents = e.uncommitted[static_cast<size_t>(sequence)];
  if (parents.empty()) return invalid(fmt::format("sequence {} has no uncommitted rows", sequence));
  int32_t parent = -1;
  for (const int32_t row : path) {
    if (row < 0 || row >= static_cast<int32_t>(parents.size()))
      return invalid(fmt::format("row {} is outside the {} uncommitted rows", row, parents.size()));
    if (parents[static_cast<size_t>(row)] != parent)
      return invalid(fmt::format("row {} does not follow row {}", row, parent));
    parent = row;
  }
  e.backend->commit(sequence, path);
  parents.clear();
  return {};
}

Result<Session> Engine::open_session() {
  Impl& e = *impl_;
  for (int s = 0; s < e.n_sequences; ++s) {
    if (e.taken[static_cast<size_t>(s)]) continue;
    e.taken[static_cast<size_t>(s)] = true;
    e.uncommitted[static_cast<size_t>(s)].clear();
    e.backend->clear(s);
    auto session = std::make_unique<Session::Impl>();
    session->engine = this;
    session->backend = e.backend.get();
    session->sequence = s;
    session->unread = &e.unread;
    session->uncommitted = &e.uncommitted[static_cast<size_t>(s)];
    session->release = [this, s] { impl_->taken[static_cast<size_t>(s)] = false; };
    return Session(std::move(session));
  }
  return Error{ErrorCode::Unsupported, fmt::format("all {} sequences are in use", e.n_sequences)};
}

}  // namespace thermo
