// What an API's client is sent: the events of a stream, or one object. Both are made of the same pieces of
// the same parser, so that they say the same.
//
// One object writes one reply; one thread at a time.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "chat/answer.h"
#include "server/api/generation_request.h"

namespace thermo {

struct ReplyContext {
  const GenerationRequest* request;  // outlives the writer
  const Tokenizer* tokenizer;
  std::string model;        // as it is served
  std::string fingerprint;  // changes when the same request may give another answer
  std::string request_id;
  std::vector<std::string> echoed_prompts = {};  // completions: text that comes before the answer, by prompt
  // Chat: names under which reasoning is sent.
  std::vector<std::string> reasoning_fields = {"reasoning_content", "reasoning"};
};

class ReplyWriter {
 public:
  explicit ReplyWriter(ReplyContext context);
  virtual ~ReplyWriter() = default;

  // The stream, in this order. Each returns whole events.
  virtual std::string begin(int n_prompt) = 0;
  // Its prompt, with log probabilities, where both are wanted.
  virtual std::string echo(int, std::span<const GeneratedToken>) { return {}; }
  // What an answer brought; `tokens`: those whose text it is, when log probabilities are wanted. Tokens may
  // come without an event.
  virtual std::string pieces(int choice, const AnswerParser::Events& events,
                             const AnswerLogprobs& tokens) = 0;
  // What is known of the answer that pieces() is called for next, where each event has it.
  void set_stats(AnswerStats so_far) { so_far_ = std::move(so_far); }
  virtual std::string finish(int choice, const Answer& answer) = 0;
  virtual std::string end(std::span<const Answer> answers) = 0;
  // Instead of the rest.
  virtual std::string fail(const ApiError& error) = 0;
  // Something that the client's parser takes for a sign of life.
  virtual std::string heartbeat() = 0;
  virtual std::string progress(int, int, int, double) { return {}; }  // done, total, cached; milliseconds

  // The reply that is no stream.
  virtual Json whole(std::span<const Answer> answers) = 0;

  // Of the reply: "chatcmpl-...".
  const std::string& id() const { return id_; }

 protected:
  const GenerationRequest& request() const { return *context_.request; }
  // The id of a call, made when it is first asked for.
  const std::string& call_id(int choice, int call);
  AnswerStats total(std::span<const Answer> answers, int* n_reasoning) const;
  // REQUIRES: set_stats() was called.
  Json running_timings() const;

  ReplyContext context_;
  std::optional<AnswerStats> so_far_;
  std::string id_;
  int64_t created_;

 private:
  std::vector<std::vector<std::string>> call_ids_;
};

std::unique_ptr<ReplyWriter> make_reply_writer(ReplyContext context);
// One for each dialect; for make_reply_writer().
std::unique_ptr<ReplyWriter> make_chat_writer(ReplyContext context);
std::unique_ptr<ReplyWriter> make_completions_writer(ReplyContext context);
std::unique_ptr<ReplyWriter> make_messages_writer(ReplyContext context);
std::unique_ptr<ReplyWriter> make_responses_writer(ReplyContext context);

// Neighbours of one kind become one event.
AnswerParser::Events merged(AnswerParser::Events events);
// "call_" and 24 letters and digits that nobody else gets.
std::string fresh_id(std::string_view prefix);
// One event: an optional name, one line of data.
std::string sse_event(std::string_view name, const Json& data);
std::string sse_data(const Json& data);

}  // namespace thermo
