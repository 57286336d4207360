#include "server/api/reply_writer.h"

#include <algorithm>
#include <atomic>
#include <ctime>
#include <random>

#include "chat/reply_json.h"

namespace thermo {
namespace {

const char* reply_prefix(Dialect dialect) {
  switch (dialect) {
    case Dialect::Completions:
      return "cmpl-";
    case Dialect::Messages:
      return "msg_";
    case Dialect::Responses:
      return "resp_";
    default:
      return "chatcmpl-";
  }
}

}  // namespace

std::string fresh_id(std::string_view prefix) {
  static constexpr char kDigits[] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  thread_local std::mt19937_64 random{std::random_device{}()};
  static std::atomic<uint64_t> counter{random() % 1'000'000};
  std::string id(prefix);
  uint64_t count = ++counter;  // makes it unique in this process, the rest hard to guess
  for (int i = 0; i < 6; ++i, count /= 62) id += kDigits[count % 62];
  for (int i = 0; i < 18; ++i) id += kDigits[random() % 62];
  return id;
}

std::string sse_data(const Json& data) {
  return "data: " + data.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n\n";
}

std::string sse_event(std::string_view name, const Json& data) {
  return "event: " + std::string(name) + "\n" + sse_data(data);
}

ReplyWriter::ReplyWriter(ReplyContext context)
    : context_(std::move(context)),
      id_(fresh_id(reply_prefix(context_.request->dialect))),
      created_(static_cast<int64_t>(std::time(nullptr))) {}

const std::string& ReplyWriter::call_id(int choice, int call) {
  const auto c = static_cast<size_t>(choice), k = static_cast<size_t>(call);
  if (call_ids_.size() <= c) call_ids_.resize(c + 1);
  while (call_ids_[c].size() <= k)
    call_ids_[c].push_back(fresh_id(request().dialect == Dialect::Messages ? "toolu_" : "call_"));
  return call_ids_[c][k];
}

// Prompts count once for all of their answers, what was written is summed, times are those of the longest.
AnswerStats ReplyWriter::total(std::span<const Answer> answers, int* n_reasoning) const {
  AnswerStats all = answers.empty() ? AnswerStats{} : answers.front().stats;
  const int n = std::max(request().n, 1);
  *n_reasoning = answers.empty() ? 0 : answers.front().n_reasoning_tokens;
  for (size_t i = 1; i < answers.size(); ++i) {
    const AnswerStats& one = answers[i].stats;
    if (i % static_cast<size_t>(n) == 0) {
      all.n_prompt += one.n_prompt;
      all.n_cached += one.n_cached;
    }
    all.n_completion += one.n_completion;
    all.prompt_seconds = std::max(all.prompt_seconds, one.prompt_seconds);
    all.predicted_seconds = std::max(all.predicted_seconds, one.predicted_seconds);
    all.first_token_seconds = std::min(all.first_token_seconds, one.first_token_seconds);
    all.draft = all.draft + one.draft;
    *n_reasoning += answers[i].n_reasoning_tokens;
  }
  return all;
}

Json ReplyWriter::running_timings() const {
  Json timings = timings_json(*so_far_);
  timings.erase("seed");  // it is known at the end
  return timings;
}

AnswerParser::Events merged(AnswerParser::Events events) {
  AnswerParser::Events out;
  for (AnswerEvent& event : events) {
    const bool text = event.kind != AnswerEvent::Kind::CallBegin && event.kind != AnswerEvent::Kind::CallEnd;
    if (text && !out.empty() && out.back().kind == event.kind && out.back().call == event.call)
      out.back().text += event.text;
    else
      out.push_back(std::move(event));
  }
  return out;
}

std::unique_ptr<ReplyWriter> make_reply_writer(ReplyContext context) {
  switch (context.request->dialect) {
    case Dialect::Completions:
      return make_completions_writer(std::move(context));
    case Dialect::Messages:
      return make_messages_writer(std::move(context));
    case Dialect::Responses:
      return make_responses_writer(std::move(context));
    default:
      return make_chat_writer(std::move(context));
  }
}

}  // namespace thermo
