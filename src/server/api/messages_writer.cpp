// Replies of /v1/messages. Blocks come strictly one after the other: each is stopped before the next one
// starts.
#include "server/api/reply_writer.h"

namespace thermo {
namespace {

Json usage_of(const AnswerStats& stats, int n_reasoning) {
  return {{"input_tokens", stats.n_prompt - stats.n_cached},
          {"cache_read_input_tokens", stats.n_cached},
          {"cache_creation_input_tokens", 0},
          {"output_tokens", stats.n_completion},
          {"output_tokens_details", {{"thinking_tokens", n_reasoning}}},
          {"service_tier", "standard"}};
}

std::string stop_reason(const Answer& answer) {
  if (answer.finish_reason == "tool_calls") return "tool_use";
  if (answer.context_full) return "model_context_window_exceeded";
  if (answer.finish_reason == "length") return "max_tokens";
  return answer.stop_text.empty() ? "end_turn" : "stop_sequence";
}

Json stop_sequence(const Answer& answer) {
  return answer.stop_text.empty() ? Json(nullptr) : Json(answer.stop_text);
}

class MessagesWriter : public ReplyWriter {
 public:
  explicit MessagesWriter(ReplyContext context)
      : ReplyWriter(std::move(context)), signature_(fresh_id("sig_")) {}

  std::string begin(int n_prompt) override {
    AnswerStats stats;
    stats.n_prompt = n_prompt;
    Json message = head();
    message["content"] = Json::array();
    message["stop_reason"] = nullptr;
    message["stop_sequence"] = nullptr;
    message["usage"] = usage_of(stats, 0);
    return event("message_start", {{"message", std::move(message)}}) + heartbeat();
  }

  std::string pieces(int, const AnswerParser::Events& events, const AnswerLogprobs&) override {
    std::string out;
    for (const AnswerEvent& one : events) {
      switch (one.kind) {
        case AnswerEvent::Kind::Reasoning:
          out += open(Block::Thinking, {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}});
          out += delta({{"type", "thinking_delta"}, {"thinking", one.text}});
          break;
        case AnswerEvent::Kind::Content:
          out += open(Block::Text, {{"type", "text"}, {"text", ""}});
          out += delta({{"type", "text_delta"}, {"text", one.text}});
          break;
        case AnswerEvent::Kind::CallBegin:
          out += close();
          out += open(Block::Call, {{"type", "tool_use"},
                                    {"id", call_id(0, one.call)},
                                    {"name", one.text},
                                    {"input", Json::object()}});
          out += delta({{"type", "input_json_delta"}, {"partial_json", ""}});
          break;
        case AnswerEvent::Kind::CallArguments:
          out += delta({{"type", "input_json_delta"}, {"partial_json", one.text}});
          break;
        case AnswerEvent::Kind::CallEnd:
          out += close();
          break;
      }
    }
    return out;
  }

  std::string finish(int, const Answer&) override {
    std::string out = close();
    if (index_ > 0) return out;
    out += open(Block::Text, {{"type", "text"}, {"text", ""}});
    return out += close();
  }

  std::string end(std::span<const Answer> answers) override {
    const Answer& answer = answers.front();
    return event("message_delta", {{"delta",
                                    {{"stop_reason", stop_reason(answer)},
                                     {"stop_sequence", stop_sequence(answer)},
                                     {"stop_details", nullptr},
                                     {"container", nullptr}}},
                                   {"usage", usage_of(answer.stats, answer.n_reasoning_tokens)}}) +
           event("message_stop", Json::object());
  }

  std::string fail(const ApiError& error) override {
    return sse_event("error", error_json(error, Dialect::Messages, context_.request_id));
  }

  std::string heartbeat() override { return event("ping", Json::object()); }

  Json whole(std::span<const Answer> answers) override {
    const Answer& answer = answers.front();
    Json content = Json::array();
    if (!answer.reasoning.empty())
      content.push_back({{"type", "thinking"}, {"thinking", answer.reasoning}, {"signature", signature_}});
    if (!answer.content.empty()) content.push_back({{"type", "text"}, {"text", answer.content}});
    for (size_t i = 0; i < answer.tool_calls.size(); ++i) {
      const ToolCall& call = answer.tool_calls[i];
      if (!call.complete) continue;  // its input is no JSON yet
      Json input = Json::parse(call.arguments, nullptr, false);
      content.push_back({{"type", "tool_use"},
                         {"id", call_id(0, static_cast<int>(i))},
                         {"name", call.name},
                         {"input", input.is_object() ? std::move(input) : Json::object()}});
    }
    if (content.empty()) content.push_back({{"type", "text"}, {"text", ""}});
    Json message = head();
    message["content"] = std::move(content);
    message["stop_reason"] = stop_reason(answer);
    message["stop_sequence"] = stop_sequence(answer);
    message["stop_details"] = nullptr;
    message["container"] = nullptr;
    message["usage"] = usage_of(answer.stats, answer.n_reasoning_tokens);
    return message;
  }

 private:
  enum class Block { None, Thinking, Text, Call };

  Json head() const {
    return {{"id", id_}, {"type", "message"}, {"role", "assistant"}, {"model", context_.model}};
  }
  static std::string event(const char* type, Json data) {
    Json all = {{"type", type}};
    all.update(data);
    return sse_event(type, all);
  }
  std::string delta(Json data) const {
    return event("content_block_delta", {{"index", index_}, {"delta", std::move(data)}});
  }
  std::string open(Block block, Json content) {
    if (block_ == block && block != Block::Call) return {};
    std::string out = close();
    block_ = block;
    return out + event("content_block_start", {{"index", index_}, {"content_block", std::move(content)}});
  }
  std::string close() {
    if (block_ == Block::None) return {};
    std::string out;
    if (block_ == Block::Thinking) out = delta({{"type", "signature_delta"}, {"signature", signature_}});
    out += event("content_block_stop", {{"index", index_}});
    block_ = Block::None;
    ++index_;
    return out;
  }

  std::string signature_;  // opaque to the client
  Block block_ = Block::None;
  int index_ = 0;  // of the block that is open, or comes next
};

}  // namespace

std::unique_ptr<ReplyWriter> make_messages_writer(ReplyContext context) {
  return std::make_unique<MessagesWriter>(std::move(context));
}

}  // namespace thermo
