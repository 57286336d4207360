#include "server/compat_metrics.h"

#include <fmt/format.h>

#include "server/operations.h"

namespace thermo {
namespace {

constexpr const char* kPromptTokens = "thermocline_prompt_tokens_total";
constexpr const char* kWrittenTokens = "thermocline_generated_tokens_total";
constexpr const char* kCached = "source=\"cached\"";

void write_llamacpp(std::string& out, const Metrics& metrics, const TokenServiceState& state) {
  const auto counter = [&](const char* name, const char* help, double value) {
    write_family(out, fmt::format("llamacpp:{}", name), "counter", help, {{"", value}});
  };
  const auto gauge = [&](const char* name, const char* help, double value) {
    write_family(out, fmt::format("llamacpp:{}", name), "gauge", help, {{"", value}});
  };
  counter("prompt_tokens_total", "Prompt tokens computed.",
          metrics.sum(kPromptTokens, "source=\"computed\""));
  counter("prompt_tokens_cached_total", "Prompt tokens found in the cache.",
          metrics.sum(kPromptTokens, kCached));
  counter("prompt_seconds_total", "Time requests spent reading prompts.",
          metrics.sum("thermocline_prefill_seconds_total"));
  counter("tokens_predicted_total", "Tokens written.", metrics.sum(kWrittenTokens));
  counter("tokens_predicted_seconds_total", "Time requests spent writing.",
          metrics.sum("thermocline_decode_seconds_total"));
  gauge("prompt_tokens_seconds", "Prompt tokens computed per second.", state.prompt_rate);
  gauge("predicted_tokens_seconds", "Tokens written per second.", state.decode_rate);
  gauge("requests_processing", "Requests that have a slot.", state.n_running);
  gauge("requests_deferred", "Requests that wait for a slot.", state.n_waiting);
  counter("n_decode_total", "Steps of the model.", static_cast<double>(state.steps.n()));
  gauge("n_busy_slots_per_decode", "Mean number of requests in a step.",
        state.steps.n() == 0
            ? 0.0
            : static_cast<double>(state.n_busy_slots) / static_cast<double>(state.steps.n()));
  counter("spec_decode_num_drafts_total", "Steps that verified drafts.",
          static_cast<double>(state.draft.n_rounds));
  counter("spec_decode_num_draft_tokens_total", "Tokens drafted.",
          static_cast<double>(state.draft.n_drafted));
  counter("spec_decode_num_accepted_tokens_total", "Of them, accepted.",
          static_cast<double>(state.draft.n_accepted));
}

void write_vllm(std::string& out, const ServedModel& model, const Metrics& metrics,
                const TokenServiceState& state) {
  const std::string labels = fmt::format("model_name=\"{}\"", label_value(model.id));
  const auto family = [&](const char* name, const char* type, const char* help, double value) {
    write_family(out, fmt::format("vllm:{}", name), type, help, {{labels, value}});
  };
  family("num_requests_running", "gauge", "Requests that have a slot.", state.n_running);
  family("num_requests_waiting", "gauge", "Requests that wait for a slot.", state.n_waiting);
  family("kv_cache_usage_perc", "gauge", "Share of the KV cache in use; 1 is all of it.",
         kv_cache_usage(state));
  family("prefix_cache_queries_total", "counter", "Prompt tokens looked up in the prefix cache.",
         metrics.sum(kPromptTokens));
  family("prefix_cache_hits_total", "counter", "Prompt tokens found in the prefix cache.",
         metrics.sum(kPromptTokens, kCached));
  family("prompt_tokens_total", "counter", "Prompt tokens, computed or found in the cache.",
         metrics.sum(kPromptTokens));
  family("generation_tokens_total", "counter", "Tokens written.", metrics.sum(kWrittenTokens));
  std::vector<Sample> ended;
  for (const char* reason : {"stop", "length", "tool_calls"})
    ended.push_back({fmt::format("{},finished_reason=\"{}\"", labels, reason),
                     metrics.sum("thermocline_requests_total",
                                 fmt::format("outcome=\"ok\",finish_reason=\"{}\"", reason))});
  write_family(out, "vllm:request_success_total", "counter", "Requests answered, by how the answer ended.",
               ended);
  const auto histogram = [&](const char* ours, const char* name, const char* help) {
    metrics.write_histogram(out, ours, fmt::format("vllm:{}", name), help, labels);
  };
  histogram("thermocline_time_to_first_token_seconds", "time_to_first_token_seconds",
            "From the request to its first token.");
  histogram("thermocline_inter_token_seconds", "inter_token_latency_seconds",
            "Time between events of a stream.");
  histogram("thermocline_request_duration_seconds", "e2e_request_latency_seconds",
            "From the request to its last byte.");
  histogram("thermocline_queue_wait_seconds", "request_queue_time_seconds",
            "Time until a request got a slot.");
  histogram("thermocline_prefill_duration_seconds", "request_prefill_time_seconds", "Time to read a prompt.");
  histogram("thermocline_decode_duration_seconds", "request_decode_time_seconds", "Time to write an answer.");
}

}  // namespace

void write_compat_metrics(std::string& out, const ServerState& server) {
  if (server.model == nullptr) return;
  const TokenServiceState state = server.model->service->state();
  if (server.options.metrics_as_llamacpp) write_llamacpp(out, server.metrics, state);
  if (server.options.metrics_as_vllm) write_vllm(out, *server.model, server.metrics, state);
}

}  // namespace thermo
