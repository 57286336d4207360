// The fields of a result. Their order and names are llama-bench's where it has them, so that scripts carry
// over.
#include <sys/resource.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include "base/cpu_info.h"
#include "cli/bench/bench_report.h"
#include "cli/version.h"

namespace thermo {
namespace {

// Since reset_peak_memory(), or since the start where the system does not allow that.
uint64_t peak_rss_bytes() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::strtoull(line.c_str() + 6, nullptr, 10) * 1024;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<uint64_t>(usage.ru_maxrss) * 1024;
}

template <class T>
Json optional_json(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

uint64_t per_token(uint64_t sum, const ExpertTelemetry& experts) {
  return sum / std::max<uint64_t>(1, experts.tokens);
}

void add_llama_fields(const BenchContext& context, const BenchResult& result, Json& f) {
  const BenchSetup& setup = context.setup;
  f["build_commit"] = build_commit();
  f["build_number"] = 0;
  f["cpu_info"] = cpu_info().name;
  const bool on_gpu = !runs_on_processor(context.engine);
  f["gpu_info"] = on_gpu ? context.engine.device : "";
  f["backends"] = on_gpu ? "CUDA" : context.engine.device == "cpu" ? "CPU" : "sim";
  f["model_filename"] = context.model_filename;
  f["model_type"] = context.model_type;
  f["model_size"] = context.model_size;
  f["model_n_params"] = context.model_n_params;
  f["n_batch"] = setup.n_batch;
  f["n_ubatch"] = setup.n_ubatch;
  f["n_threads"] = context.engine.n_threads;
  f["cpu_mask"] = "0x0";
  f["cpu_strict"] = false;
  f["poll"] = setup.poll.value_or(50);
  f["type_k"] = kv_type_name(setup.k_type);
  f["type_v"] = kv_type_name(setup.v_type);
  f["n_gpu_layers"] = on_gpu ? -1 : 0;
  f["n_cpu_moe"] = std::max(0, setup.n_cpu_moe);
  f["split_mode"] = "none";
  f["main_gpu"] = 0;
  f["no_kv_offload"] = false;
  f["flash_attn"] = true;
  f["devices"] = on_gpu ? context.engine.device : "none";
  f["tensor_split"] = "0.00";
  f["tensor_buft_overrides"] = "none";
  f["load_mode"] = setup.repack ? "none" : "mmap";
  f["embeddings"] = false;
  f["no_op_offload"] = 0;
  f["no_host"] = false;
  f["fit_target"] = on_gpu ? context.fit_target_mib : 0;
  f["fit_min_ctx"] = 0;
  f["n_prompt"] = result.test.n_prompt;
  f["n_gen"] = result.test.n_gen;
  f["n_depth"] = result.test.n_depth;
  f["test_time"] = result.test_time;
  f["avg_ns"] = static_cast<uint64_t>(result.avg_ns());
  f["stddev_ns"] = static_cast<uint64_t>(result.stddev_ns());
  f["avg_ts"] = result.avg_ts();
  f["stddev_ts"] = result.stddev_ts();
  f["samples_ns"] = result.samples_ns;
  f["samples_ts"] = result.samples_ts();
}

}  // namespace

void reset_peak_memory() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

bool runs_on_processor(const EngineInfo& engine) {
  return engine.device == "cpu" || engine.device.starts_with("sim");
}

Json bench_fields(const BenchContext& context, const BenchResult& result) {
  Json f;
  add_llama_fields(context, result, f);
  f["n_parallel"] = result.test.n_parallel;
  f["text_source"] = context.text_source;
  const ExpertTelemetry& experts = result.experts;
  const bool split = experts.pairs > 0;  // otherwise every expert was where it is computed
  const auto if_split = [&](auto value) { return split ? Json(value) : Json(nullptr); };
  f["heat_state"] = split ? Json(context.heat_state) : Json(nullptr);
  f["expert_cache_bytes"] = experts.budget_bytes;
  f["experts_hot"] = nullptr;  // counted in bytes: expert_resident_bytes
  f["expert_hit_ratio"] = if_split(experts.hit_rate());
  f["expert_moves"] = experts.moved;
  f["bytes_h2d"] = experts.fetched_bytes + experts.streamed_bytes + experts.moved_bytes;
  f["cpu_busy_ratio"] = result.cpu_busy_ratio;
  f["gpu_busy_ratio"] = nullptr;
  f["moe_stall_ns"] = if_split(per_token(experts.stall_ns, experts));
  const DraftTelemetry& draft = result.draft;
  const bool drafted = !draft.drafter.empty();
  const auto if_drafted = [&](auto value) { return drafted ? Json(value) : Json(nullptr); };
  f["drafter"] = draft.drafter;
  f["accept_len"] = draft.n_rounds > 0 ? Json(draft.accept_length()) : Json(nullptr);
  f["vram_peak_bytes"] = context.device_bytes;
  f["rss_peak_bytes"] = peak_rss_bytes();
  f["power_avg_watts"] = nullptr;
  f["joules_per_token"] = nullptr;
  f["p50_ns"] = optional_json(result.percentile_ns(0.50));
  f["p99_ns"] = optional_json(result.percentile_ns(0.99));
  f["output_sha256"] = result.output_sha256;

  // The bound of decoding: every token reads its weights once. A prompt and a step of several sequences read
  // them once for many tokens, so only generation of one sequence has these.
  f["bytes_per_token"] = context.engine.bytes_per_token;
  std::optional<double> read, bandwidth, share;
  if (context.read_bytes_per_s > 0.0) bandwidth = context.read_bytes_per_s * 1e-9;
  if (result.test.n_prompt == 0 && result.test.n_gen > 0 && result.test.n_parallel == 1)
    read = static_cast<double>(context.engine.bytes_per_token) * result.avg_ts() * 1e-9;
  // Nor is it a share where the caches hold the weights: those are not read from memory.
  const uint64_t caches =
      cpu_info().l3_bytes + static_cast<uint64_t>(context.engine.n_threads) * cpu_info().l2_bytes;
  if (read && bandwidth && (!runs_on_processor(context.engine) || context.engine.bytes_per_token > caches))
    share = *read / *bandwidth;
  f["read_gb_s"] = optional_json(read);
  f["bandwidth_gb_s"] = optional_json(bandwidth);
  f["bandwidth_share"] = optional_json(share);
  f["n_rows"] = result.test.n_rows;
  f["cost_of_one"] = optional_json(result.cost_of_one);
  f["draft_budget"] = if_drafted(context.draft_budget);
  f["oracle"] = if_drafted(context.oracle);
  f["tokens_per_step"] = if_drafted(draft.tokens_per_step());
  f["draft_n"] = if_drafted(draft.n_drafted);
  f["draft_n_accepted"] = if_drafted(draft.n_accepted);
  f["draft_tried_by_depth"] = draft.tried_by_depth();
  f["draft_accepted_by_depth"] = draft.accepted_by_depth();
  f["draft_rounds"] = if_drafted(draft.n_rounds);
  f["plain_steps"] = if_drafted(draft.n_plain);
  f["draft_ns"] = if_drafted(static_cast<uint64_t>(1e9 * draft.draft_seconds));
  f["verify_ns"] = if_drafted(static_cast<uint64_t>(1e9 * draft.verify_seconds));
  f["commit_ns"] = if_drafted(static_cast<uint64_t>(1e9 * draft.commit_seconds));
  f["plain_ns"] = if_drafted(static_cast<uint64_t>(1e9 * draft.plain_seconds));
  f["draft_state"] = if_drafted(draft.state);
  f["ratio_to_plain"] = optional_json(result.ratio_to_plain);
  f["isa"] = isa_name(context.engine.isa);
  f["repack"] = context.engine.repacked;
  f["load_seconds"] = context.engine.load_seconds;

  f["distinct_experts"] =
      experts.routed_layers == 0
          ? Json(nullptr)
          : Json(static_cast<double>(experts.distinct_experts) / static_cast<double>(experts.routed_layers));
  f["cold_experts"] = if_split(static_cast<double>(experts.cold_experts) /
                               static_cast<double>(std::max<uint64_t>(1, experts.layer_steps)));
  f["expert_cache"] = context.setup.expert_cache;
  f["expert_total_bytes"] = experts.total_expert_bytes;
  f["expert_resident_bytes"] = experts.hot_expert_bytes;
  f["all_hot_ratio"] = if_split(static_cast<double>(experts.all_hot) /
                                static_cast<double>(std::max<uint64_t>(1, experts.layer_steps)));
  f["hot_bytes_per_token"] = if_split(per_token(experts.hot_bytes, experts));
  f["cpu_bytes_per_token"] = if_split(per_token(experts.cpu_bytes, experts));
  f["foreseen_ratio"] = if_split(static_cast<double>(experts.foreseen) /
                                 static_cast<double>(std::max<uint64_t>(1, experts.cold_experts)));
  f["ahead_bytes_per_token"] = if_split(per_token(experts.ahead_bytes, experts));
  f["parcels_sent"] = if_split(experts.parcels);
  f["parcels_in_time"] = if_split(experts.parcels_came);
  f["parcels_used"] = if_split(experts.parcels_used);
  f["parcels_kept"] = if_split(experts.parcels_kept);
  f["fetched_bytes_per_token"] = if_split(per_token(experts.fetched_bytes, experts));
  f["streamed_bytes_per_token"] = if_split(per_token(experts.streamed_bytes, experts));
  f["disk_bytes_per_token"] = if_split(per_token(experts.disk_bytes, experts));
  f["moe_stall_max_ns"] = if_split(experts.max_stall_ns);
  return f;
}

}  // namespace thermo
