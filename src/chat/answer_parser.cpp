#include "chat/answer_parser.h"

#include <algorithm>

namespace thermo {
namespace {

constexpr std::string_view kSpelling[] = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<function="};
constexpr const char* kSpace = " \n\r\t";

}  // namespace

AnswerParser::AnswerParser(const Tokenizer& tokenizer, AnswerOptions options)
    : tokenizer_(&tokenizer),
      state_(options.starts_in_reasoning && options.split_reasoning ? State::Reasoning : State::Content),
      stops_(options.stop_everywhere ? std::vector<std::string>{} : options.stops),
      all_stops_(options.stop_everywhere ? options.stops : std::vector<std::string>{}),
      thought_is_text_(!options.split_reasoning),
      in_text_thought_(thought_is_text_ && options.starts_in_reasoning) {
  visible_ = thought_is_text_;  // a raw completion begins with whatever it begins with
  tools_ = std::move(options.tools);
  for (int i = 0; i < kMarkers; ++i) {
    const Marker marker = static_cast<Marker>(i);
    if (tools_.empty() && (thought_is_text_ || !is_of_thought(marker))) continue;
    if (marker != Marker::Function)
      marker_ids_[i] = tokenizer.vocab().find_special(std::string(kSpelling[i]));
    in_text_[i] = !marker_ids_[i];
  }
}

AnswerParser::Events AnswerParser::push(int32_t token) {
  const size_t index = n_pushed_++;
  if (stopped()) return {};
  for (int i = 0; i < kMarkers; ++i) {
    if (marker_ids_[i] != token) continue;
    if (thought_is_text_ && is_of_thought(static_cast<Marker>(i))) {
      in_text_thought_ = static_cast<Marker>(i) == Marker::Think;
      break;
    }
    scan(all_stops_.flush(), true);
    if (stopped()) return take_events();
    const bool thought = state_ == State::Reasoning, called = in_call();
    take_marker(static_cast<Marker>(i));
    if (called || in_call())
      call_tokens_.indices.push_back(index);
    else if (thought || state_ == State::Reasoning)
      reasoning_tokens_.indices.push_back(index);
    return take_events();
  }
  const std::string_view bytes = tokenizer_->visible_bytes(token);
  if (state_ == State::Reasoning) {
    ++n_reasoning_tokens_;
    reasoning_tokens_.indices.push_back(index);
  }
  if (in_call()) call_tokens_.indices.push_back(index);
  const size_t n_dropped =
      std::min<size_t>(static_cast<size_t>(newlines_to_drop_), bytes.find_first_not_of('\n'));
  if (state_ == State::Content && n_dropped < bytes.size())
    content_tokens_.push_back(
        {index, n_content_bytes_ + held_whitespace_.size() + unscanned_.size() + all_stops_.n_held()});
  return push_text(bytes);
}

AnswerParser::Events AnswerParser::push_text(std::string_view bytes) {
  scan(all_stops_.push(bytes), false);
  return take_events();
}

AnswerParser::Events AnswerParser::finish(bool end_of_turn) {
  scan(all_stops_.flush(), true);
  if (state_ == State::Call && end_of_turn && !stopped()) end_call(true);
  if (state_ == State::Reasoning) {
    std::string text = reasoning_utf8_.finish();
    reasoning_ += text;
    emit(AnswerEvent::Kind::Reasoning, std::move(text));
  } else if (calls_.empty()) {
    flush_content();
    content_ += held_tail_;
    emit(AnswerEvent::Kind::Content, std::exchange(held_tail_, {}));
  }
  return take_events();
}

// Cuts the text at markers that are spelled in it.
void AnswerParser::scan(std::string_view bytes, bool at_end) {
  if (std::none_of(std::begin(in_text_), std::end(in_text_), [](bool on) { return on; })) {
    take_text(bytes);
    return;
  }
  unscanned_ += bytes;
  while (!unscanned_.empty()) {
    if (unscanned_[0] != '<') {
      const size_t n = std::min(unscanned_.find('<'), unscanned_.size());
      take_text(std::string_view(unscanned_).substr(0, n));
      unscanned_.erase(0, n);
      continue;
    }
    const auto wanted = [this](Marker marker) {
      switch (marker) {
        case Marker::Think:
        case Marker::EndThink:
          return state_ == State::Reasoning || state_ == State::Content;
        case Marker::Call:
          return state_ != State::Call && state_ != State::NoCall;
        case Marker::EndCall:
          return state_ != State::Reasoning;
        case Marker::Function:
          break;
      }
      return state_ == State::AfterCall || (state_ == State::Content && at_line_start_ && !in_text_thought_);
    };
    int found = -1;
    for (int i = 0; i < kMarkers; ++i) {
      if (!in_text_[i] || !wanted(static_cast<Marker>(i))) continue;
      if (unscanned_.starts_with(kSpelling[i])) found = i;
      if (!at_end && unscanned_.size() < kSpelling[i].size() && kSpelling[i].starts_with(unscanned_)) return;
    }
    const size_t n = found < 0 ? 1 : kSpelling[found].size();
    if (found < 0) take_text("<");
    unscanned_.erase(0, n);
    if (found >= 0) take_marker(static_cast<Marker>(found));
  }
}

void AnswerParser::take_marker(Marker marker) {
  const std::string_view spelling = kSpelling[static_cast<int>(marker)];
  if (thought_is_text_ && is_of_thought(marker)) {
    in_text_thought_ = marker == Marker::Think;
    return take_text(spelling);
  }
  switch (marker) {
    case Marker::Think:
      if (state_ != State::Content || visible_) return take_text(spelling);
      state_ = State::Reasoning;
      newlines_to_drop_ = 1;
      held_whitespace_.clear();
      return;
    case Marker::EndThink:
      if (state_ == State::Reasoning) return end_reasoning();
      if (state_ == State::Call || state_ == State::NoCall) take_text(spelling);
      return;  // in the content a stray marker is dropped
    case Marker::Call:
      // Inside a value it is text, after the arguments the next call.
      if ((state_ == State::Call && !call_->complete()) || state_ == State::NoCall)
        return take_text(spelling);
      if (state_ == State::Reasoning) end_reasoning();
      return begin_call(false);
    case Marker::EndCall:
      if (state_ == State::Reasoning) return take_text(spelling);
      if (state_ == State::Call) end_call(false);
      if (state_ == State::NoCall) {
        take_text(spelling);
        state_ = State::Content;
      }
      return;
    case Marker::Function:
      begin_call(true);
      return take_text(spelling);
  }
}

void AnswerParser::take_text(std::string_view bytes) {
  while (newlines_to_drop_ > 0 && bytes.starts_with('\n')) {
    bytes.remove_prefix(1);
    --newlines_to_drop_;
  }
  if (bytes.empty()) return;
  newlines_to_drop_ = 0;
  switch (state_) {
    case State::Reasoning:
      return take_reasoning(bytes);
    case State::Content:
    case State::NoCall:
      return take_content(bytes);
    case State::Call:
      call_->push(bytes);
      return drain_call();
    case State::AfterCall:
      if (bytes.find_first_not_of(kSpace) != std::string_view::npos) ++repairs_.dropped_texts;
      return;
  }
}

void AnswerParser::begin_call(bool bare) {
  // A marker that is spelled was content until now.
  while (!content_tokens_.empty() &&
         content_tokens_.back().begin >= n_content_bytes_ + held_whitespace_.size()) {
    call_tokens_.indices.push_back(content_tokens_.back().index);
    content_tokens_.pop_back();
  }
  std::sort(call_tokens_.indices.begin() + static_cast<long>(call_tokens_.n_taken),
            call_tokens_.indices.end());
  state_ = State::Call;
  in_text_thought_ = false;
  newlines_to_drop_ = 0;
  call_is_bare_ = bare;
  n_damaged_before_ = repairs_.n_damaged();
  call_.emplace(tools_, repairs_);
}

// What the call parser has found since the last time.
void AnswerParser::drain_call() {
  if (call_->rejected()) {
    ++repairs_.unknown_tools;
    const std::string body =
        (call_is_bare_ ? "" : std::string(kSpelling[static_cast<int>(Marker::Call)])) + call_->body();
    call_.reset();
    state_ = call_is_bare_ ? State::Content : State::NoCall;
    take_content(body);
    return;
  }
  if (!call_->begun()) return;
  const bool announced = !calls_.empty() && !calls_.back().complete;
  if (!announced) {
    if (calls_.empty()) flush_content();
    if (stopped()) return;  // the content ended before the call
    n_passed_bytes_ -= held_tail_.size();
    held_tail_.clear();
    calls_.push_back({.id = "", .name = call_->name(), .arguments = "", .complete = false});
    emit(AnswerEvent::Kind::CallBegin, call_->name(), static_cast<int>(calls_.size()) - 1);
    if (call_is_bare_) ++repairs_.bare_functions;
  }
  const int index = static_cast<int>(calls_.size()) - 1;
  const std::string arguments = call_->take_arguments();
  calls_.back().arguments += arguments;
  emit(AnswerEvent::Kind::CallArguments, arguments, index);
  if (!call_->complete()) return;
  calls_.back().complete = true;
  calls_.back().repaired = repairs_.n_damaged() > n_damaged_before_;
  events_.push_back({AnswerEvent::Kind::CallEnd, "", index});
  state_ = State::AfterCall;
  call_.reset();
}

void AnswerParser::end_call(bool marker_missing) {
  call_->end(marker_missing);
  drain_call();
}

void AnswerParser::end_reasoning() {
  std::string text = reasoning_utf8_.finish();
  reasoning_ += text;
  emit(AnswerEvent::Kind::Reasoning, std::move(text));
  held_newlines_.clear();
  state_ = State::Content;
  newlines_to_drop_ = 2;
}

void AnswerParser::take_reasoning(std::string_view bytes) {
  std::string text = held_newlines_ + reasoning_utf8_.push(bytes);
  const size_t end = text.find_last_not_of('\n') + 1;  // npos + 1 is 0
  held_newlines_ = text.substr(end);
  text.resize(end);
  reasoning_ += text;
  emit(AnswerEvent::Kind::Reasoning, std::move(text));
}

void AnswerParser::take_content(std::string_view bytes) {
  if (!calls_.empty()) {  // nothing may follow a call but another one
    ++repairs_.dropped_texts;
    return;
  }
  at_line_start_ = bytes.ends_with('\n');
  std::string all = held_whitespace_;
  all += bytes;
  held_whitespace_.clear();
  if (!visible_) {
    if (all.find_first_not_of(kSpace) == std::string::npos) {
      held_whitespace_ = std::move(all);
      return;
    }
    visible_ = true;
  }
  n_content_bytes_ += all.size();
  const std::string passed = stops_.push(all);
  n_passed_bytes_ += passed.size();
  emit_content(content_utf8_.push(passed));
}

// What waits for a stop text or for the rest of a character.
void AnswerParser::flush_content() {
  const std::string passed = stops_.flush();
  n_passed_bytes_ += passed.size();
  const std::string text = content_utf8_.push(passed);
  emit_content(text + content_utf8_.finish());
}

void AnswerParser::emit_content(std::string text) {
  if (text.empty()) return;
  if (!tools_.empty()) {
    text = held_tail_ + text;
    const size_t end = text.find_last_not_of(kSpace) + 1;
    held_tail_ = text.substr(end);
    text.resize(end);
  }
  content_ += text;
  emit(AnswerEvent::Kind::Content, std::move(text));
}

void AnswerParser::emit(AnswerEvent::Kind kind, std::string text, int call) {
  if (text.empty()) return;
  events_.push_back({kind, std::move(text), call});
}

// Of those that the stop matcher got, bytes whose text is in the content: as it is, or as U+FFFD.
size_t AnswerParser::n_shown_bytes() const {
  return n_passed_bytes_ - content_utf8_.n_held() - held_tail_.size();
}

std::vector<size_t> AnswerParser::take_content_tokens() {
  const size_t n_shown = n_shown_bytes();
  std::vector<size_t> indices;
  for (; n_taken_ < content_tokens_.size() && content_tokens_[n_taken_].begin < n_shown; ++n_taken_)
    indices.push_back(content_tokens_[n_taken_].index);
  return indices;
}

void AnswerParser::skip_tokens() {
  n_taken_ = content_tokens_.size();
  n_reasoning_tokens_ = 0;
  reasoning_tokens_.take();
  call_tokens_.take();
}

std::vector<size_t> AnswerParser::content_tokens() const {
  const size_t n_shown = n_shown_bytes();
  std::vector<size_t> indices;
  for (const ContentToken& token : content_tokens_)
    if (token.begin < n_shown) indices.push_back(token.index);
  return indices;
}

}  // namespace thermo
