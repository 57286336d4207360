// From the tokens of an answer to what a reader gets: reasoning, content and tool calls apart, stop texts
// cut, whole characters, each piece as soon as it is certain. One thread.
//
//     Reasoning -> Content -> Call* -> end
//
// Markers (<think>, <tool_call> and their ends) are tokens of the vocabulary; the same letters made of
// ordinary tokens are text. A vocabulary that has no such token spells the marker with several, and it is
// found in the text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chat/message.h"
#include "chat/tool_call_parser.h"
#include "tokenizer/bpe.h"
#include "tokenizer/stop_matcher.h"
#include "tokenizer/stream_decoder.h"

namespace thermo {

struct AnswerOptions {
  bool starts_in_reasoning = false;  // the prompt ends inside an open <think>
  bool split_reasoning = true;       // false: it is content with its markers, as for raw completions
  std::vector<std::string> stops;    // looked for in the content only
  bool stop_everywhere = false;      // in reasoning and calls, too
  std::vector<Tool> tools = {};      // empty: a tool call is text
};

struct AnswerEvent {
  enum class Kind { Reasoning, Content, CallBegin, CallArguments, CallEnd };
  Kind kind{};
  std::string text;  // Reasoning, Content, CallArguments: the next piece; CallBegin: the tool's name
  int call = -1;     // of the call events: which one, from 0
};

class AnswerParser {
 public:
  using Events = std::vector<AnswerEvent>;

  // `tokenizer` outlives the parser.
  AnswerParser(const Tokenizer& tokenizer, AnswerOptions options);

  // What became certain with this token.
  Events push(int32_t token);
  // The same for bytes that belong to no special token.
  Events push_text(std::string_view bytes);
  // At the end of the answer: what was held back. `end_of_turn`: the model ended it, so that an open call is
  // closed; otherwise (a limit, a cancellation) it stays as far as it came.
  Events finish(bool end_of_turn = true);

  // A stop text was found: nothing more will come.
  bool stopped() const noexcept { return stops_.matched() || all_stops_.matched(); }
  std::string_view matched_stop() const noexcept {
    return all_stops_.matched() ? all_stops_.matched_stop() : stops_.matched_stop();
  }
  bool in_reasoning() const noexcept { return state_ == State::Reasoning; }
  int n_reasoning_tokens() const noexcept { return n_reasoning_tokens_; }
  const ToolCallRepairs& repairs() const noexcept { return repairs_; }
  // All that was handed out.
  const std::string& reasoning() const noexcept { return reasoning_; }
  const std::string& content() const noexcept { return content_; }
  const std::vector<ToolCall>& calls() const noexcept { return calls_; }
  // Indices, among the tokens pushed, of those whose text is (at least partly) in content().
  std::vector<size_t> content_tokens() const;
  // Those of them that were not taken before.
  std::vector<size_t> take_content_tokens();
  // The same for reasoning and for calls, their markers included.
  const std::vector<size_t>& reasoning_tokens() const noexcept { return reasoning_tokens_.indices; }
  const std::vector<size_t>& call_tokens() const noexcept { return call_tokens_.indices; }
  std::vector<size_t> take_reasoning_tokens() { return reasoning_tokens_.take(); }
  std::vector<size_t> take_call_tokens() { return call_tokens_.take(); }
  // All that were pushed count as taken, those too whose text is held back, and none as reasoning.
  void skip_tokens();

 private:
  enum class State { Reasoning, Content, Call, NoCall, AfterCall };
  enum class Marker { Think, EndThink, Call, EndCall, Function };
  static constexpr int kMarkers = 5;
  static constexpr bool is_of_thought(Marker marker) {
    return marker == Marker::Think || marker == Marker::EndThink;
  }

  void scan(std::string_view bytes, bool at_end);
  void take_marker(Marker marker);
  bool in_call() const noexcept { return state_ == State::Call || state_ == State::AfterCall; }
  void take_text(std::string_view bytes);
  void begin_call(bool bare);
  void drain_call();
  void end_call(bool marker_missing);
  void end_reasoning();
  void take_reasoning(std::string_view bytes);
  void take_content(std::string_view bytes);
  void flush_content();
  void emit_content(std::string text);
  size_t n_shown_bytes() const;
  void emit(AnswerEvent::Kind kind, std::string text, int call = -1);
  Events take_events() { return std::exchange(events_, {}); }

  const Tokenizer* tokenizer_;
  std::vector<Tool> tools_;
  std::optional<int32_t> marker_ids_[kMarkers];
  bool in_text_[kMarkers] = {};  // found by its spelling
  State state_;
  std::string unscanned_;      // what may become a marker
  bool at_line_start_ = true;  // of the content
  int newlines_to_drop_ = 0;   // after a marker
  StopMatcher stops_;          // of the content
  StopMatcher all_stops_;      // of all text
  bool thought_is_text_;       // reasoning is not told from content
  bool in_text_thought_;       // where it is not, and there is one: a call in it needs its marker
  Utf8Assembler reasoning_utf8_, content_utf8_;
  std::string held_newlines_;    // of reasoning: dropped when they turn out to be its end
  std::string held_whitespace_;  // before the first visible content
  std::string held_tail_;        // whitespace after content: dropped before a call
  bool visible_ = false;
  std::optional<ToolCallParser> call_;
  bool call_is_bare_ = false;  // <function= without <tool_call>
  int n_damaged_before_ = 0;   // when the call began
  ToolCallRepairs repairs_;
  Events events_;
  std::string reasoning_, content_;
  std::vector<ToolCall> calls_;
  int n_reasoning_tokens_ = 0;

  struct ContentToken {
    size_t index;  // among the tokens pushed
    size_t begin;  // of its text among the bytes that the stop matcher got
  };
  // Tokens of one kind, and how many of them were taken.
  struct TokenList {
    std::vector<size_t> indices = {};
    size_t n_taken = 0;
    std::vector<size_t> take() {
      const auto begin = indices.begin() + static_cast<long>(std::exchange(n_taken, indices.size()));
      return {begin, indices.end()};
    }
  };
  TokenList reasoning_tokens_, call_tokens_;
  std::vector<ContentToken> content_tokens_;
  size_t n_taken_ = 0;  // of them
  size_t n_pushed_ = 0;
  size_t n_content_bytes_ = 0;  // that the stop matcher got
  size_t n_passed_bytes_ = 0;   // that it let through
};

}  // namespace thermo
