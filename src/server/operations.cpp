#include "server/operations.h"

#include <dirent.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <ctime>
#include <map>

#include "base/log_control.h"
#include "base/process_watch.h"
#include "server/compat_metrics.h"
#include "server/experts_view.h"
#include "server/routes.h"

namespace thermo {
namespace {

std::string rfc3339(int64_t seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm utc{};
  gmtime_r(&time, &utc);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}Z", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday,
                     utc.tm_hour, utc.tm_min, utc.tm_sec);
}

void process_metrics(std::string& out, const ServerState& server) {
  write_family(out, "process_cpu_seconds_total", "counter", "Processor time of the process.",
               {{"", process_cpu_seconds()}});
  write_family(out, "process_virtual_memory_bytes", "gauge", "Address space in use.",
               {{"", static_cast<double>(virtual_bytes())}});
  write_family(out, "process_resident_memory_bytes", "gauge", "Memory in use.",
               {{"", static_cast<double>(resident_bytes())}});
  const auto entries = [](const char* folder) {
    double n = -2.0;  // . and ..
    DIR* const open = opendir(folder);
    if (open == nullptr) return 0.0;
    while (readdir(open) != nullptr) n += 1.0;
    closedir(open);
    return n;
  };
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  write_family(out, "process_open_fds", "gauge", "Open file descriptors.",
               {{"", entries("/proc/self/fd") - 1.0}});
  write_family(out, "process_max_fds", "gauge", "Descriptors that may be open.",
               {{"", static_cast<double>(limit.rlim_cur)}});
  write_family(out, "process_threads", "gauge", "Threads.", {{"", entries("/proc/self/task")}});
  write_family(out, "process_start_time_seconds", "gauge", "When the process began, since 1970.",
               {{"", static_cast<double>(server.started_at)}});
}

// What an item of the memory plan is, as dashboards group it.
const char* memory_kind(std::string_view item, bool on_host) {
  const auto has = [item](std::string_view word) { return item.find(word) != std::string_view::npos; };
  if (has("expert") || has("FFN parts")) return "experts";
  if (on_host)
    return has("kv") || has("cache") || item == "checkpoints" || has("recurrent") ? "cache" : "other";
  if (has("kv") || has("recurrent")) return "kv";
  return has("weights") || has("drafter") || has("norms") ? "weights" : "scratch";
}

void memory_metrics(std::string& out, const Json& plan) {
  std::vector<Sample> host, device, planned, taken;
  for (const Json& tier : plan.value("tiers", Json::array())) {
    const bool on_host = tier.value("name", "") == "host";
    const std::string name =
        on_host ? "" : fmt::format("device=\"{}\",", label_value(tier.value("name", "")));
    std::map<std::string, double> kinds;
    for (const Json& item : tier.value("items", Json::array()))
      kinds[memory_kind(item.value("name", ""), on_host)] += item.value("bytes", 0.0);
    const double free = tier.value("free_at_start", 0.0) - tier.value("planned", 0.0);
    if (!on_host) kinds["free"] = std::max(0.0, free);
    for (const auto& [kind, bytes] : kinds)
      (on_host ? host : device).push_back({fmt::format("{}kind=\"{}\"", name, kind), bytes});
    const std::string label = fmt::format("tier=\"{}\"", on_host ? "host" : "device");
    if (const Json bytes = tier.value("taken_at_load", Json(nullptr)); bytes.is_number()) {
      planned.push_back({label, tier.value("planned_at_load", 0.0)});
      taken.push_back({label, bytes.get<double>()});
    }
  }
  if (!taken.empty()) {
    write_family(out, "thermocline_memory_planned_bytes", "gauge", "Memory that loading was to take.",
                 planned);
    write_family(out, "thermocline_memory_taken_bytes", "gauge",
                 "Memory that loading took, as the system or the device tells.", taken);
  }
  write_family(out, "thermocline_host_memory_bytes", "gauge", "Main memory as it was planned.", host);
  if (!device.empty())
    write_family(out, "thermocline_device_memory_bytes", "gauge", "Device memory as it was planned.", device);
}

void gpu_metrics(std::string& out, const ServerState& server) {
  const std::optional<GpuReading>& gpu = server.gpu;
  if (!gpu) return;
  const std::string label = fmt::format("device=\"{}\"", label_value(server.model->meta.value("device", "")));
  const auto gauge = [&](const char* name, const char* help, const std::optional<double>& value) {
    if (value) write_family(out, name, "gauge", help, {{label, *value}});
  };
  gauge("thermocline_device_utilization_ratio", "Share of the time in which the card computed.",
        gpu->utilization);
  gauge("thermocline_device_power_watts", "Power that the card takes.", gpu->power_watts);
  gauge("thermocline_device_temperature_celsius", "Temperature of the card.", gpu->temperature_celsius);
}

double tokens_held(const TokenServiceState& state) {
  double held = 0.0;
  for (const SlotState& slot : state.slots) held += slot.n_held;
  return held;
}

double token_capacity(const TokenServiceState& state) {
  return static_cast<double>(state.slots.size()) * state.n_ctx;
}

void expert_metrics(std::string& out, const ServerState& server, const ExpertCounts& experts) {
  const auto n_cold = static_cast<double>(experts.n_uses - experts.hot_uses),
             n_hot = static_cast<double>(experts.hot_uses);
  write_family(out, "thermocline_expert_uses_total", "counter", "Uses of routed experts, by where they were.",
               {{"tier=\"device\"", experts.on_device ? n_hot : 0.0},
                {"tier=\"host\"", experts.on_device ? n_cold : n_hot},
                {"tier=\"file\"", experts.on_device ? 0.0 : n_cold}});
  if (server.experts != nullptr) {
    std::vector<Sample> tiers;
    for (const ExpertTier tier : {ExpertTier::Device, ExpertTier::Host, ExpertTier::File, ExpertTier::Moving})
      tiers.push_back(
          {fmt::format("tier=\"{}\"", tier_name(tier)), static_cast<double>(server.experts->n_in(tier))});
    write_family(out, "thermocline_experts", "gauge", "Routed experts, by where they are.", tiers);
  }
  std::vector<Sample> hits;
  for (const auto& [name, seconds] : {std::pair("1s", 1.0), {"60s", 60.0}}) {
    if (const LoadHistory::Window window = server.history.window(seconds); window.n_uses > 0)
      hits.push_back({fmt::format("window=\"{}\"", name), window.hot_ratio});
    if (!server.options.metrics_per_layer) continue;
    const std::vector<std::optional<double>> layers = server.history.layer_hits(seconds);
    for (size_t i = 0; i < layers.size(); ++i)
      if (layers[i]) hits.push_back({fmt::format("window=\"{}\",layer=\"{}\"", name, i), *layers[i]});
  }
  write_family(out, "thermocline_expert_hit_ratio", "gauge", "Share of the uses of experts that were hot.",
               hits);
  write_family(out, "thermocline_expert_moves_total", "counter", "Experts that became hot, and that left.",
               {{"direction=\"promote\"", static_cast<double>(experts.moved)},
                {"direction=\"demote\"", static_cast<double>(experts.evicted)}});
  write_family(out, "thermocline_expert_move_bytes_total", "counter",
               "Bytes copied for that; an expert that leaves is not copied.",
               {{"direction=\"promote\"", static_cast<double>(experts.moved_bytes)}});
  write_family(out, "thermocline_moe_stall_seconds_total", "counter",
               "Time in which one lane waited for another one: for the processor, the device, copies to the "
               "device, or the file.",
               {{"lane=\"cpu\"", static_cast<double>(experts.stall_ns) * 1e-9},
                {"lane=\"gpu\"", static_cast<double>(experts.device_wait_ns) * 1e-9},
                {"lane=\"copy\"", static_cast<double>(experts.copy_wait_ns) * 1e-9},
                {"lane=\"file\"", static_cast<double>(experts.disk_wait_ns) * 1e-9}});
}

void engine_metrics(std::string& out, const ServerState& server) {
  const ServedModel& model = *server.model;
  const TurnStore& turns = *server.turns;
  const TokenServiceState state = model.service->state();
  const auto gauge = [&](const char* name, const char* help, double value) {
    write_family(out, name, "gauge", help, {{"", value}});
  };
  gauge("thermocline_requests_running", "Requests that have a slot.", state.n_running);
  gauge("thermocline_requests_waiting", "Requests that wait for a slot.", state.n_waiting);
  gauge("thermocline_requests_paused", "Requests whose client does not keep up.", state.n_paused);
  gauge("thermocline_queue_oldest_seconds", "How long the oldest request has waited.",
        state.oldest_wait_seconds);
  gauge("thermocline_queue_limit", "Requests that may wait.", server.options.max_waiting);
  gauge("thermocline_decode_stall_limit_seconds", "How long prompts of others may hold up an answer.",
        std::chrono::duration<double>(server.options.max_decode_stall).count());
  gauge("thermocline_slots", "Requests that are computed together at most.",
        static_cast<double>(state.slots.size()));
  gauge("thermocline_kv_tokens_used", "Tokens whose keys and values are in memory.", tokens_held(state));
  gauge("thermocline_kv_tokens_capacity", "Tokens that memory holds.", token_capacity(state));
  // What a router of the Gateway API Inference Extension asks a model server for. Without a pool of pages a
  // slot is one block.
  const bool pages = state.n_pages > 0;
  gauge("thermocline_kv_cache_usage_ratio", "Share of the KV cache in use.", kv_cache_usage(state));
  write_family(
      out, "thermocline_cache_config_info", "gauge", "Blocks of the KV cache: tokens of one, and how many.",
      {{fmt::format("block_size=\"{}\",num_gpu_blocks=\"{}\"", pages ? state.page_tokens : state.n_ctx,
                    pages ? state.n_pages : static_cast<int>(state.slots.size())),
        1.0}});
  const CacheCounts& cache = state.cache;
  write_family(out, "thermocline_cache_bytes", "gauge", "Memory that caches have taken.",
               {{"tier=\"ram\"", static_cast<double>(cache.bytes)},
                {"tier=\"disk\"", static_cast<double>(cache.disk_bytes)},
                {"tier=\"turn_store\"", static_cast<double>(turns.bytes())}});
  write_family(out, "thermocline_cache_limit_bytes", "gauge", "Memory that caches may take.",
               {{"tier=\"ram\"", static_cast<double>(cache.limit_bytes)},
                {"tier=\"disk\"", static_cast<double>(cache.disk_limit_bytes)},
                {"tier=\"turn_store\"", static_cast<double>(turns.limit_bytes())}});
  write_family(out, "thermocline_prefix_cache_disk_texts_total", "counter",
               "Texts of the prefix cache that a disk was asked for.",
               {{"direction=\"read\"", static_cast<double>(cache.n_disk_read)},
                {"direction=\"write\"", static_cast<double>(cache.n_disk_written)}});
  gauge("thermocline_prefix_cache_spare_bytes", "Memory that the prefix cache has taken and nothing is in.",
        static_cast<double>(cache.spare_bytes));
  write_family(out, "thermocline_prefix_cache_memory_waits_total", "counter",
               "Blocks and checkpoints for which there was no spare memory, so that the system was asked.",
               {{"", static_cast<double>(cache.n_taken)}});
  gauge("thermocline_prefix_cache_tokens", "Tokens whose keys and values the prefix cache has.",
        static_cast<double>(cache.n_tokens));
  gauge("thermocline_prefix_cache_uncopied_tokens", "Of these, those that are still to be copied.",
        static_cast<double>(cache.n_uncopied));
  gauge("thermocline_prefix_cache_checkpoints", "Checkpoints of recurrent state in the prefix cache.",
        static_cast<double>(cache.n_points));
  write_family(out, "thermocline_prefix_cache_evictions_total", "counter",
               "Blocks and checkpoints pushed out of the prefix cache, and texts off its disk.",
               {{"tier=\"ram\"", static_cast<double>(cache.n_evicted)},
                {"tier=\"disk\"", static_cast<double>(cache.n_disk_evicted)}});
  write_family(out, "thermocline_prefix_cache_refusals_total", "counter",
               "Texts that the prefix cache had no room for.", {{"", static_cast<double>(cache.n_refused)}});
  gauge("thermocline_requests_parked", "Requests whose time slice is over and that wait for a slot.",
        state.n_parked);
  write_family(out, "thermocline_time_slices_total", "counter", "Time slices that ended.",
               {{"", static_cast<double>(state.n_parkings)}});
  write_family(out, "thermocline_decode_tokens_per_second", "gauge", "Tokens written per second.",
               {{"window=\"10s\"", state.decode_rate}});
  write_family(out, "thermocline_prefill_tokens_per_second", "gauge", "Prompt tokens computed per second.",
               {{"window=\"10s\"", state.prompt_rate}});
  const StepCounts& steps = state.steps;
  write_family(out, "thermocline_steps_total", "counter", "Steps of the model, by what their rows were.",
               {{"kind=\"prefill\"", static_cast<double>(steps.prefill)},
                {"kind=\"decode\"", static_cast<double>(steps.decode)},
                {"kind=\"mixed\"", static_cast<double>(steps.mixed)},
                {"kind=\"verify\"", static_cast<double>(steps.verify)}});
  expert_metrics(out, server, state.experts);
  const bool drafts = !state.draft.drafter.empty();
  const std::string drafter =
      fmt::format("drafter=\"{}\"", drafts ? label_value(state.draft.drafter) : "none");
  const auto counter = [&](const char* name, const char* help, uint64_t value) {
    write_family(out, name, "counter", help, {{drafter, static_cast<double>(value)}});
  };
  counter("thermocline_spec_rounds_total", "Steps that verified drafts.", state.draft.n_rounds);
  counter("thermocline_spec_drafted_tokens_total", "Tokens drafted.", state.draft.n_drafted);
  counter("thermocline_spec_accepted_tokens_total", "Of them, accepted.", state.draft.n_accepted);
}

}  // namespace

const char* dialect_name(Dialect dialect) {
  switch (dialect) {
    case Dialect::Chat:
      return "chat";
    case Dialect::Completions:
      return "completions";
    case Dialect::Responses:
      return "responses";
    case Dialect::Messages:
      return "messages";
    case Dialect::Native:
      break;
  }
  return "native";
}

HttpReply json_reply(const Json& body, int status) {
  HttpReply reply;
  reply.status = status;
  reply.body = body.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  return reply;
}

void require_model(const ServerState& server) {
  if (server.model == nullptr) {
    ApiError error(503, "model_loading", "the model is being loaded");
    error.extra = {{"progress", server.load_progress}};
    error.retry_seconds = 1;
    throw error;
  }
  if (const std::string fault = server.model->service->state().fault; !fault.empty()) {
    ApiError error(503, "engine_failed", fault);
    error.may_retry = false;
    throw error;
  }
}

ApiError shutting_down() {
  ApiError error(503, "shutting_down", "the server is shutting down");
  error.retry_seconds = 5;
  return error;
}

namespace {

// 503, and whether to come back in a second.
HttpReply not_now(const Json& body, bool may_retry) {
  HttpReply reply = json_reply(body, 503);
  reply.headers = {
      {"Retry-After", "1"}, {"retry-after-ms", "1000"}, {"x-should-retry", may_retry ? "true" : "false"}};
  return reply;
}

}  // namespace

HttpReply health_reply(const ServerState& server) {
  try {
    require_model(server);
    return json_reply({{"status", "ok"}});
  } catch (const ApiError& error) {
    const bool loading = error.code == "model_loading";
    Json body = {{"status", loading ? "loading" : "failed"}};
    if (loading) {
      body["progress"] = server.load_progress;
      body["stage"] = server.load_stage;
    }
    body["error"] = {{"code", error.code},
                     {"message", loading ? "Loading model" : error.what()},
                     {"type", "service_unavailable"}};
    return not_now(body, error.may_retry);
  }
}

bool queue_is_full(const ServerState& server) {
  const TokenServiceState state = server.model->service->state();
  const int n_free = static_cast<int>(state.slots.size()) - state.n_running;
  return state.n_waiting - n_free >= server.options.max_waiting;
}

HttpReply ready_reply(const ServerState& server) {
  std::string reason;
  bool may_retry = true;
  if (server.draining) {
    reason = "shutting_down";
  } else {
    try {
      require_model(server);
    } catch (const ApiError& error) {
      reason = error.code;
      may_retry = error.may_retry;
    }
  }
  if (reason.empty() && queue_is_full(server)) reason = "server_is_overloaded";
  if (reason.empty()) return json_reply({{"status", "ready"}});
  return not_now({{"status", "not ready"}, {"reason", reason}}, may_retry);
}

Json models_json(const ServerState& server) {
  Json data = Json::array();
  if (server.model != nullptr)
    data.push_back(model_json(server, server.model->id));
  else if (!server.options.loading_id.empty())
    data.push_back({{"id", server.options.loading_id},
                    {"object", "model"},
                    {"created", server.started_at},
                    {"owned_by", "thermocline"},
                    {"type", "model"},
                    {"display_name", server.options.loading_id},
                    {"created_at", rfc3339(server.started_at)},
                    {"status", "loading"}});
  Json list = {{"object", "list"}, {"has_more", false}};
  list["first_id"] = data.empty() ? Json(nullptr) : data.front()["id"];
  list["last_id"] = data.empty() ? Json(nullptr) : data.back()["id"];
  list["data"] = std::move(data);
  if (server.model == nullptr) list["status"] = "loading";
  return list;
}

Json model_json(const ServerState& server, const std::string& id) {
  const ServedModel* model = server.model.get();
  const bool known = model != nullptr &&
                     (id == model->id ||
                      std::find(model->aliases.begin(), model->aliases.end(), id) != model->aliases.end());
  if (!known)
    throw ApiError(404, "model_not_found", fmt::format("there is no model called '{}'", id), "model");
  const int n_ctx = model->service->n_ctx();
  Json meta = model->meta;
  meta["n_ctx"] = n_ctx;
  return {{"id", model->id},
          {"object", "model"},
          {"created", server.started_at},
          {"owned_by", "thermocline"},
          {"type", "model"},
          {"display_name", model->id},
          {"created_at", rfc3339(server.started_at)},
          {"max_model_len", n_ctx},
          {"context_length", n_ctx},
          {"max_input_tokens", n_ctx},
          {"max_tokens", std::min(n_ctx, server.options.default_max_tokens)},
          {"aliases", model->aliases},
          {"capabilities", Json::array({"chat", "tools", "reasoning", "json_schema"})},
          {"meta", std::move(meta)}};
}

int retry_seconds(const ServerState& server) {
  if (server.model == nullptr) return 1;
  const TokenServiceState state = server.model->service->state();
  constexpr double kAnswerTokens = 256.0;  // nobody knows how long answers get
  double seconds = 1.0;
  if (state.prompt_rate > 0.0) seconds += static_cast<double>(state.waiting_tokens) / state.prompt_rate;
  if (state.decode_rate > 0.0)
    seconds += (state.n_waiting + state.n_running) * kAnswerTokens / state.decode_rate;
  return static_cast<int>(std::clamp(seconds, 1.0, 60.0));
}

double kv_cache_usage(const TokenServiceState& state) {
  if (state.n_pages > 0) return 1.0 - static_cast<double>(state.n_pages_free) / state.n_pages;
  const double capacity = token_capacity(state);
  return capacity > 0.0 ? tokens_held(state) / capacity : 0.0;
}

std::string metrics_text(const ServerState& server) {
  std::string out;
  const Json& version = server.options.version;
  write_family(
      out, "thermocline_build_info", "gauge", "Which build this is.",
      {{fmt::format("version=\"{}\",commit=\"{}\",cuda=\"{}\"", label_value(version.value("version", "")),
                    label_value(version.value("commit", "")), version.value("cuda", false)),
        1.0}});
  const bool failed = server.model != nullptr && !server.model->service->state().fault.empty();
  const bool ready = server.model != nullptr && !failed && !server.draining;
  write_family(out, "thermocline_up_state", "gauge", "1 for the state that the server is in.",
               {{"state=\"loading\"", server.model == nullptr ? 1.0 : 0.0},
                {"state=\"ready\"", ready ? 1.0 : 0.0},
                {"state=\"draining\"", server.draining ? 1.0 : 0.0},
                {"state=\"failed\"", failed ? 1.0 : 0.0}});
  write_family(out, "thermocline_load_progress_ratio", "gauge", "How much of the model is loaded.",
               {{"", server.model != nullptr ? 1.0 : server.load_progress}});
  if (server.model != nullptr) {
    const auto meta = [&](const char* name) {
      const Json& value = server.model->meta.value(name, Json(""));
      return label_value(value.is_string() ? value.get<std::string>() : value.dump());
    };
    write_family(
        out, "thermocline_model_info", "gauge", "What is served.",
        {{fmt::format(
              "model=\"{}\",arch=\"{}\",quant=\"{}\",n_expert=\"{}\",n_expert_used=\"{}\",n_ctx=\"{}\"",
              label_value(server.model->id), meta("arch"), meta("quant"), meta("n_expert"),
              meta("n_expert_used"), server.model->service->n_ctx()),
          1.0}});
    engine_metrics(out, server);
    memory_metrics(out, server.model->plan);
    gpu_metrics(out, server);
  }
  std::vector<Sample> lines;
  for (const auto& [name, level] : {std::pair("error", LogLevel::Error),
                                    {"warning", LogLevel::Warning},
                                    {"info", LogLevel::Info},
                                    {"trace", LogLevel::Trace},
                                    {"debug", LogLevel::Debug}})
    lines.push_back({fmt::format("level=\"{}\"", name), static_cast<double>(n_log_lines(level))});
  write_family(out, "thermocline_log_messages_total", "counter", "Lines written to the log.", lines);
  out += server.metrics.text();
  write_compat_metrics(out, server);
  process_metrics(out, server);
  return out;
}

}  // namespace thermo
