#include "server/request_metrics.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/log_fields.h"
#include "server/request_body.h"
#include "server/server_state.h"

namespace thermo {

namespace {

void count_repairs(Metrics& metrics, const ToolCallRepairs& repairs) {
  const auto count = [&](const char* kind, int n) {
    if (n > 0) metrics.count("thermocline_tool_call_repairs_total", fmt::format("kind=\"{}\"", kind), n);
  };
  count("value_closed", repairs.values_closed);
  count("call_closed", repairs.calls_closed);
  count("repeated_key", repairs.repeated_keys);
  count("bare_function", repairs.bare_functions);
  count("json_body", repairs.json_bodies);
  count("dropped_text", repairs.dropped_texts);
  if (repairs.unknown_tools > 0)
    metrics.count("thermocline_tool_calls_total", "result=\"unknown_name\"", repairs.unknown_tools);
}

void count_tokens(Metrics& metrics, const Answer& answer) {
  const AnswerStats& stats = answer.stats;
  metrics.count("thermocline_prompt_tokens_total", "source=\"computed\"", stats.n_prompt - stats.n_cached);
  metrics.count("thermocline_prompt_tokens_total", "source=\"cached\"", stats.n_cached);
  const int n_reasoning = answer.n_reasoning_tokens - answer.n_forced_reasoning_tokens;
  const int n_content = stats.n_completion - n_reasoning - answer.n_call_tokens - answer.n_forced_tokens;
  metrics.count("thermocline_generated_tokens_total", "kind=\"reasoning\"", std::max(0, n_reasoning));
  metrics.count("thermocline_generated_tokens_total", "kind=\"tool\"", answer.n_call_tokens);
  metrics.count("thermocline_generated_tokens_total", "kind=\"forced\"", answer.n_forced_tokens);
  metrics.count("thermocline_generated_tokens_total", "kind=\"content\"", std::max(0, n_content));
}

}  // namespace

void take_unfinished(const AnswerParser& parser, const AnswerStats& so_far, Answer& answer) {
  answer.stats = so_far;
  answer.n_reasoning_tokens = parser.n_reasoning_tokens();
  answer.n_call_tokens = static_cast<int>(parser.call_tokens().size());
}

void count_answer(Metrics& metrics, const GenerationRequest& request, const Answer& answer) {
  const AnswerStats& stats = answer.stats;
  count_tokens(metrics, answer);
  metrics.count("thermocline_prefix_cache_lookups_total", stats.n_cached == 0 ? "result=\"miss\""
                                                          : stats.n_cached + 1 < stats.n_prompt
                                                              ? "result=\"partial\""
                                                              : "result=\"hit\"");
  if (stats.draft.n_rounds > 0)
    metrics.observe("thermocline_spec_accepted_length", stats.draft.accept_length(),
                    fmt::format("drafter=\"{}\"", label_value(stats.draft.drafter)));
  if (request.format.kind != OutputFormat::Kind::Text)
    metrics.count("thermocline_structured_outputs_total",
                  answer.finish_reason == "length" ? "result=\"truncated\"" : "result=\"ok\"");
  metrics.count("thermocline_prefill_seconds_total", "", stats.prompt_seconds);
  metrics.count("thermocline_decode_seconds_total", "", stats.predicted_seconds);
  metrics.observe("thermocline_prefill_duration_seconds", stats.prompt_seconds);
  metrics.observe("thermocline_decode_duration_seconds", stats.predicted_seconds);
  metrics.observe("thermocline_queue_wait_seconds", stats.queue_seconds);
  metrics.observe("thermocline_time_to_first_token_seconds", stats.first_token_seconds,
                  fmt::format("dialect=\"{}\"", dialect_name(request.dialect)));
  metrics.observe("thermocline_request_prompt_tokens", stats.n_prompt);
  metrics.observe("thermocline_request_generated_tokens", stats.n_completion);
  if (stats.n_completion > 1)
    metrics.observe("thermocline_time_per_output_token_seconds",
                    stats.predicted_seconds / (stats.n_completion - 1));
  for (const ToolCall& call : answer.tool_calls)
    metrics.count("thermocline_tool_calls_total", !call.complete  ? "result=\"truncated\""
                                                  : call.repaired ? "result=\"recovered\""
                                                                  : "result=\"ok\"");
  count_repairs(metrics, answer.repairs);
  if (answer.n_reasoning_tokens > 0)
    metrics.count(
        "thermocline_reasoning_closed_total",
        fmt::format("how=\"{}\"", stats.reasoning_close.empty() ? "natural" : stats.reasoning_close));
}

void count_request(Metrics& metrics, const ServerOptions& options, const EndedRequest& ended) {
  const std::string dialect = fmt::format("dialect=\"{}\"", dialect_name(ended.request.dialect));
  const std::string reason = ended.answers.empty() ? "" : ended.answers.front()->finish_reason;
  metrics.count(
      "thermocline_requests_total",
      fmt::format("{},outcome=\"{}\",finish_reason=\"{}\"{}", dialect, ended.outcome, reason,
                  options.metrics_per_key ? fmt::format(",key=\"{}\"", label_value(ended.key_name)) : ""));
  metrics.observe("thermocline_request_duration_seconds", ended.seconds, dialect);
  if (!ended.request.ignored_fields.empty())
    metrics.count("thermocline_ignored_fields_total", "",
                  static_cast<double>(ended.request.ignored_fields.size()));
  int n_prompt = 0, n_cached = 0, n_out = 0;
  double ttft = 0.0, rate = 0.0;
  for (const Answer* const answer : ended.answers) {
    const AnswerStats& stats = answer->stats;
    const bool is_whole = !answer->finish_reason.empty();
    if (!is_whole && stats.n_prompt == 0) continue;  // nothing was computed
    n_prompt += stats.n_prompt;
    n_cached += stats.n_cached;
    n_out += stats.n_completion;
    ttft = stats.first_token_seconds;
    rate = stats.predicted_rate();
    if (is_whole)
      count_answer(metrics, ended.request, *answer);
    else
      count_tokens(metrics, *answer);
  }
  if (!log_enabled(LogLevel::Info)) return;
  const std::string dialect_of_it = dialect_name(ended.request.dialect);
  LogFields fields = {{"req", ended.http.id}, {"dialect", dialect_of_it}, {"outcome", ended.outcome}};
  std::string line = fmt::format("req={} {}", ended.http.id, dialect_of_it);
  const auto add = [&](const char* name, const std::string& value) {
    if (value.empty()) return;
    line += fmt::format(" {}={}", name, value);
    fields.push_back({name, value});
  };
  add("key", ended.key_name);
  add("trace", trace_id(ended.http.header("traceparent")));
  line += fmt::format(" {}", ended.outcome);
  add("phase", ended.phase);
  line += fmt::format(" prompt={} ({} cached) out={} ttft={:.2f}s {:.1f} tok/s {}", n_prompt, n_cached, n_out,
                      ttft, rate, reason);
  for (const auto& [name, value] :
       {std::pair("prompt_tokens", n_prompt), {"cached_tokens", n_cached}, {"generated_tokens", n_out}})
    fields.push_back({name, int64_t{value}});
  for (const auto& [name, value] : {std::pair("time_to_first_token_seconds", ttft),
                                    {"tokens_per_second", rate},
                                    {"request_duration_seconds", ended.seconds}})
    fields.push_back({name, value});
  fields.push_back({"finish_reason", reason});
  log_with_fields(LogLevel::Info, "server", line, fields);
}

void count_constraints(Metrics& metrics, const PreparedRequest& prepared) {
  if (prepared.constraints.empty()) return;
  metrics.observe("thermocline_grammar_compile_seconds", prepared.constraint_seconds);
  for (const auto& constraint : prepared.constraints)
    if (constraint->n_masks() > 0)
      metrics.observe("thermocline_grammar_mask_seconds", constraint->mask_seconds() / constraint->n_masks());
}

void note_divergence(Metrics& metrics, const Tokenizer& tokenizer, const std::string& request_id,
                     std::span<const TokenId> prompt, const TokenUsage& usage) {
  const int n_again = usage.n_known - usage.n_cached;
  if (n_again > 0) metrics.count("thermocline_prompt_divergence_tokens_total", "", n_again);
  const auto at = static_cast<size_t>(usage.n_known);
  if (!log_enabled(LogLevel::Debug) || usage.known_next.empty() || at >= prompt.size()) return;
  const auto shown = [&](std::span<const TokenId> ids) {
    constexpr size_t kShownBytes = 40;
    const std::string text = tokenizer.decode(ids.first(std::min<size_t>(ids.size(), 16)), {.special = true});
    return Json(text.substr(0, kShownBytes)).dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  log_message(
      LogLevel::Debug, "server",
      fmt::format("req={} the prompt leaves a known text at token {} (cached {}): {} instead of {}",
                  request_id, at, usage.n_cached, shown(prompt.subspan(at)), shown(usage.known_next)));
}

}  // namespace thermo
