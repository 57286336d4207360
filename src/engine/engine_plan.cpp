#include "engine/engine_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/cpu_info.h"
#include "base/error.h"
#include "base/units.h"
#include "experts/courier.h"
#include "experts/forecast.h"
#include "experts/host_tier.h"
#include "experts/placement.h"
#include "gguf/gguf_file.h"
#include "kernels/delta_net/delta_net.h"
#include "model/dense_parts.h"
#include "model/weights.h"

namespace thermo {
namespace {

constexpr int kBatchCpu = 512, kBatchGpu = 2048;
// With FFNs in parts a row has a sum for each part, and these take memory that parts could have.
constexpr int kBatchParts = 1024;

void append_note(std::string& note, const std::string& more) {
  if (!note.empty() && !more.empty()) note += "; ";
  note += more;
}

// What to know about a device budget that holds fewer experts of a layer than a step and the one after it
// choose; empty: nothing.
std::string floor_note(const ExpertCatalog& catalog, const SplitOptions& experts, bool is_parts) {
  // None is what was asked for. Of an FFN's parts each one on the device counts the same.
  if (!experts.split || experts.budget_bytes == 0 || is_parts) return "";
  const Placement placement = place_experts({.catalog = &catalog,
                                             .heat = nullptr,
                                             .budget_bytes = experts.budget_bytes,
                                             .floor = 0,
                                             .pin_layers = experts.pin_layers});
  const int wanted = 2 * catalog.n_active;
  if (placement.floor >= wanted) return "";
  return fmt::format(
      "{} for experts hold {} of each layer, but it takes {} or more to keep a layer on the device; the CPU "
      "computes most of them",
      format_bytes(experts.budget_bytes), placement.floor, wanted);
}

// The model with the states that its drafter reads, its FFNs cut if they are to be.
ModelConfig as_planned(ModelConfig config, const DraftPlan& draft, int ffn_parts) {
  insert_taps(config.network, config.n_layer, draft.states);
  if (ffn_parts > 0) cut_dense(config, ffn_parts);
  return config;
}

// Whether a dense model is split because less than all of it was asked for.
bool asks_for_parts(ModelConfig config, const GgufFile& file, int n_parts, const ExpertBudget& cache) {
  if (n_parts == 0 || cache.is_auto()) return false;
  cut_dense(config, n_parts);
  const uint64_t total = expert_catalog(config, Weights::bind(config, file)).total_bytes();
  return cache.resolve(total, total) < total;
}

std::string share_note(const MemoryPlan& memory, uint64_t hot_bytes) {
  return fmt::format("{} has {:.0f} % of the feed-forward weights, the CPU computes the rest",
                     memory.device_name,
                     100.0 * static_cast<double>(hot_bytes) / static_cast<double>(memory.expert_bytes));
}

// With everything in GPU memory where it fits, else with the experts split: as many hot as there is room for,
// or as was asked for.
void plan_on_gpu(EnginePlan& plan, const ModelConfig& config, const Weights& weights,
                 const MemoryPlanInputs& inputs, const EngineOptions& o) {
  const ExpertCatalog catalog = expert_catalog(config, weights);
  const uint64_t total = catalog.total_bytes();
  const ExpertBudget &cache = o.expert_cache, &ram = o.expert_ram;
  const auto items = [&](int n_ctx, int n_pages) {
    plan.model.sequence.n_ctx = n_ctx;
    plan.model.sequence.n_pages = n_pages;
    std::vector<MemoryPlanItem> all = plan_gpu_memory(config, weights, *plan.gpu, plan.model);
    if (const uint64_t bytes = gpu_draft_bytes(plan.draft, o.draft, config, weights, plan.model, *plan.gpu))
      all.push_back({kDrafterItem, bytes, "weights of its own, cache and activations"});
    return all;
  };
  const auto plan_device = [&] {
    plan.memory = plan_device_memory(config, inputs, plan.gpu->name, plan.gpu->free_bytes, items,
                                     plan.model.experts.split);
  };
  const bool asked = !cache.is_auto();
  const bool in_parts = config.has_parts();
  if (!in_parts && (total == 0 || !asked || cache.resolve(total, total) >= total)) {
    plan_device();
    if (plan.memory.fits() || total == 0 || asked) return;
  }
  plan.model.experts.split = true;
  plan.model.experts.pin_layers = o.pin_layers;
  plan.model.experts.swaps = o.expert_swaps;
  plan.model.experts.link_limit = o.link_limit;
  plan.model.experts.budget_bytes = asked ? cache.resolve(total, 0) : 0;
  plan_device();
  if (!asked && plan.memory.fits()) {
    plan.model.experts.budget_bytes =
        std::min(total, plan.memory.device_available_bytes - plan.memory.device_total_bytes);
    MemoryPlanInputs same = inputs;
    same.n_ctx = plan.memory.n_ctx;
    same.n_pages = plan.memory.n_pages;
    plan.memory = plan_device_memory(config, same, plan.gpu->name, plan.gpu->free_bytes, items, true);
  }
  // In main memory: all of them, or what there is room for.
  const uint64_t room = inputs.available_bytes - std::min(inputs.available_bytes, plan.memory.total_bytes);
  const uint64_t host = in_parts ? total
                                 : std::min(std::max(ram.resolve(total, total), HostTier::min_bytes(catalog)),
                                            room - room / 16);
  plan.model.experts.host_bytes = host >= total ? 0 : host;
  plan.memory.expert_bytes = total;
  plan.memory.host_expert_bytes = std::min(host, total);
  plan.memory.items.push_back({in_parts ? "FFN parts" : "experts", std::min(host, total),
                               host >= total
                                   ? "all of them, page-locked"
                                   : fmt::format("of {}, the rest in the file", format_bytes(total))});
  const uint64_t routers = host >= total && !in_parts ? 2 * ExpertForecast::planned_bytes(catalog) : 0;
  if (routers > 0)
    plan.memory.items.push_back({"working ahead", routers, "routers in four bits, to guess experts early"});
  plan.memory.total_bytes += std::min(host, total) + routers;
  append_note(plan.memory.note, in_parts && plan.memory.fits()
                                    ? share_note(plan.memory, plan.model.experts.budget_bytes)
                                    : floor_note(catalog, plan.model.experts, in_parts));
}

// With the drafter that is asked for. One that was not asked for by name is left out where there is no room.
void plan_gpu_and_drafter(EnginePlan& plan, const ModelConfig& config, const GgufFile& file,
                          MemoryPlanInputs& inputs, const EngineOptions& o) {
  const int n_parts = dense_parts(config, file);
  const auto plan_in_parts = [&](int ffn_parts) {
    plan.model.experts = {};
    plan.model.n_batch = inputs.n_batch = o.n_batch > 0 ? o.n_batch : ffn_parts > 0 ? kBatchParts : kBatchGpu;
    const ModelConfig planned = as_planned(config, plan.draft, ffn_parts);
    const Weights weights = Weights::bind(planned, file);
    // Parts need the room more than a long context that nobody asked for.
    MemoryPlanInputs roomy = inputs;
    if (ffn_parts > 0 && inputs.n_ctx == 0)
      roomy.n_ctx = std::min(std::max(kRoomyContext, inputs.min_ctx), config.n_ctx_train);
    plan_on_gpu(plan, planned, weights, roomy, o);
    if (!plan.memory.fits() && roomy.n_ctx != inputs.n_ctx) plan_on_gpu(plan, planned, weights, inputs, o);
    plan.memory.ffn_parts = ffn_parts;
    if (plan.draft.kind != DraftOptions::Kind::Lookup) return;
    // Its index is in main memory.
    const uint64_t bytes = plan.draft.token_bytes * static_cast<uint64_t>(plan.memory.n_ctx) *
                           static_cast<uint64_t>(inputs.n_sequences);
    plan.memory.items.push_back({kDrafterItem, bytes, "its index of the text"});
    plan.memory.total_bytes += bytes;
  };
  const auto plan_with = [&](const DraftOptions& draft) {
    plan.draft = plan_draft(draft, config, inputs.n_threads);
    if (draft.budget == 0) plan.draft.max_rows = std::min(plan.draft.max_rows, max_gpu_draft_rows(config));
    plan.model.sequence.max_draft_rows = inputs.max_draft_rows =
        std::max(o.max_draft_rows, plan.draft.max_rows);
    const bool asked = asks_for_parts(config, file, n_parts, o.expert_cache);
    plan_in_parts(asked ? n_parts : 0);
    if (!plan.memory.fits() && n_parts > 0 && !asked && o.expert_cache.is_auto()) plan_in_parts(n_parts);
  };
  plan_with(o.draft);
  if (plan.memory.fits() || plan.draft.kind == DraftOptions::Kind::None) return;
  const uint64_t needed = plan.memory.device_total_bytes;
  plan_with({});
  if (!plan.memory.fits() || o.draft.kind == DraftOptions::Kind::Auto) return;
  throw MemoryError(
      fmt::format("{} and its drafter need {} of GPU memory with a context of {}, but {} has {} free; use a "
                  "smaller context, or turn drafting off",
                  file.path(), format_bytes(needed), plan.memory.n_ctx, plan.gpu->name,
                  format_bytes(plan.gpu->free_bytes)));
}

// Whether the context that was asked for would fit on the GPU with keys and values as q8_0.
bool fits_in_q8(EnginePlan plan, const ModelConfig& config, const GgufFile& file,
                const MemoryPlanInputs& inputs, const EngineOptions& o) {
  auto smaller = with_q8_cache(config, inputs);
  if (!smaller) return false;
  plan.model.sequence.k_type = plan.model.sequence.v_type = KvType::Q8_0;
  try {
    plan_gpu_and_drafter(plan, config, file, *smaller, o);
  } catch (const MemoryError&) {
    return false;
  }
  return plan.memory.fits();
}

// On the processor, with or without the stand-in device.
void plan_on_cpu(EnginePlan& plan, const ModelConfig& whole, const GgufFile& file, MemoryPlanInputs& inputs,
                 const EngineOptions& o) {
  const int ffn_parts = plan.model.stand_in && o.repack ? dense_parts(whole, file) : 0;
  const ModelConfig config = as_planned(whole, plan.draft, ffn_parts);
  plan.model.n_batch = inputs.n_batch = o.n_batch > 0 ? o.n_batch : kBatchCpu;
  const ExpertBudget &cache = o.expert_cache, &ram = o.expert_ram;
  const ExpertCatalog catalog = expert_catalog(config, Weights::bind(config, file));
  const uint64_t total = catalog.total_bytes();
  if (plan.model.stand_in && (total == 0 || !o.repack)) {
    plan.model.stand_in = false;
    append_note(plan.memory.note,
                total == 0 ? "this model cannot be split; the CPU does everything"
                           : "the stand-in device needs repacked weights; the CPU does everything");
  }
  std::string note = plan.memory.note;
  if (!ram.is_auto()) inputs.expert_ram = ram.resolve(total, total);
  if (plan.model.stand_in) {
    plan.model.experts.split = true;
    plan.model.experts.budget_bytes = cache.resolve(total, total);
    inputs.stand_in_bytes = plan.model.experts.budget_bytes;
    inputs.ahead_bytes =
        config.has_parts() ? 0 : 2 * ExpertForecast::planned_bytes(catalog) + Courier::places_bytes(catalog);
  }
  plan.model.experts.pin_layers = o.pin_layers;
  plan.model.experts.swaps = o.expert_swaps;
  plan.model.experts.link_limit = o.link_limit;
  plan.memory = plan_memory(config, file, inputs);
  plan.memory.ffn_parts = ffn_parts;
  if (plan.memory.experts_in_file()) plan.model.experts.host_bytes = plan.memory.host_expert_bytes;
  append_note(note, plan.memory.note);
  append_note(note, floor_note(catalog, plan.model.experts, config.has_parts()));
  plan.memory.note = note;
}

}  // namespace

void check_options(const EngineOptions& o) {
  const auto range = [](const char* name, int value, int low, int high) {
    if (value < low || value > high)
      throw ConfigError(fmt::format("{} is {}, expected {} to {}", name, value, low, high));
  };
  range("the context", o.n_ctx, 0, 1 << 24);
  range("the shortest context", o.min_ctx, 1, 1 << 24);
  range("the number of sequences", o.n_sequences, 1, 256);
  range("the number of pages", o.n_pages, 0, 1 << 24);
  range("the number of threads", o.n_threads, 0, 1024);
  range("the number of rows of a step", o.n_batch, 0, 16384);
  range("the number of draft rows", o.max_draft_rows, 0, kDeltaChunk);
  range("the number of drafted tokens", o.draft.budget, 0, kMaxDraftNodes);
  range("the number of pinned layers", o.pin_layers, 0, 1 << 16);
}

ModelConfig describe_model(const GgufFile& file, const EngineOptions& options) {
  ModelConfig config = read_model_config(file);
  override_rope(options.rope, config);
  insert_taps(config.network, config.n_layer, options.taps);
  return config;
}

EnginePlan plan_engine(const ModelConfig& config, const GgufFile& file, const EngineOptions& o,
                       bool imagine) {
  EnginePlan plan;
  plan.model.n_sequences = o.n_sequences;
  plan.model.sequence = {.n_ctx = o.n_ctx,
                         .max_draft_rows = o.max_draft_rows,
                         .k_type = o.k_type.value_or(KvType::F16),
                         .v_type = o.v_type.value_or(KvType::F16)};
  for (const KvType type : {plan.model.sequence.k_type, plan.model.sequence.v_type})
    if (kv_in_blocks(type) && config.head_dim % 32 != 0)
      throw ConfigError(
          fmt::format("a {} cache needs a head size that is a multiple of 32, this model has {}; use f16",
                      kv_type_name(type), config.head_dim));
  MemoryPlanInputs inputs;
  inputs.n_ctx = o.n_ctx == 0 && !o.fit ? config.n_ctx_train : o.n_ctx;
  inputs.min_ctx = o.min_ctx;
  inputs.device_reserve = o.gpu_reserve;
  inputs.n_sequences = o.n_sequences;
  inputs.n_pages = o.n_pages;
  inputs.max_draft_rows = o.max_draft_rows;
  inputs.n_threads = o.n_threads > 0 ? o.n_threads : cpu_info().n_cores;
  inputs.repack = o.repack;
  inputs.k_type = plan.model.sequence.k_type;
  inputs.v_type = plan.model.sequence.v_type;
  inputs.available_bytes = available_memory_bytes();
  inputs.cache_bytes = o.cache_bytes;

  if (o.pin_layers > config.n_layer)
    throw ConfigError(
        fmt::format("{} layers cannot be pinned: this model has {}", o.pin_layers, config.n_layer));

  std::string note;
  plan.model.stand_in = o.device.kind == DeviceChoice::Kind::StandIn;
  if (!plan.model.stand_in) plan.gpu = choose_gpu(o.device, note);
  if (!plan.gpu && imagine && o.gpu_memory > 0 && o.device.kind == DeviceChoice::Kind::Auto) {
    plan.gpu = imagined_gpu(o.gpu_memory);
    append_note(note, plan.gpu ? "this is the plan for a card that is not in this machine"
                               : "this build has no CUDA: this is the plan for the CPU");
  }
  if (const std::string why = plan.gpu ? gpu_refusal(config) : ""; !why.empty()) {
    if (o.device.kind != DeviceChoice::Kind::Auto) throw LoadError(why + "; use the CPU", Remedy::Processor);
    append_note(note, why + "; the CPU does everything");
    plan.gpu.reset();
  }
  // The plan's reserve stands for what the driver takes itself.
  if (plan.gpu && o.gpu_memory > 0) plan.gpu->free_bytes = std::min(plan.gpu->free_bytes, o.gpu_memory);
  if (plan.gpu) {
    plan.model.device = plan.gpu->index;
    plan_gpu_and_drafter(plan, config, file, inputs, o);
    if (!plan.memory.fits()) {
      const bool in_q8 = fits_in_q8(plan, config, file, inputs, o);
      const std::string shortage =
          fmt::format("{} needs {} of GPU memory with a context of {}, but {} {}", file.path(),
                      format_bytes(plan.memory.device_total_bytes), plan.memory.n_ctx, plan.gpu->name,
                      o.gpu_memory > 0 ? fmt::format("may give {}", format_bytes(plan.gpu->free_bytes))
                                       : fmt::format("has {} free", format_bytes(plan.gpu->free_bytes)));
      if (o.device.kind != DeviceChoice::Kind::Auto)
        throw in_q8
            ? MemoryError(shortage + "; with keys and values as q8_0, or with a smaller context, it fits",
                          Remedy::SmallerCache)
            : MemoryError(shortage + "; use the CPU, a smaller context or a smaller quantisation",
                          Remedy::Processor);
      note = shortage + (in_q8 ? "; the CPU does everything (with a q8_0 cache it would fit)"
                               : "; the CPU does everything");
      plan.gpu.reset();
    }
  }
  if (!plan.gpu) {
    plan.memory.note.clear();
    plan.model.experts = {};
    std::optional<Weights> unpacked;
    if (!o.repack) unpacked = Weights::bind(config, file);
    const auto plan_with = [&](const DraftOptions& draft) {
      plan.draft = plan_draft(draft, config, inputs.n_threads, unpacked ? &*unpacked : nullptr);
      plan.model.sequence.max_draft_rows = inputs.max_draft_rows =
          std::max(o.max_draft_rows, plan.draft.max_rows);
      inputs.drafter_bytes = plan.draft.fixed_bytes;
      inputs.drafter_token_bytes = plan.draft.token_bytes;
      inputs.drafter_sequence_bytes =
          draft_state_bytes(plan.draft, config, kDrafterQueueRows, inputs.max_draft_rows);
      inputs.drafter_block = plan.draft.block;
      plan_on_cpu(plan, config, file, inputs, o);
    };
    try {
      plan_with(o.draft);
    } catch (const MemoryError&) {
      if (o.draft.kind != DraftOptions::Kind::Auto) throw;
      plan_with({});
    }
  }
  append_note(note, plan.memory.note);
  if (o.draft.kind == DraftOptions::Kind::Auto && plan.draft.kind == DraftOptions::Kind::None)
    append_note(note, "there is no memory for a drafter: nothing is drafted");
  plan.memory.note = note;
  plan.memory.n_batch = plan.model.n_batch;
  plan.model.sequence.n_ctx = plan.memory.n_ctx;
  plan.model.sequence.n_pages = plan.memory.n_pages;
  const SequenceLayout layout = plan.gpu ? SequenceLayout::on_gpu(config, plan.model.sequence)
                                         : SequenceLayout::on_cpu(config, plan.model.sequence);
  // With a prefix cache they are in it.
  if (o.cache_bytes == 0)
    plan_checkpoints(plan.memory, o.n_sequences, layout.piece_bytes(plan.memory.n_ctx, false));
  return plan;
}

}  // namespace thermo
