#include "engine/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <climits>

#include "base/error.h"
#include "base/units.h"
#include "experts/host_tier.h"
#include "gguf/gguf_file.h"
#include "kernels/quant_matmul/quant_matmul.h"
#include "model/model.h"
#include "model/weights.h"

namespace thermo {
namespace {

// What `auto` never goes beyond without being asked: a long context costs memory for every sequence.
constexpr int kAutoContext = 32768;
constexpr int kContextStep = 512;
constexpr uint64_t kFileReserve = 128 * MiB;  // where experts are read from the file while running

size_t largest_panel(const GgufFile& file) {
  size_t most = 0;
  for (const GgufTensor& tensor : file.tensors())
    if (dtype_info(tensor.dtype).is_weight && tensor.dims[0] < (1u << 24))
      most = std::max(most, panel_bytes(tensor.dtype, static_cast<int>(tensor.dims[0])));
  return most;
}

// What the weights take, and how few experts can do.
struct WeightSizes {
  uint64_t core = 0;         // packed, without the routed experts of the main stack
  uint64_t experts = 0;      // packed
  uint64_t min_experts = 0;  // the smallest cache of them
  int n_experts = 0;
};

WeightSizes weight_sizes(const ModelConfig& config, const GgufFile& file, bool repack) {
  if (!repack) return {};
  const ExpertCatalog catalog = expert_catalog(config, Weights::bind(config, file));
  WeightSizes sizes{.core = Weights::planned_packed_bytes(config, file, false),
                    .experts = catalog.total_bytes(),
                    .min_experts = HostTier::min_bytes(catalog)};
  for (const ExpertLayer& layer : catalog.layers) sizes.n_experts += layer.n_expert();
  return sizes;
}

SequenceConfig sequence_at(const MemoryPlanInputs& in, int n_ctx, int n_pages) {
  return {.n_ctx = n_ctx,
          .max_draft_rows = in.max_draft_rows,
          .k_type = in.k_type,
          .v_type = in.v_type,
          .n_pages = n_pages};
}

// How many pages the sequences share.
struct PageRange {
  int fewest, most;
};
PageRange page_range(const ModelConfig& config, const MemoryPlanInputs& in, int n_ctx) {
  const SequenceLayout layout = SequenceLayout::on_cpu(config, sequence_at(in, n_ctx, 0));
  const int one = layout.table_pages(), all = in.n_sequences * one;
  if (layout.n_layers(KvKind::Full) == 0) return {0, 0};
  if (in.n_pages > 0) return {std::clamp(in.n_pages, one, all), std::clamp(in.n_pages, one, all)};
  if (in.n_ctx > 0) return {one, all};
  return {one + (in.n_sequences - 1) * std::min(one, ceil_div(kRoomyContext, kKvPage)), all};
}

// Where memory is better used for experts: more than the fewest only where that is little of it.
PageRange few_pages_of(PageRange range, size_t page_bytes, uint64_t available) {
  if (page_bytes == 0) return range;
  const uint64_t little = std::min<uint64_t>(available / 8 / page_bytes, INT_MAX);
  range.most = std::clamp(static_cast<int>(little), range.fewest, range.most);
  return range;
}

// The most pages within a range that fit, given what a plan with some number of them takes and has. nullopt:
// not even the fewest do. Some of what is left over stays free: checkpoints come out of it.
template <class Plan>
std::optional<MemoryPlan> fit_pages(PageRange range, size_t page_bytes, const Plan& plan_with) {
  MemoryPlan plan = plan_with(range.most);
  if (plan.fits()) return plan;
  plan = plan_with(range.fewest);
  if (!plan.fits() || range.fewest == range.most) return std::nullopt;
  const bool device = !plan.device_items.empty();
  const uint64_t room = device ? plan.device_available_bytes - plan.device_total_bytes
                               : plan.available_bytes - plan.total_bytes;
  const uint64_t more = (room - room / 4) / page_bytes;
  return plan_with(range.fewest + static_cast<int>(std::min<uint64_t>(
                                      more, static_cast<uint64_t>(range.most - range.fewest))));
}

MemoryPlan plan_at(const ModelConfig& config, const GgufFile& file, const MemoryPlanInputs& in,
                   const WeightSizes& sizes, uint64_t host_experts, int n_ctx, int n_pages) {
  const SequenceConfig sequence = sequence_at(in, n_ctx, n_pages);
  const uint64_t n_seq = static_cast<uint64_t>(in.n_sequences);
  ModelOptions options;
  options.n_batch = in.n_batch;

  MemoryPlan plan;
  plan.n_ctx = n_ctx;
  plan.n_pages = n_pages;
  plan.available_bytes = in.available_bytes;
  plan.expert_bytes = sizes.experts;
  plan.host_expert_bytes = host_experts;
  plan.mapped_bytes =
      in.repack ? file.require_tensor("token_embd.weight").n_bytes : file.total_tensor_bytes();
  const auto add = [&](std::string name, uint64_t bytes, std::string detail, bool later = false) {
    if (bytes > 0) plan.items.push_back({std::move(name), bytes, std::move(detail), later});
    plan.total_bytes += bytes;
  };
  add(sizes.experts > 0 ? "core weights" : "weights", sizes.core, "repacked for the CPU");
  add(config.has_parts() ? "FFN parts" : "experts", host_experts,
      plan.experts_in_file() ? fmt::format("of {}, the rest in the file", format_bytes(sizes.experts))
                             : fmt::format("all {}, repacked for the CPU", sizes.n_experts));
  const SequenceLayout layout = SequenceLayout::on_cpu(config, sequence);
  for (const KvKind kind : kEachKvKind)
    add(kv_pool_name(kind), layout.pool_bytes(kind, in.n_sequences, in.n_batch),
        kv_item_detail(kind, sequence, in.n_sequences));
  add("recurrent state", n_seq * layout.recurrent_bytes(),
      fmt::format("{} DeltaNet layers", config.n_recurrent_layers()));
  add("draft tape", n_seq * layout.tape_bytes(), fmt::format("{} rows", in.max_draft_rows));
  const auto drafter_tokens = static_cast<uint64_t>(align_up(n_ctx + in.drafter_block, kKvPage));
  add(kDrafterItem,
      in.drafter_bytes + n_seq * (drafter_tokens * in.drafter_token_bytes + in.drafter_sequence_bytes),
      in.drafter_bytes > 0 ? "its weights, cache and scratch" : "its index of the text");
  add("activations",
      Model::workspace_bytes(config, options, in.n_threads, in.repack ? 0 : largest_panel(file)),
      fmt::format("{} rows", in.n_batch));
  add("prefix cache", in.cache_bytes, "beginnings of conversations, at most", true);
  add("program", kProgramBytes, "code, vocabulary, stacks");
  if (plan.experts_in_file())
    add("reserve", std::min(kFileReserve, sizes.experts / 8), "pages of the file, buffers of its readers",
        true);
  if (in.stand_in_bytes) {
    add("stand-in device", *in.stand_in_bytes,
        config.has_parts() ? "its memory for parts of FFNs" : "its memory for hot experts");
    add("working ahead", in.ahead_bytes, "routers in four bits, experts on their way");
    plan.device_name = "stand-in device";
    plan.device_items = {{config.has_parts() ? "FFN parts" : "expert budget", *in.stand_in_bytes,
                          fmt::format("of {}", format_bytes(sizes.experts))}};
    plan.device_total_bytes = plan.device_available_bytes = *in.stand_in_bytes;
  }
  return plan;
}

// With as many pages as fit beside so many bytes of experts.
std::optional<MemoryPlan> plan_pages(const ModelConfig& config, const GgufFile& file,
                                     const MemoryPlanInputs& in, const WeightSizes& sizes,
                                     uint64_t host_experts, int n_ctx) {
  const size_t page_bytes =
      SequenceLayout::on_cpu(config, sequence_at(in, n_ctx, 0)).page_bytes(KvKind::Full);
  PageRange range = page_range(config, in, n_ctx);
  if (host_experts < sizes.experts) range = few_pages_of(range, page_bytes, in.available_bytes);
  return fit_pages(range, page_bytes, [&](int n_pages) {
    return plan_at(config, file, in, sizes, host_experts, n_ctx, n_pages);
  });
}

// The largest context that fits with all experts in memory, nullopt: none from `lowest` on.
std::optional<MemoryPlan> plan_with_all(const ModelConfig& config, const GgufFile& file,
                                        const MemoryPlanInputs& in, const WeightSizes& sizes, int lowest) {
  const int largest = in.n_ctx > 0 ? in.n_ctx : std::min(config.n_ctx_train, kAutoContext);
  for (int n_ctx = largest; n_ctx >= (in.n_ctx > 0 ? in.n_ctx : lowest); n_ctx /= 2)
    if (auto plan = plan_pages(config, file, in, sizes, sizes.experts, n_ctx)) return plan;
  return std::nullopt;
}

// With a cache of experts over the file: what was asked for, or whatever the rest leaves.
std::optional<MemoryPlan> plan_with_file(const ModelConfig& config, const GgufFile& file,
                                         const MemoryPlanInputs& in, const WeightSizes& sizes) {
  if (sizes.min_experts >= sizes.experts) return std::nullopt;
  const uint64_t wanted = std::clamp(in.expert_ram.value_or(sizes.experts), sizes.min_experts, sizes.experts);
  const int lowest = in.n_ctx > 0 ? in.n_ctx : std::min(in.min_ctx, config.n_ctx_train);
  int n_ctx = in.n_ctx > 0 ? in.n_ctx : std::min(config.n_ctx_train, kAutoContext);
  if (in.n_ctx == 0 && !in.expert_ram)
    n_ctx = std::min(n_ctx, std::max(kRoomyContext, lowest));  // experts need the room more
  for (; n_ctx >= lowest; n_ctx /= 2) {
    const auto least = plan_pages(config, file, in, sizes, sizes.min_experts, n_ctx);
    if (!least) continue;
    // Beside two checkpoints of each sequence.
    const SequenceLayout layout = SequenceLayout::on_cpu(config, sequence_at(in, n_ctx, least->n_pages));
    const uint64_t points = 2 * static_cast<uint64_t>(in.n_sequences) * layout.piece_bytes(n_ctx, false);
    const uint64_t room = in.available_bytes - least->total_bytes;
    const uint64_t most = sizes.min_experts + (room - std::min(room, points));
    MemoryPlan plan = plan_at(config, file, in, sizes, std::min(wanted, most), n_ctx, least->n_pages);
    if (in.expert_ram && *in.expert_ram < sizes.min_experts)
      plan.note = fmt::format("{} of main memory for experts are too few for one layer; {} are used",
                              format_bytes(*in.expert_ram), format_bytes(plan.host_expert_bytes));
    else if (in.expert_ram && wanted > most)
      plan.note = fmt::format("{} of main memory for experts are not available; {} are used",
                              format_bytes(wanted), format_bytes(most));
    else if (!in.expert_ram)
      plan.note = fmt::format("experts in memory {} of {}, the rest in the file",
                              format_bytes(plan.host_expert_bytes), format_bytes(sizes.experts));
    return plan;
  }
  return std::nullopt;
}

// Below `n_ctx`, in steps of kContextStep; 0: none.
int largest_context(int n_ctx, const std::function<bool(int)>& fits) {
  int low = 0, high = (n_ctx - 1) / kContextStep;
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (fits(middle * kContextStep)) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low * kContextStep;
}

}  // namespace

std::optional<MemoryPlanInputs> with_q8_cache(const ModelConfig& config, const MemoryPlanInputs& in) {
  const auto bytes = [&](KvType k, KvType v) {
    return kv_head_bytes(k, config.head_dim) + kv_head_bytes(v, config.head_dim);
  };
  if (in.n_ctx == 0 || config.head_dim % 32 != 0 ||
      bytes(KvType::Q8_0, KvType::Q8_0) >= bytes(in.k_type, in.v_type))
    return std::nullopt;
  MemoryPlanInputs smaller = in;
  smaller.k_type = smaller.v_type = KvType::Q8_0;
  return smaller;
}

MemoryPlan plan_memory(const ModelConfig& config, const GgufFile& file, const MemoryPlanInputs& in) {
  const WeightSizes sizes = weight_sizes(config, file, in.repack);
  const int smallest = std::min(in.min_ctx, config.n_ctx_train);
  const int roomy = std::max(smallest, std::min(kRoomyContext, config.n_ctx_train));
  const bool may_use_file = sizes.min_experts < sizes.experts;
  const bool want_all = !in.expert_ram || *in.expert_ram >= sizes.experts || !may_use_file;
  if (want_all)
    if (auto plan = plan_with_all(config, file, in, sizes, roomy)) return *plan;
  if (auto plan = plan_with_file(config, file, in, sizes)) return *plan;
  if (want_all)
    if (auto plan = plan_with_all(config, file, in, sizes, smallest)) return *plan;

  const int shown_ctx = in.n_ctx > 0 ? in.n_ctx : smallest;
  const uint64_t least = std::min(sizes.min_experts, sizes.experts);
  const auto fewest = [&](int n_ctx) { return page_range(config, in, n_ctx).fewest; };
  const MemoryPlan plan = plan_at(config, file, in, sizes, least, shown_ctx, fewest(shown_ctx));
  MemoryPlanInputs mapped = in;
  mapped.repack = false;
  const uint64_t mapped_total =
      plan_at(config, file, mapped, {}, 0, shown_ctx, fewest(shown_ctx)).total_bytes;
  const int largest = largest_context(shown_ctx, [&](int n_ctx) {
    return plan_at(config, file, in, sizes, least, n_ctx, fewest(n_ctx)).total_bytes <= in.available_bytes;
  });
  std::string advice = "close other programs or use a smaller quantisation";
  Remedy remedy = Remedy::None;
  const auto smaller = with_q8_cache(config, in);
  if (smaller && plan_at(config, file, *smaller, sizes, least, shown_ctx, fewest(shown_ctx)).total_bytes <=
                     in.available_bytes) {
    advice = "with keys and values as q8_0 it fits";
    if (largest > 0) advice += fmt::format(", and as they are the largest context that fits is {}", largest);
    remedy = Remedy::SmallerCache;
  } else if (largest > 0) {
    advice = fmt::format("the largest context that fits is {}", largest);
    remedy = Remedy::SmallerContext;
  } else if (in.repack && mapped_total <= in.available_bytes) {
    advice = fmt::format("without repacking it would take {} and read the rest through the file mapping",
                         format_bytes(mapped_total));
    remedy = Remedy::FileMapping;
  }
  const bool drafts = in.drafter_bytes + in.drafter_token_bytes > 0;
  MemoryPlanInputs plain = in;
  plain.drafter_bytes = plain.drafter_token_bytes = plain.drafter_sequence_bytes = 0;
  if (drafts && plan_at(config, file, plain, sizes, least, shown_ctx, fewest(shown_ctx)).total_bytes <=
                    in.available_bytes)
    advice += "; without drafting it fits";
  throw MemoryError(
      fmt::format("{} {} {} of memory with a context of {}, but {} are available; {}", file.path(),
                  drafts ? "and its drafter need" : "needs", format_bytes(plan.total_bytes), shown_ctx,
                  format_bytes(in.available_bytes), advice),
      remedy);
}

void plan_checkpoints(MemoryPlan& plan, int n_sequences, uint64_t bytes) {
  if (bytes == 0) return;
  const uint64_t of_each = bytes * static_cast<uint64_t>(n_sequences),
                 room = plan.available_bytes - std::min(plan.available_bytes, plan.total_bytes);
  plan.n_checkpoints = static_cast<int>(std::min<uint64_t>(room / of_each, kMaxCheckpoints));
  if (plan.n_checkpoints == 0) return;
  const uint64_t total = of_each * static_cast<uint64_t>(plan.n_checkpoints);
  plan.items.push_back({"checkpoints", total,
                        fmt::format("up to {} x {}, {} each; to go back to", plan.n_checkpoints, n_sequences,
                                    format_bytes(bytes)),
                        true});
  plan.total_bytes += total;
}

uint64_t planned_at_load(const std::vector<MemoryPlanItem>& items) {
  uint64_t bytes = 0;
  for (const MemoryPlanItem& item : items) bytes += item.later ? 0 : item.bytes;
  return bytes;
}

std::string plan_mistake(uint64_t planned, uint64_t taken) {
  const uint64_t difference = std::max(planned, taken) - std::min(planned, taken);
  if (difference <= kProgramBytes || difference <= planned / 20) return "";
  return fmt::format(
      "{} were planned and {} are taken, {:+.0f} %", format_bytes(planned), format_bytes(taken),
      100.0 * (static_cast<double>(taken) / static_cast<double>(std::max<uint64_t>(planned, 1)) - 1.0));
}

std::string kv_item_detail(KvKind kind, const SequenceConfig& sequence, int n_sequences) {
  const std::string types =
      fmt::format("k {}, v {}", kv_type_name(sequence.k_type), kv_type_name(sequence.v_type));
  if (kind == KvKind::Sliding)
    return fmt::format("windows and the rows of a step x {}, {}", n_sequences, types);
  const int n_all = n_sequences * ceil_div(sequence.n_ctx + sequence.max_draft_rows, kKvPage);
  if (sequence.n_pages == 0 || sequence.n_pages >= n_all)
    return fmt::format("{} tokens x {}, {}", sequence.n_ctx, n_sequences, types);
  return fmt::format("{} tokens, shared by {} sequences of up to {}, {}", sequence.n_pages * kKvPage,
                     n_sequences, sequence.n_ctx, types);
}

MemoryPlan plan_device_memory(const ModelConfig& config, const MemoryPlanInputs& in,
                              const std::string& device_name, uint64_t free_bytes, const DeviceItemsFn& items,
                              bool few_pages) {
  const auto plan_with = [&](int n_ctx, int n_pages) {
    MemoryPlan plan;
    plan.n_ctx = n_ctx;
    plan.n_pages = n_pages;
    plan.available_bytes = in.available_bytes;
    plan.items = {{"program", kProgramBytes, "code, vocabulary, staging"}};
    if (in.cache_bytes > 0)
      plan.items.push_back(
          {"prefix cache", in.cache_bytes, "beginnings of conversations, at most; page-locked", true});
    plan.total_bytes = kProgramBytes + in.cache_bytes;
    plan.device_name = device_name;
    plan.device_available_bytes = free_bytes;
    plan.device_items = items(n_ctx, n_pages);
    plan.device_items.push_back({"reserve", in.device_reserve, "driver and other programs", true});
    for (const MemoryPlanItem& item : plan.device_items) plan.device_total_bytes += item.bytes;
    return plan;
  };
  const auto fit = [&](int n_ctx) {
    PageRange range = page_range(config, in, n_ctx);
    const size_t page_bytes =
        SequenceLayout::on_gpu(config, sequence_at(in, n_ctx, 0)).page_bytes(KvKind::Full);
    if (few_pages) range = few_pages_of(range, page_bytes, free_bytes);
    const auto plan = fit_pages(range, page_bytes, [&](int n_pages) { return plan_with(n_ctx, n_pages); });
    return plan ? *plan : plan_with(n_ctx, range.fewest);
  };
  if (in.n_ctx > 0) return fit(in.n_ctx);
  const int smallest = std::min(in.min_ctx, config.n_ctx_train);
  int n_ctx = std::min(config.n_ctx_train, kAutoContext);
  MemoryPlan plan = fit(n_ctx);
  while (!plan.fits() && n_ctx / 2 >= smallest) plan = fit(n_ctx /= 2);
  return plan;
}

}  // namespace thermo
