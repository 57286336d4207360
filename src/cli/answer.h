// From the tokens of an answer to what the user sees: reasoning and content apart, stop strings cut, whole
// characters. One thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tokenizer/bpe.h"
#include "tokenizer/stop_matcher.h"
#include "tokenizer/stream_decoder.h"

namespace thermo {

struct AnswerOptions {
  bool starts_in_reasoning = false;  // the prompt ends inside an open <think>
  bool split_reasoning = true;       // false: everything is content, as for raw completions
  std::vector<std::string> stops;    // looked for in the content only
};

class AnswerParser {
 public:
  // Text that became certain with the last token.
  struct Piece {
    std::string reasoning;
    std::string content;
  };

  // `tokenizer` outlives the parser.
  AnswerParser(const Tokenizer& tokenizer, AnswerOptions options);

  Piece push(int32_t token);
  // At the end of the answer: what was held back.
  Piece finish();

  // A stop string was found: nothing more will come.
  bool stopped() const noexcept { return stops_.matched(); }
  bool in_reasoning() const noexcept { return in_reasoning_; }
  int n_reasoning_tokens() const noexcept { return n_reasoning_tokens_; }
  // All that was handed out.
  const std::string& reasoning() const noexcept { return reasoning_; }
  const std::string& content() const noexcept { return content_; }
  // Indices, among the tokens pushed, of those whose text is (at least partly) in content().
  std::vector<size_t> content_tokens() const;

 private:
  std::string push_content(std::string_view bytes);
  std::string push_reasoning(std::string_view bytes);

  const Tokenizer* tokenizer_;
  std::optional<int32_t> think_, end_think_;
  bool in_reasoning_;
  int newlines_to_drop_ = 0;  // after a marker
  StopMatcher stops_;
  Utf8Assembler reasoning_utf8_, content_utf8_;
  std::string held_newlines_;    // of reasoning: dropped when they turn out to be its end
  std::string held_whitespace_;  // before the first visible content
  bool visible_ = false;
  std::string reasoning_, content_;
  int n_reasoning_tokens_ = 0;

  struct ContentToken {
    size_t index;  // among the tokens pushed
    size_t begin;  // of its text in the content, as if no stop string had cut it
  };
  std::vector<ContentToken> content_tokens_;
  size_t n_pushed_ = 0;
  size_t n_content_bytes_ = 0;  // bytes offered to the stop matcher
};

}  // namespace thermo
