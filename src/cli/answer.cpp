#include "cli/answer.h"

namespace thermo {

AnswerParser::AnswerParser(const Tokenizer& tokenizer, AnswerOptions options)
    : tokenizer_(&tokenizer), in_reasoning_(options.starts_in_reasoning), stops_(std::move(options.stops)) {
  if (!options.split_reasoning) {
    visible_ = true;  // a raw completion begins with whatever it begins with
    in_reasoning_ = false;
    return;
  }
  think_ = tokenizer.vocab().find_special("<think>");
  end_think_ = tokenizer.vocab().find_special("</think>");
}

AnswerParser::Piece AnswerParser::push(int32_t token) {
  const size_t index = n_pushed_++;
  if (stopped()) return {};
  if (end_think_ && token == *end_think_) {
    Piece piece;
    if (in_reasoning_) {
      piece.reasoning = reasoning_utf8_.finish();
      reasoning_ += piece.reasoning;
      held_newlines_.clear();
      in_reasoning_ = false;
      newlines_to_drop_ = 2;
    }
    return piece;  // in the content a stray marker is dropped
  }
  if (think_ && token == *think_ && !in_reasoning_ && !visible_) {
    in_reasoning_ = true;
    newlines_to_drop_ = 1;
    held_whitespace_.clear();
    return {};
  }
  std::string_view bytes = tokenizer_->visible_bytes(token);
  if (in_reasoning_) ++n_reasoning_tokens_;
  while (newlines_to_drop_ > 0 && bytes.starts_with('\n')) {
    bytes.remove_prefix(1);
    --newlines_to_drop_;
  }
  if (!bytes.empty()) newlines_to_drop_ = 0;
  if (in_reasoning_) return {push_reasoning(bytes), {}};
  if (!bytes.empty()) content_tokens_.push_back({index, n_content_bytes_ + held_whitespace_.size()});
  return {{}, push_content(bytes)};
}

std::string AnswerParser::push_reasoning(std::string_view bytes) {
  std::string text = held_newlines_ + reasoning_utf8_.push(bytes);
  const size_t end = text.find_last_not_of('\n') + 1;  // npos + 1 is 0
  held_newlines_ = text.substr(end);
  text.resize(end);
  reasoning_ += text;
  return text;
}

std::string AnswerParser::push_content(std::string_view bytes) {
  std::string all = held_whitespace_;
  all += bytes;
  held_whitespace_.clear();
  if (!visible_) {
    if (all.find_first_not_of(" \n\r\t") == std::string::npos) {
      held_whitespace_ = std::move(all);
      return {};
    }
    visible_ = true;
  }
  n_content_bytes_ += all.size();
  std::string text = content_utf8_.push(stops_.push(all));
  content_ += text;
  return text;
}

AnswerParser::Piece AnswerParser::finish() {
  Piece piece;
  if (in_reasoning_) piece.reasoning = reasoning_utf8_.finish();
  piece.content = content_utf8_.push(stops_.flush());
  piece.content += content_utf8_.finish();
  reasoning_ += piece.reasoning;
  content_ += piece.content;
  return piece;
}

std::vector<size_t> AnswerParser::content_tokens() const {
  std::vector<size_t> indices;
  for (const ContentToken& token : content_tokens_)
    if (token.begin < content_.size()) indices.push_back(token.index);
  return indices;
}

}  // namespace thermo
