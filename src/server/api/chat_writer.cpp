// Replies of /v1/chat/completions and /v1/completions.
#include <cmath>

#include "base/utf8_chars.h"
#include "chat/reply_json.h"
#include "server/api/reply_writer.h"
#include "tokenizer/stream_decoder.h"

namespace thermo {
namespace {

class ChunkWriter : public ReplyWriter {
 public:
  using ReplyWriter::ReplyWriter;

  std::string end(std::span<const Answer> answers) override {
    int n_reasoning = 0;
    const AnswerStats stats = total(answers, &n_reasoning);
    std::string out;
    if (request().include_usage) {
      Json last = chunk(Json::array());
      last["usage"] = usage_json(stats, n_reasoning);
      last["timings"] = timings_json(stats);
      out = sse_data(last);
    }
    return out + "data: [DONE]\n\n";
  }

  std::string fail(const ApiError& error) override {
    return sse_data(error_json(error, request().dialect, context_.request_id)) + "data: [DONE]\n\n";
  }

  std::string heartbeat() override { return ": ping\n\n"; }

  std::string progress(int done, int total, int cached, double ms) override {
    Json extra = chunk(Json::array());
    extra["prompt_progress"] = {{"total", total}, {"cache", cached}, {"processed", done}, {"time_ms", ms}};
    return sse_data(extra);
  }

 protected:
  virtual const char* object_name() const = 0;

  Json head(const char* object) const {
    return {{"id", id_},
            {"object", object},
            {"created", created_},
            {"model", context_.model},
            {"system_fingerprint", context_.fingerprint}};
  }
  Json chunk(Json choices) const {
    Json out = head(object_name());
    out["choices"] = std::move(choices);
    if (request().include_usage) out["usage"] = nullptr;
    if (so_far_) out["timings"] = running_timings();
    return out;
  }
  // Closes the last chunk of a choice; timings ride on it when no usage chunk follows.
  std::string last_chunk(Json choice, const Answer& answer) const {
    Json out = chunk(Json::array({std::move(choice)}));
    if (!request().include_usage) out["timings"] = timings_json(answer.stats);
    return sse_data(out);
  }
  Json whole_reply(const char* object, Json choices, std::span<const Answer> answers) const {
    Json reply = head(object);
    reply["service_tier"] = "default";
    reply["choices"] = std::move(choices);
    int n_reasoning = 0;
    const AnswerStats stats = total(answers, &n_reasoning);
    reply["usage"] = usage_json(stats, n_reasoning);
    reply["timings"] = timings_json(stats);
    return reply;
  }
};

class ChatWriter : public ChunkWriter {
 public:
  explicit ChatWriter(ReplyContext context)
      : ChunkWriter(std::move(context)),
        unsent_(static_cast<size_t>(context_.request->n)),
        open_(static_cast<size_t>(context_.request->n)) {}

  std::string begin(int) override {
    std::string out;
    for (int i = 0; i < request().n; ++i) out += delta(i, {{"role", "assistant"}, {"content", ""}});
    return out;
  }

  std::string pieces(int choice, const AnswerParser::Events& events, const AnswerLogprobs& tokens) override {
    AnswerLogprobs& unsent = unsent_[static_cast<size_t>(choice)];
    const auto add = [](std::vector<GeneratedToken>& list, const std::vector<GeneratedToken>& more) {
      list.insert(list.end(), more.begin(), more.end());
    };
    add(unsent.content, tokens.content);
    if (!context_.reasoning_fields.empty()) add(unsent.reasoning, tokens.reasoning);
    add(unsent.calls, tokens.calls);
    std::string out;
    for (const AnswerEvent& event : events) {
      switch (event.kind) {
        case AnswerEvent::Kind::Reasoning:
          if (!context_.reasoning_fields.empty())
            out += delta(choice, reasoning(event.text), {.reasoning = std::exchange(unsent.reasoning, {})});
          if (both() && !event.text.empty()) out += repeat(choice, event.text);
          break;
        case AnswerEvent::Kind::Content:
          out += close_tags(choice);
          out += delta(choice, {{"content", event.text}}, {.content = std::exchange(unsent.content, {})});
          break;
        case AnswerEvent::Kind::CallBegin:
          out += close_tags(choice);
          out += call_delta(choice,
                            {{"index", event.call},
                             {"id", call_id(choice, event.call)},
                             {"type", "function"},
                             {"function", {{"name", event.text}, {"arguments", ""}}}},
                            unsent);
          break;
        case AnswerEvent::Kind::CallArguments:
          out +=
              call_delta(choice, {{"index", event.call}, {"function", {{"arguments", event.text}}}}, unsent);
          break;
        case AnswerEvent::Kind::CallEnd:
          break;
      }
    }
    return out;
  }

  std::string finish(int choice, const Answer& answer) override {
    const std::string closed = ended_reasoning(answer) ? close_tags(choice) : "";
    return closed + last_chunk({{"index", choice},
                                {"delta", Json::object()},
                                {"logprobs", logprobs_or_null(unsent_[static_cast<size_t>(choice)])},
                                {"finish_reason", answer.finish_reason}},
                               answer);
  }

  Json whole(std::span<const Answer> answers) override {
    Json choices = Json::array();
    for (size_t i = 0; i < answers.size(); ++i) {
      Answer answer = answers[i];
      const int index = static_cast<int>(i);
      for (size_t k = 0; k < answer.tool_calls.size(); ++k)
        answer.tool_calls[k].id = call_id(index, static_cast<int>(k));
      Json choice;
      choice["index"] = index;
      choice["message"] = message(answer);
      if (context_.reasoning_fields.empty()) answer.logprobs.reasoning.clear();
      choice["logprobs"] = request().logprobs ? logprobs(answer.logprobs) : Json(nullptr);
      choice["finish_reason"] = answer.finish_reason;
      choices.push_back(std::move(choice));
    }
    return whole_reply("chat.completion", std::move(choices), answers);
  }

 protected:
  const char* object_name() const override { return "chat.completion.chunk"; }

 private:
  Json reasoning(const std::string& text) const {
    Json fields = Json::object();
    for (const std::string& name : context_.reasoning_fields) fields[name] = text;
    return fields;
  }
  bool both() const { return request().reasoning_format == ReasoningFormat::Both; }
  // Whether the tag after the reasoning belongs to the answer: it did not end before it.
  static bool ended_reasoning(const Answer& answer) {
    const std::string& how = answer.stats.reasoning_close;
    return !answer.content.empty() || !answer.tool_calls.empty() || (!how.empty() && how != "none");
  }
  // The reasoning once more, as content between its tags.
  std::string repeat(int choice, const std::string& text) {
    const bool first = !std::exchange(open_[static_cast<size_t>(choice)], char{1});
    return delta(choice, {{"content", (first ? kOpen : "") + text}});
  }
  std::string close_tags(int choice) {
    return std::exchange(open_[static_cast<size_t>(choice)], char{0}) ? delta(choice, {{"content", kClose}})
                                                                      : "";
  }
  Json message(Answer& answer) const {
    const std::string thought = std::exchange(answer.reasoning, {});
    if (both() && !thought.empty())
      answer.content = kOpen + thought + (ended_reasoning(answer) ? kClose : "") + answer.content;
    Json all = message_json(answer);
    if (!thought.empty()) all.update(reasoning(thought));
    return all;
  }
  Json logprobs(const AnswerLogprobs& tokens) const {
    const auto entries = [this](const std::vector<GeneratedToken>& list) {
      return list.empty() ? Json::array() : logprob_entries(list, *context_.tokenizer);
    };
    Json out = {{"content", entries(tokens.content)}, {"refusal", nullptr}};
    if (!request().logprobs_of_all) return out;
    out["reasoning"] = entries(tokens.reasoning);
    out["tool_calls"] = entries(tokens.calls);
    return out;
  }
  Json logprobs_or_null(const AnswerLogprobs& tokens) const {
    const bool empty = tokens.content.empty() && tokens.reasoning.empty() && tokens.calls.empty();
    return empty ? Json(nullptr) : logprobs(tokens);
  }
  std::string delta(int choice, Json content, const AnswerLogprobs& tokens = {}) const {
    Json one;
    one["index"] = choice;
    one["delta"] = std::move(content);
    one["logprobs"] = logprobs_or_null(tokens);
    one["finish_reason"] = nullptr;
    return sse_data(chunk(Json::array({std::move(one)})));
  }
  std::string call_delta(int choice, Json call, AnswerLogprobs& unsent) const {
    return delta(choice, {{"tool_calls", Json::array({std::move(call)})}},
                 {.calls = std::exchange(unsent.calls, {})});
  }

  static inline const std::string kOpen = "<think>\n", kClose = "\n</think>\n\n";

  std::vector<AnswerLogprobs> unsent_;  // by choice: tokens whose text did not come yet
  std::vector<char> open_;              // by choice: repeated reasoning has no closing tag yet
};

class CompletionsWriter : public ChunkWriter {
 public:
  explicit CompletionsWriter(ReplyContext context) : ChunkWriter(std::move(context)) {
    offsets_.resize(context_.request->prompts.size() * static_cast<size_t>(context_.request->n));
  }

  std::string begin(int) override {
    std::string out;
    for (size_t i = 0; request().echo && !request().logprobs && i < offsets_.size(); ++i)
      out += text_chunk(static_cast<int>(i), echoed(i), nullptr);
    return out;
  }

  std::string echo(int choice, std::span<const GeneratedToken> prompt) override {
    const auto i = static_cast<size_t>(choice);
    return text_chunk(choice, echoed(i), legacy_logprobs(prompt, offsets_[i]));
  }

  std::string pieces(int choice, const AnswerParser::Events& events,
                     const AnswerLogprobs& logprobs) override {
    std::span<const GeneratedToken> tokens = logprobs.content;
    std::string out;
    for (const AnswerEvent& event : events) {
      if (event.kind != AnswerEvent::Kind::Content) continue;
      out += text_chunk(choice, event.text, legacy_logprobs(tokens, offsets_[static_cast<size_t>(choice)]));
      tokens = {};
    }
    return out;
  }

  std::string finish(int choice, const Answer& answer) override {
    return last_chunk(
        {{"text", ""}, {"index", choice}, {"logprobs", nullptr}, {"finish_reason", finish_reason(answer)}},
        answer);
  }

  Json whole(std::span<const Answer> answers) override {
    Json choices = Json::array();
    for (size_t i = 0; i < answers.size(); ++i) {
      size_t offset = 0;
      std::vector<GeneratedToken> tokens = answers[i].prompt_logprobs;
      tokens.insert(tokens.end(), answers[i].logprobs.content.begin(), answers[i].logprobs.content.end());
      choices.push_back({{"text", (request().echo ? echoed(i) : "") + answers[i].content},
                         {"index", i},
                         {"logprobs", legacy_logprobs(tokens, offset)},
                         {"finish_reason", finish_reason(answers[i])}});
    }
    return whole_reply("text_completion", std::move(choices), answers);
  }

 protected:
  const char* object_name() const override { return "text_completion"; }

 private:
  static std::string finish_reason(const Answer& answer) { return answer.finish_reason; }
  std::string echoed(size_t choice) const {
    const size_t prompt = choice / static_cast<size_t>(request().n);
    return prompt < context_.echoed_prompts.size() ? context_.echoed_prompts[prompt] : "";
  }
  std::string text_chunk(int choice, const std::string& text, Json logprobs) const {
    return sse_data(chunk(Json::array({{{"text", text},
                                        {"index", choice},
                                        {"logprobs", std::move(logprobs)},
                                        {"finish_reason", nullptr}}})));
  }
  Json legacy_logprobs(std::span<const GeneratedToken> tokens, size_t& offset) const {
    if (!request().logprobs) return nullptr;
    Json names = Json::array(), values = Json::array(), tops = Json::array(), offsets = Json::array();
    for (const GeneratedToken& token : tokens) {
      const bool is_known = !token.logprobs.empty();  // not of the first token of a prompt
      const Json chosen = logprob_entry(is_known ? token.logprobs.front() : TokenLogprob{token.id, 0.0f},
                                        *context_.tokenizer);
      names.push_back(chosen["token"]);
      values.push_back(is_known ? chosen["logprob"] : Json(nullptr));
      Json top = is_known ? Json::object() : Json(nullptr);
      for (size_t k = 1; k < token.logprobs.size(); ++k) {
        const Json entry = logprob_entry(token.logprobs[k], *context_.tokenizer);
        const std::string name = entry["token"].get<std::string>();
        if (!top.contains(name)) top[name] = entry["logprob"];  // parts of characters look the same
      }
      tops.push_back(std::move(top));
      offsets.push_back(offset);
      offset += count_utf8_chars(context_.tokenizer->token_bytes(token.id));
    }
    return {{"tokens", std::move(names)},
            {"token_logprobs", std::move(values)},
            {"top_logprobs", std::move(tops)},
            {"text_offset", std::move(offsets)}};
  }

  std::vector<size_t> offsets_;  // of the next token, by choice
};

}  // namespace

std::unique_ptr<ReplyWriter> make_chat_writer(ReplyContext context) {
  return std::make_unique<ChatWriter>(std::move(context));
}
std::unique_ptr<ReplyWriter> make_completions_writer(ReplyContext context) {
  return std::make_unique<CompletionsWriter>(std::move(context));
}

}  // namespace thermo
