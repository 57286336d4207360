// Replies of /v1/responses. Every event has a sequence number without gaps; an item is done before the next
// one is added, and what is streamed is what the last event holds.
#include <fmt/format.h>

#include <ctime>

#include "chat/reply_json.h"
#include "server/api/plain_number.h"
#include "server/api/reply_writer.h"
#include "server/api/sealed_reasoning.h"

namespace thermo {
namespace {

Json usage_of(const AnswerStats& stats, int n_reasoning) {
  return {{"input_tokens", stats.n_prompt},
          {"input_tokens_details", {{"cached_tokens", stats.n_cached}, {"cache_write_tokens", 0}}},
          {"output_tokens", stats.n_completion},
          {"output_tokens_details", {{"reasoning_tokens", n_reasoning}}},
          {"total_tokens", stats.n_prompt + stats.n_completion}};
}

// The codes of failed responses that clients know. They do not try again after invalid_prompt.
const char* failure_code(const ApiError& error) {
  if (error.code == "context_length_exceeded") return "context_length_exceeded";
  if (error.status == 400 || error.code == "cancelled") return "invalid_prompt";
  const bool busy =
      error.status == 429 || error.code == "server_is_overloaded" || error.code == "queue_timeout";
  return busy ? "rate_limit_exceeded" : "server_error";
}

class ResponsesWriter : public ReplyWriter {
 public:
  using ReplyWriter::ReplyWriter;

  std::string begin(int) override {
    // One after the other: they are numbered.
    std::string out = event("response.created", {{"response", response("in_progress", nullptr)}});
    return out += heartbeat();
  }

  std::string pieces(int, const AnswerParser::Events& events, const AnswerLogprobs& logprobs_of) override {
    std::span<const GeneratedToken> tokens = logprobs_of.content;
    std::string out;
    for (const AnswerEvent& one : events) {
      switch (one.kind) {
        case AnswerEvent::Kind::Reasoning:
          out += open(Kind::Reasoning);
          text_ += one.text;
          out += part_event("response.reasoning_text.delta", delta(one.text));
          break;
        case AnswerEvent::Kind::Content: {
          out += open(Kind::Message);
          text_ += one.text;
          const Json logprobs = entries(tokens);
          for (const Json& entry : logprobs) logprobs_.push_back(entry);
          Json text = delta(one.text);
          text["logprobs"] = logprobs;
          out += part_event("response.output_text.delta", std::move(text));
          tokens = {};
          break;
        }
        case AnswerEvent::Kind::CallBegin:
          out += close("completed");
          name_ = one.text;
          call_ = one.call;
          out += open(origin().custom ? Kind::Custom : Kind::Call);
          break;
        case AnswerEvent::Kind::CallArguments:
          text_ += one.text;
          if (kind_ == Kind::Call)
            out += item_event("response.function_call_arguments.delta", delta(one.text));
          break;
        case AnswerEvent::Kind::CallEnd:
          out += close("completed");
          break;
      }
    }
    return out;
  }

  std::string finish(int, const Answer& answer) override {
    return close(answer.finish_reason == "length" ? "incomplete" : "completed");
  }

  std::string end(std::span<const Answer> answers) override {
    const Answer& answer = answers.front();
    const bool cut = answer.finish_reason == "length";
    // Beside the response, too: there other dialects have them.
    return event(cut ? "response.incomplete" : "response.completed",
                 {{"response", finished(answer)}, {"timings", timings_json(answer.stats)}});
  }

  std::string fail(const ApiError& error) override {
    Json failed = response("failed", nullptr);
    std::string message = error.what();
    // Codex waits for so long.
    if (error.retry_seconds > 0) message += fmt::format(". Please try again in {}s.", error.retry_seconds);
    failed["error"] = {{"code", failure_code(error)}, {"message", std::move(message)}};
    return event("response.failed", {{"response", std::move(failed)}});
  }

  std::string heartbeat() override {
    return event("response.in_progress", {{"response", response("in_progress", nullptr)}});
  }

  std::string progress(int done, int total, int cached, double ms) override {
    return event(
        "response.in_progress",
        {{"response", response("in_progress", nullptr)},
         {"prompt_progress", {{"total", total}, {"cache", cached}, {"processed", done}, {"time_ms", ms}}}});
  }

  Json whole(std::span<const Answer> answers) override {
    const Answer& answer = answers.front();
    // The same items as in a stream, made of the same pieces.
    AnswerParser::Events events;
    if (!answer.reasoning.empty()) events.push_back({AnswerEvent::Kind::Reasoning, answer.reasoning, -1});
    if (!answer.content.empty()) events.push_back({AnswerEvent::Kind::Content, answer.content, -1});
    for (size_t i = 0; i < answer.tool_calls.size(); ++i) {
      const ToolCall& call = answer.tool_calls[i];
      events.push_back({AnswerEvent::Kind::CallBegin, call.name, static_cast<int>(i)});
      events.push_back({AnswerEvent::Kind::CallArguments, call.arguments, static_cast<int>(i)});
      if (call.complete) events.push_back({AnswerEvent::Kind::CallEnd, "", static_cast<int>(i)});
    }
    pieces(0, events, answer.logprobs);
    finish(0, answer);
    return finished(answer);
  }

 private:
  enum class Kind { None, Reasoning, Message, Call, Custom };

  std::string event(const char* type, Json data) {
    Json all = {{"type", type}, {"sequence_number", n_events_++}};
    all.update(data);
    return sse_event(type, all);
  }
  std::string item_event(const char* type, Json data) {
    Json all = {{"item_id", item_id_}, {"output_index", output_.size()}};
    all.update(data);
    return event(type, std::move(all));
  }
  std::string part_event(const char* type, Json data) {
    Json all = {{"content_index", 0}};
    all.update(data);
    return item_event(type, std::move(all));
  }
  // The next piece of an item, with what is measured so far where that is asked for.
  Json delta(const std::string& text) const {
    Json all = {{"delta", text}};
    if (so_far_) all["timings"] = running_timings();
    return all;
  }

  ToolOrigin origin() const {
    const auto found = request().tool_origins.find(name_);
    return found == request().tool_origins.end() ? ToolOrigin{.name = name_} : found->second;
  }

  Json entries(std::span<const GeneratedToken> tokens) const {
    return tokens.empty() ? Json::array() : logprob_entries(tokens, *context_.tokenizer);
  }

  // The item that is open, with what it has so far.
  Json item(const char* status, bool empty) const {
    const std::string text = empty ? "" : text_;
    Json out;
    switch (kind_) {
      case Kind::None:
        break;
      case Kind::Reasoning:
        out = {{"type", "reasoning"}, {"id", item_id_}, {"status", status}, {"summary", Json::array()}};
        out["content"] = empty ? Json::array() : Json::array({part(text)});
        out["encrypted_content"] =
            request().seal_reasoning && !empty ? Json(seal_reasoning(text)) : Json(nullptr);
        break;
      case Kind::Message:
        out = {{"type", "message"}, {"id", item_id_}, {"role", "assistant"}, {"status", status}};
        out["content"] = empty ? Json::array() : Json::array({part(text)});
        break;
      case Kind::Call:
      case Kind::Custom: {
        const ToolOrigin from = origin();
        out = {{"type", kind_ == Kind::Call ? "function_call" : "custom_tool_call"},
               {"id", item_id_},
               {"call_id", call_id_now_},
               {"name", from.name}};
        if (!from.space.empty()) out["namespace"] = from.space;
        out[kind_ == Kind::Call ? "arguments" : "input"] = kind_ == Kind::Call ? text : custom_input(text);
        out["status"] = status;
        break;
      }
    }
    return out;
  }
  Json part(const std::string& text) const {
    if (kind_ == Kind::Reasoning) return {{"type", "reasoning_text"}, {"text", text}};
    return {{"type", "output_text"},
            {"text", text},
            {"annotations", Json::array()},
            {"logprobs", text.empty() ? Json::array() : logprobs_}};
  }
  static std::string custom_input(const std::string& arguments) {
    Json parsed = Json::parse(arguments, nullptr, false);
    if (parsed.is_discarded()) parsed = Json::parse(arguments + "\"}", nullptr, false);  // it was cut
    if (parsed.is_discarded()) return "";
    if (!parsed.is_object() || !parsed.contains("input") || !parsed["input"].is_string()) return arguments;
    return parsed["input"].get<std::string>();
  }

  std::string open(Kind kind) {
    if (kind_ == kind && (kind == Kind::Reasoning || kind == Kind::Message)) return {};
    std::string out = close("completed");
    kind_ = kind;
    text_.clear();
    logprobs_ = Json::array();
    static constexpr const char* kPrefix[] = {"", "rs_", "msg_", "fc_", "ctc_"};
    item_id_ = fresh_id(kPrefix[static_cast<int>(kind)]);
    if (kind == Kind::Call || kind == Kind::Custom) call_id_now_ = call_id(0, call_);
    out += event("response.output_item.added",
                 {{"output_index", output_.size()}, {"item", item("in_progress", true)}});
    if (kind == Kind::Reasoning || kind == Kind::Message)
      out += part_event("response.content_part.added", {{"part", part("")}});
    return out;
  }

  std::string close(const char* status) {
    if (kind_ == Kind::None) return {};
    std::string out;
    switch (kind_) {
      case Kind::None:
        break;
      case Kind::Reasoning:
        out += part_event("response.reasoning_text.done", {{"text", text_}});
        out += part_event("response.content_part.done", {{"part", part(text_)}});
        break;
      case Kind::Message:
        out += part_event("response.output_text.done", {{"text", text_}, {"logprobs", logprobs_}});
        out += part_event("response.content_part.done", {{"part", part(text_)}});
        break;
      case Kind::Call:
        out += item_event("response.function_call_arguments.done",
                          {{"name", origin().name}, {"arguments", text_}});
        break;
      case Kind::Custom: {
        const std::string input = custom_input(text_);
        out += item_event("response.custom_tool_call_input.delta",
                          {{"call_id", call_id_now_}, {"delta", input}});
        out +=
            item_event("response.custom_tool_call_input.done", {{"call_id", call_id_now_}, {"input", input}});
        break;
      }
    }
    Json done = item(status, false);
    out += event("response.output_item.done", {{"output_index", output_.size()}, {"item", done}});
    output_.push_back(std::move(done));
    kind_ = Kind::None;
    return out;
  }

  Json finished(const Answer& answer) const {
    const bool cut = answer.finish_reason == "length";
    Json out = response(cut ? "incomplete" : "completed", usage_of(answer.stats, answer.n_reasoning_tokens));
    out["output_text"] = answer.content;
    if (cut) out["incomplete_details"] = {{"reason", "max_output_tokens"}};
    out["completed_at"] = static_cast<int64_t>(std::time(nullptr));
    out["timings"] = timings_json(answer.stats);
    return out;
  }

  Json response(const char* status, Json usage) const {
    const Json& echoed = request().echoed;
    Json out;
    out["id"] = id_;
    out["object"] = "response";
    out["created_at"] = created_;
    out["completed_at"] = nullptr;
    out["status"] = status;
    out["background"] = false;
    out["error"] = nullptr;
    out["incomplete_details"] = nullptr;
    out["instructions"] = echoed["instructions"];
    out["max_output_tokens"] = echoed["max_output_tokens"];
    out["metadata"] = echoed["metadata"];
    out["model"] = context_.model;
    out["output"] = output_;
    out["parallel_tool_calls"] = echoed["parallel_tool_calls"];
    out["previous_response_id"] = nullptr;
    out["prompt_cache_key"] = echoed["prompt_cache_key"];
    out["reasoning"] = echoed["reasoning"];
    out["service_tier"] = "default";
    out["store"] = false;
    out["temperature"] = plain_number(request().sampling.temperature);
    out["text"] = echoed["text"];
    out["tool_choice"] = echoed["tool_choice"];
    out["tools"] = echoed["tools"];
    out["top_logprobs"] = request().sampling.n_probs.value_or(0);
    out["top_p"] = plain_number(request().sampling.top_p);
    out["truncation"] = "disabled";
    out["usage"] = std::move(usage);
    out["user"] = echoed["user"];
    return out;
  }

  int n_events_ = 0;
  Json output_ = Json::array();  // items that are done
  Kind kind_ = Kind::None;
  std::string item_id_, call_id_now_, name_, text_;
  int call_ = 0;
  Json logprobs_ = Json::array();
};

}  // namespace

std::unique_ptr<ReplyWriter> make_responses_writer(ReplyContext context) {
  return std::make_unique<ResponsesWriter>(std::move(context));
}

}  // namespace thermo
