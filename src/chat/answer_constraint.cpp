#include "chat/answer_constraint.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace thermo {
namespace {

constexpr std::string_view kThink = "<think>", kEndThink = "</think>";
constexpr const char* kTooAmbiguous =
    "a text can be read in more than 4000 ways at once, too many to follow; write the format with fewer "
    "alternatives that begin alike";

}  // namespace

Result<std::shared_ptr<const AnswerRules>> AnswerRules::compile(const Tokenizer& tokenizer,
                                                                std::shared_ptr<const TokenTrie> trie,
                                                                ConstraintOptions options) {
  const Vocab& vocab = tokenizer.vocab();
  std::shared_ptr<AnswerRules> rules(new AnswerRules);
  rules->think_ = vocab.find_special(kThink);
  rules->end_think_ = vocab.find_special(kEndThink);
  rules->call_ = vocab.find_special(kCallOpen);
  const bool has_end = !vocab.end_of_generation().empty();
  rules->end_token_ = vocab.eot().value_or(vocab.eos().value_or(has_end ? vocab.end_of_generation()[0] : -1));
  rules->close_for_call_ = tokenizer.encode(std::string(kEndThink) + "\n\n");
  rules->close_for_budget_ = tokenizer.encode(options.budget_message + std::string(kEndThink) + "\n\n");

  if (options.tool_choice == ToolChoice::Required && options.tools.empty())
    return Error{ErrorCode::InvalidArgument, "a tool call is required, but there are no tools"};
  if (options.tool_choice != ToolChoice::None && !options.tools.empty()) {
    const ToolCallSyntax syntax{.dialect = options.tool_dialect,
                                .grammar = options.tool_grammar,
                                .keep_names = options.keep_tool_names,
                                .parallel = options.parallel_calls,
                                .open = rules->call_,
                                .close = vocab.find_special(kCallClose)};
    const auto compile = [&] { return compile_tool_calls(options.tools, syntax); };
    Result<SchemaGrammar> calls =
        options.grammars ? options.grammars->get(source_of_tool_calls(options.tools, syntax), compile)
                         : compile();
    if (!calls) return calls.error();
    rules->calls_ = std::make_shared<TokenMachine>(calls->grammar, trie);
    rules->ignored_ = std::move(calls->ignored);
    if (rules->calls_->machine().gives_up_soon())
      return Error{ErrorCode::InvalidArgument, std::string("the tools' parameters: ") + kTooAmbiguous};
  }
  if (options.grammar && options.tool_choice != ToolChoice::Required) {
    rules->content_ = std::make_shared<TokenMachine>(options.grammar, trie);
    if (rules->content_->machine().gives_up_soon())
      return Error{ErrorCode::Unsupported, std::string("the format of the answer: ") + kTooAmbiguous};
  }
  rules->trie_ = std::move(trie);
  rules->options_ = std::move(options);
  return std::shared_ptr<const AnswerRules>(std::move(rules));
}

AnswerConstraint::AnswerConstraint(std::shared_ptr<const AnswerRules> rules, bool starts_in_reasoning)
    : rules_(std::move(rules)) {
  if (starts_in_reasoning)
    at_.phase = Phase::Thought;
  else
    begin_content(at_, false);
  limit_thought();
}

bool AnswerConstraint::must_answer() const {
  return rules_->content_ != nullptr || rules_->options_.tool_choice == ToolChoice::Required;
}

bool AnswerConstraint::scans() const {
  return (at_.phase == Phase::Thought && !rules_->end_think_) || !rules_->call_;
}

bool AnswerConstraint::constrains() const {
  switch (at_.phase) {
    case Phase::Thought:
    case Phase::Free:
      return !forced_.empty() || scans() || !may_call() || (at_.phase == Phase::Thought && must_answer());
    case Phase::Follow:
      return true;
    case Phase::Broken:
      return false;
  }
  return false;
}

bool AnswerConstraint::allows(int32_t token) {
  if (at_.phase == Phase::Broken) return true;
  if (!forced_.empty()) return token == forced_.front();
  if (at_.may_open_thought && rules_->think_ == token) return true;
  if (at_.phase == Phase::Follow) {
    const std::string_view bytes = rules_->trie_->bytes(token);
    if (at_.newlines_left > 0 && bytes.starts_with('\n')) {
      Position next = at_;
      return advance(next, bytes);
    }
    return std::any_of(at_.readings.begin(), at_.readings.end(),
                       [token](GrammarMatcher& reading) { return reading.allows(token); });
  }
  if (rules_->trie_->is_end(token)) return at_.phase == Phase::Free || !must_answer();
  if (rules_->call_ == token) return may_call();
  if (!scans() || !rules_->trie_->is_text(token)) return true;
  Position next = at_;
  return advance(next, rules_->trie_->bytes(token));
}

std::span<const uint64_t> AnswerConstraint::mask() {
  // Elsewhere nearly everything is allowed, or line ends come before the text.
  if (at_.phase != Phase::Follow || at_.newlines_left > 0 || !forced_.empty()) return {};
  const auto begin = std::chrono::steady_clock::now();
  mask_.assign(rules_->trie_->n_mask_words(), 0);
  const auto add = [this](int32_t token) {
    mask_[static_cast<size_t>(token) / 64] |= uint64_t{1} << (token % 64);
  };
  for (GrammarMatcher& reading : at_.readings) {
    const TokenMachine::Mask& own = *reading.mask();
    for (size_t i = 0; i < mask_.size(); ++i) mask_[i] |= own[i];
    if (reading.can_end())
      for (const int32_t token : rules_->trie_->ends()) add(token);
  }
  if (at_.may_open_thought && rules_->think_) add(*rules_->think_);
  ++n_masks_;
  mask_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return mask_;
}

std::optional<int32_t> AnswerConstraint::forced() const {
  if (at_.phase == Phase::Broken) return std::nullopt;
  if (!forced_.empty()) return forced_.front();
  if (at_.phase != Phase::Follow || rules_->end_token_ < 0) return std::nullopt;
  const bool over = std::all_of(at_.readings.begin(), at_.readings.end(),
                                [](const GrammarMatcher& reading) { return reading.must_end(); });
  return over ? std::optional(rules_->end_token_) : std::nullopt;
}

int32_t AnswerConstraint::instead_of(int32_t chosen) {
  if (at_.phase != Phase::Thought || rules_->call_ != chosen || !may_call() || !forced_.empty())
    return chosen;
  forced_.assign(rules_->close_for_call_.begin(), rules_->close_for_call_.end());
  forced_.push_back(chosen);
  reasoning_close_ = "tool_call";
  return forced_.front();
}

void AnswerConstraint::accept(int32_t token) {
  if (at_.phase == Phase::Broken) return;
  const Phase before = at_.phase;
  const bool was_forced = forced() == token;
  if (!forced_.empty()) {
    if (was_forced) {
      forced_.pop_front();
    } else {
      // An earlier run went on here; a thought that is still open is to be ended yet.
      forced_.clear();
      reasoning_close_ = nullptr;
    }
  }
  if (!take(token)) {
    at_ = {.phase = Phase::Broken};
    is_lost_.store(true, std::memory_order_release);
  }
  if (before == Phase::Thought) {
    ++n_thought_;
    loops_ = rules_->options_.ends_loops && repeats_itself(token);
    if (at_.phase != Phase::Thought && reasoning_close_ == nullptr) reasoning_close_ = "natural";
    if (was_forced && at_.phase == Phase::Thought) ++n_forced_reasoning_;
  } else if (at_.phase == Phase::Thought) {
    n_thought_ = 0;
  }
  if (was_forced) ++n_forced_;
  limit_thought();
}

const char* AnswerConstraint::why_lost() {
  return "the answer could not be held to its format: at one point no token fitted, or the text could be "
         "read in more than 4000 ways; write the format with fewer alternatives that begin alike";
}

void AnswerConstraint::limit_thought() {
  if (at_.phase != Phase::Thought || !forced_.empty() || reasoning_close_ != nullptr) return;
  const int budget = rules_->options_.reasoning_budget;
  const bool used_up = budget >= 0 && n_thought_ >= budget;
  const bool asked = end_asked_.load(std::memory_order_relaxed);
  if (!used_up && !asked && !loops_) return;
  forced_.assign(rules_->close_for_budget_.begin(), rules_->close_for_budget_.end());
  reasoning_close_ = used_up ? (rules_->options_.keeps_reserve ? "reserve" : "budget")
                     : asked ? "client"
                             : "loop";
}

// Whether the last tokens are one block, again and again.
bool AnswerConstraint::repeats_itself(int32_t token) {
  constexpr size_t kShortest = 16, kLongest = 256;  // blocks
  constexpr int kTimes = 6;
  n_same_.resize(kLongest + 1);
  bool found = false;
  for (size_t period = kShortest; period <= std::min(kLongest, thought_.size()); ++period) {
    int& n = n_same_[period];
    n = thought_[thought_.size() - period] == token ? n + 1 : 0;
    found |= n >= static_cast<int>(period) * (kTimes - 1);
  }
  thought_.push_back(token);
  return found;
}

// Moves on; false: the token has no place here.
bool AnswerConstraint::take(int32_t token) {
  const std::string_view bytes = rules_->trie_->bytes(token);
  if (at_.may_open_thought && rules_->think_ == token) {
    at_ = {.phase = Phase::Thought};
    reasoning_close_ = nullptr;
    return true;
  }
  if (at_.phase == Phase::Follow) return advance(at_, bytes);
  if (at_.phase == Phase::Thought && rules_->end_think_ == token) {
    begin_content(at_, true);
    return true;
  }
  if (rules_->call_ == token) return may_call() && enter_calls(at_, "");
  if (!rules_->trie_->is_text(token)) {
    at_.tail.clear();
    return true;
  }
  return advance(at_, bytes);
}

// One thought is enough: an answer that reasoned does not begin to reason again.
void AnswerConstraint::begin_content(Position& at, bool after_thought) const {
  at = {.phase = must_answer() ? Phase::Follow : Phase::Free,
        .may_open_thought = !after_thought && rules_->options_.may_reason};
  if (!must_answer()) return;
  at.newlines_left = after_thought ? 2 : 0;
  if (rules_->content_) at.readings.emplace_back(rules_->content_);
  if (rules_->calls_) at.readings.emplace_back(rules_->calls_);
}

bool AnswerConstraint::enter_calls(Position& at, std::string_view rest) const {
  GrammarMatcher calls(rules_->calls_);
  const bool entered = rules_->call_ ? calls.accept(*rules_->call_) : calls.accept_text(kCallOpen);
  at = {.phase = Phase::Follow};
  at.readings.push_back(std::move(calls));
  return entered && advance(at, rest);
}

bool AnswerConstraint::advance(Position& at, std::string_view bytes) const {
  if (at.phase == Phase::Follow) {
    while (at.newlines_left > 0 && bytes.starts_with('\n')) {
      bytes.remove_prefix(1);
      --at.newlines_left;
    }
    if (bytes.empty()) return true;
    at.newlines_left = 0;
    at.may_open_thought = false;
    std::vector<GrammarMatcher> left;
    for (GrammarMatcher& reading : at.readings)
      if (reading.accept_text(bytes)) left.push_back(std::move(reading));
    at.readings = std::move(left);
    return !at.readings.empty();
  }
  // Free text: markers that are no tokens are looked for in it.
  const bool find_end = at.phase == Phase::Thought && !rules_->end_think_, find_call = !rules_->call_;
  const auto may_become = [&at](std::string_view marker) { return marker.starts_with(at.tail); };
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != '\n' && bytes[i] != ' ') at.may_open_thought = false;
    at.tail += bytes[i];
    while (!at.tail.empty() && !(find_end && may_become(kEndThink)) && !(find_call && may_become(kCallOpen)))
      at.tail.erase(0, 1);
    const std::string_view rest = bytes.substr(i + 1);
    if (find_end && at.tail == kEndThink) {
      begin_content(at, true);
      return advance(at, rest);
    }
    if (find_call && at.tail == kCallOpen) return may_call() && enter_calls(at, rest);
  }
  return true;
}

}  // namespace thermo
