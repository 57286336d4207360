#include "chat/reply_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <random>

namespace thermo {

Json logprob_entry(const TokenLogprob& logprob, const Tokenizer& tokenizer) {
  const std::string_view bytes = tokenizer.token_bytes(logprob.id);
  Utf8Assembler assembler;
  std::string text = assembler.push(bytes);
  text += assembler.finish();
  Json list = Json::array();
  for (char c : bytes) list.push_back(static_cast<unsigned char>(c));
  Json entry;
  entry["token"] = text;
  entry["logprob"] = std::isfinite(logprob.logprob) ? static_cast<double>(logprob.logprob) : -9999.0;
  entry["bytes"] = std::move(list);
  return entry;
}

Json logprob_entries(std::span<const GeneratedToken> tokens, const Tokenizer& tokenizer) {
  Json entries = Json::array();
  for (const GeneratedToken& token : tokens) {
    Json entry = logprob_entry(token.logprobs.front(), tokenizer);
    entry["top_logprobs"] = Json::array();
    for (size_t i = 1; i < token.logprobs.size(); ++i)
      entry["top_logprobs"].push_back(logprob_entry(token.logprobs[i], tokenizer));
    entries.push_back(std::move(entry));
  }
  return entries;
}

Json logprobs_json(std::span<const GeneratedToken> tokens, const Tokenizer& tokenizer) {
  if (tokens.empty()) return nullptr;
  return Json{{"content", logprob_entries(tokens, tokenizer)}, {"refusal", nullptr}};
}

Json usage_json(const AnswerStats& stats, int n_reasoning) {
  Json usage;
  usage["prompt_tokens"] = stats.n_prompt;
  usage["completion_tokens"] = stats.n_completion;
  usage["total_tokens"] = stats.n_prompt + stats.n_completion;
  usage["prompt_tokens_details"] = {{"cached_tokens", stats.n_cached}, {"audio_tokens", 0}};
  usage["completion_tokens_details"] = {
      {"reasoning_tokens", n_reasoning},
      {"audio_tokens", 0},
      {"accepted_prediction_tokens", stats.draft.n_accepted},
      {"rejected_prediction_tokens", stats.draft.n_drafted - stats.draft.n_accepted}};
  return usage;
}

namespace {

void add_draft_timings(const DraftTelemetry& draft, Json& timings) {
  timings["tokens_per_step"] = draft.tokens_per_step();
  timings["draft_rounds"] = draft.n_rounds;
  timings["plain_steps"] = draft.n_plain;
  timings["draft_tried_by_depth"] = draft.tried_by_depth();
  timings["draft_accepted_by_depth"] = draft.accepted_by_depth();
  timings["draft_ms"] = draft.draft_seconds * 1e3;
  timings["verify_ms"] = draft.verify_seconds * 1e3;
  timings["commit_ms"] = draft.commit_seconds * 1e3;
  timings["plain_ms"] = draft.plain_seconds * 1e3;
  timings["draft_state"] = draft.state;
  const bool counted = draft.n_experts > 0;  // all experts of a card are not
  timings["verify_experts_per_layer"] = counted ? Json(draft.experts_per_layer()) : Json(nullptr);
  timings["verify_cold_experts_per_layer"] =
      draft.n_layers > 0 ? Json(draft.cold_experts_per_layer()) : Json(nullptr);
}

}  // namespace

Json timings_json(const AnswerStats& stats) {
  const int n_evaluated = stats.n_prompt - stats.n_cached;
  const auto per_token_ms = [](double seconds, int n) { return n > 0 ? seconds * 1e3 / n : 0.0; };
  Json timings;
  timings["cache_n"] = stats.n_cached;
  timings["prompt_n"] = n_evaluated;
  timings["prompt_ms"] = stats.prompt_seconds * 1e3;
  timings["prompt_per_token_ms"] = per_token_ms(stats.prompt_seconds, n_evaluated);
  timings["prompt_per_second"] = stats.prompt_rate();
  timings["predicted_n"] = stats.n_completion;
  timings["predicted_ms"] = stats.predicted_seconds * 1e3;
  timings["predicted_per_token_ms"] =
      per_token_ms(stats.predicted_seconds, std::max(stats.n_completion - 1, 0));
  timings["predicted_per_second"] = stats.predicted_rate();
  timings["queue_ms"] = stats.queue_seconds * 1e3;
  timings["ttft_ms"] = stats.first_token_seconds * 1e3;
  timings["seed"] = stats.seed;
  timings["reasoning_close"] = stats.reasoning_close.empty() ? "none" : stats.reasoning_close;
  const DraftTelemetry& draft = stats.draft;
  timings["draft_n"] = draft.n_drafted;
  timings["draft_n_accepted"] = draft.n_accepted;
  timings["drafter"] = draft.drafter.empty() ? Json(nullptr) : Json(draft.drafter);
  timings["accept_len"] = draft.n_rounds == 0 ? Json(nullptr) : Json(draft.accept_length());
  if (!draft.drafter.empty()) add_draft_timings(draft, timings);
  timings["experts_hot_ratio"] = stats.experts_hot_ratio ? Json(*stats.experts_hot_ratio) : Json(nullptr);
  return timings;
}

namespace {

std::string random_id(const char* prefix) {
  std::random_device device;
  return fmt::format("{}-{:08x}{:08x}{:08x}", prefix, device(), device(), device());
}

Json tool_calls_json(const std::vector<ToolCall>& calls) {
  Json list = Json::array();
  for (const ToolCall& call : calls)
    list.push_back({{"id", call.id.empty() ? random_id("call") : call.id},
                    {"type", "function"},
                    {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
  return list;
}

}  // namespace

Json message_json(const Answer& answer) {
  Json message;
  message["role"] = "assistant";
  message["content"] = answer.content;
  if (!answer.reasoning.empty()) {
    message["reasoning_content"] = answer.reasoning;
    message["reasoning"] = answer.reasoning;
  }
  if (!answer.tool_calls.empty()) {
    if (answer.content.empty()) message["content"] = nullptr;
    message["tool_calls"] = tool_calls_json(answer.tool_calls);
  }
  message["refusal"] = nullptr;
  message["annotations"] = Json::array();
  return message;
}

std::string reply_json(const Answer& answer, const Tokenizer& tokenizer, const ReplyIdentity& identity,
                       bool raw) {
  Json choice;
  choice["index"] = 0;
  if (raw)
    choice["text"] = answer.content;
  else
    choice["message"] = message_json(answer);
  choice["logprobs"] = logprobs_json(answer.logprobs.content, tokenizer);
  choice["finish_reason"] = answer.finish_reason;

  Json reply;
  reply["id"] = random_id(raw ? "cmpl" : "chatcmpl");
  reply["object"] = raw ? "text_completion" : "chat.completion";
  reply["created"] = static_cast<int64_t>(std::time(nullptr));
  reply["model"] = identity.model;
  reply["system_fingerprint"] = identity.fingerprint;
  reply["service_tier"] = "default";
  reply["choices"] = Json::array({std::move(choice)});
  reply["usage"] = usage_json(answer.stats, answer.n_reasoning_tokens);
  reply["timings"] = timings_json(answer.stats);
  return reply.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace thermo
