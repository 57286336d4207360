// What an answer may say, from its first token on:
//
//     Thought -> Content: free text, a grammar, or tool calls -> end
//
// Reasoning is free. It may be limited: then its end is written for it. A tool call that begins inside it
// ends it first, so that what is written is what a template would write. The grammar begins after the
// reasoning and the two line ends that may follow it; once it is complete, the answer ends. A call of a tool
// is held to the tools' names and schemas.
//
// Markers (<think>, <tool_call> and their ends) are tokens where the vocabulary has them; otherwise they are
// found, and forbidden, in the text.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "chat/message.h"
#include "chat/tool_grammar.h"
#include "grammar/grammar_cache.h"
#include "grammar/grammar_matcher.h"
#include "sampling/token_constraint.h"
#include "tokenizer/bpe.h"

namespace thermo {

enum class ToolChoice : uint8_t {
  None,      // no call
  Auto,      // the model decides
  Required,  // at least one call
};

struct ConstraintOptions {
  // Reasoning.
  bool may_reason = true;      // the answer may open a thought itself, before anything else
  int reasoning_budget = -1;   // tokens of it; -1: any number
  bool keeps_reserve = false;  // the budget is what a limit on the answer leaves beside room for a reply
  bool ends_loops = false;     // reasoning that repeats itself ends, too
  // Written when the budget is used up, before the closing marker.
  std::string budget_message =
      "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking "
      "directly "
      "now.\n";

  // Content.
  std::shared_ptr<const Grammar> grammar = nullptr;  // nullptr: any text

  // Tools. With a grammar, the content is a text of the grammar or calls.
  std::vector<Tool> tools = {};                  // those that may be called; empty: none
  ToolChoice tool_choice = ToolChoice::Auto;     // of one tool by name: Required, and `tools` is that one
  ToolDialect tool_dialect = ToolDialect::Qwen;  // see tool_dialect()
  ToolGrammar tool_grammar = ToolGrammar::Auto;
  bool keep_tool_names = false;  // see ToolCallSyntax
  bool parallel_calls = true;

  std::shared_ptr<GrammarCache> grammars = nullptr;  // where those of tools are kept; nullptr: nowhere
};

// The part of a constraint that requests with the same options share: compiled grammars and what was learnt
// about them. One thread at a time uses it and the constraints that are made from it.
class AnswerRules {
 public:
  // `tokenizer` outlives it; `trie` is that of its vocabulary. InvalidArgument: tools that cannot be used, or
  // a call that is required and no tool. Unsupported: a grammar that is too ambiguous to be followed.
  static Result<std::shared_ptr<const AnswerRules>> compile(const Tokenizer& tokenizer,
                                                            std::shared_ptr<const TokenTrie> trie,
                                                            ConstraintOptions options);

  const std::vector<std::string>& ignored() const { return ignored_; }

 private:
  friend class AnswerConstraint;
  AnswerRules() = default;

  ConstraintOptions options_;
  std::shared_ptr<const TokenTrie> trie_;
  std::shared_ptr<TokenMachine> content_, calls_;  // nullptr: free text; no calls
  std::optional<int32_t> think_, end_think_, call_;
  int32_t end_token_ = -1;
  std::vector<int32_t> close_for_budget_, close_for_call_;
  std::vector<std::string> ignored_;
};

// One request's.
class AnswerConstraint : public TokenConstraint {
 public:
  // `starts_in_reasoning`: the prompt ends inside an open <think>.
  AnswerConstraint(std::shared_ptr<const AnswerRules> rules, bool starts_in_reasoning);

  bool constrains() const override;
  bool allows(int32_t token) override;
  std::span<const uint64_t> mask() override;
  std::optional<int32_t> forced() const override;
  int32_t instead_of(int32_t chosen) override;
  // A token that was not allowed ends the constraint: everything is allowed after it.
  void accept(int32_t token) override;

  // Any thread: a token came that was not allowed, because none was. What was written is not what was asked
  // for; why_lost() is a sentence for whoever asked.
  bool is_lost() const { return is_lost_.load(std::memory_order_acquire); }
  static const char* why_lost();

  // Any thread: the reasoning ends after the next token, as if its budget were used up. No effect on an
  // answer that does not reason any more.
  void end_reasoning() { end_asked_.store(true, std::memory_order_relaxed); }

  // How the reasoning ended: nullptr while it goes on or where there was none, else "natural", "budget",
  // "reserve", "client", "loop", "tool_call".
  const char* reasoning_close() const { return reasoning_close_; }
  // Tokens that were written because nothing else could be, and those of them that were reasoning.
  int n_forced() const { return n_forced_; }
  int n_forced_reasoning() const { return n_forced_reasoning_; }
  // What was accepted so far is an earlier run's: it does not count as forced.
  void begin_run() { n_forced_ = n_forced_reasoning_ = 0; }
  // Masks that were asked for, and the time they took together.
  int n_masks() const { return n_masks_; }
  double mask_seconds() const { return mask_seconds_; }

 private:
  enum class Phase : uint8_t { Thought, Free, Follow, Broken };
  struct Position {
    Phase phase = Phase::Free;
    bool may_open_thought = false;              // nothing was written yet
    int newlines_left = 0;                      // in Follow: so many line ends before the text are dropped
    std::string tail = {};                      // of free text: what may become a marker
    std::vector<GrammarMatcher> readings = {};  // in Follow: the grammars that the text may belong to
  };

  bool may_call() const { return rules_->calls_ != nullptr; }
  bool must_answer() const;
  // Whether markers are looked for in the text that is written now.
  bool scans() const;
  void begin_content(Position& at, bool after_thought) const;
  // The position after these bytes; false: they are not allowed.
  bool advance(Position& at, std::string_view bytes) const;
  bool enter_calls(Position& at, std::string_view rest) const;
  bool take(int32_t token);
  void limit_thought();
  bool repeats_itself(int32_t token);

  std::shared_ptr<const AnswerRules> rules_;
  Position at_;
  int n_thought_ = 0;
  std::vector<int32_t> thought_;  // its tokens, where loops are looked for
  std::vector<int> n_same_;       // of each period: tokens in a row that are those of a period ago
  bool loops_ = false;
  std::vector<uint64_t> mask_;  // scratch of mask()
  int n_masks_ = 0;
  double mask_seconds_ = 0.0;
  std::deque<int32_t> forced_;
  int n_forced_ = 0, n_forced_reasoning_ = 0;
  const char* reasoning_close_ = nullptr;
  std::atomic<bool> end_asked_{false}, is_lost_{false};
};

}  // namespace thermo
