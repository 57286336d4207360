// Chooses the tokens of one reply.
//
// A choice is a pure function of the logits, the tokens seen so far, the parameters and
// (seed, choice, position): it does not depend on batching, speculation, pauses or cache hits. The engine
// calls sample() and accept() in turn, for plain steps and for every node that a verification walk visits; a
// sampled token is always emitted, so nothing is ever taken back.
//
// One thread at a time. Copying a sampler copies its history, which is how n replies share a prompt.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "sampling/logit_scan.h"
#include "sampling/logprobs.h"
#include "sampling/sampling_params.h"
#include "sampling/token_history.h"

namespace thermo {

// Which tokens a grammar allows next. Must give the same answers throughout one sample().
struct TokenFilter {
  TokenFilter() = default;  // allows everything
  template <std::predicate<int32_t> Allows>
  TokenFilter(Allows f) : allows(std::move(f)) {}

  explicit operator bool() const { return static_cast<bool>(allows); }
  bool operator()(int32_t token) const { return allows(token); }

  // Where the parameters permit, it is asked only for the most likely tokens, so it may be slow.
  std::function<bool(int32_t)> allows;
  // All answers at once, for when many tokens are asked for: a bit for each, the lowest of the first word for
  // token 0; what is beyond is not allowed. Empty: not known.
  std::function<std::span<const uint64_t>()> mask;
};

class Sampler {
 public:
  // `end_tokens` are those that ignore_eos and min_tokens hold back; ids outside the vocabulary are ignored.
  // REQUIRES: validate(params, n_vocab) is ok, n_vocab > 0.
  Sampler(const SamplingParams& params, int n_vocab, std::span<const int32_t> end_tokens = {});

  // Tokens before the reply: repetition penalty and DRY look at them.
  void accept_prompt(std::span<const int32_t> tokens);
  // The next token of the reply. A forced token counts for min_tokens but not for penalties.
  void accept(int32_t token, bool forced = false);

  // The token for `position` (absolute, of the token to be chosen). Changes no history. Always an id in
  // 0..n_vocab-1: NaN is never chosen while any logit is above -inf, and when none is, the lowest id that is
  // not banned and that the filter allows. REQUIRES: logits.size() == n_vocab.
  int32_t sample(std::span<const float> logits, int64_t position, const TokenFilter& filter = {});

  // The same token from the top of the row; nullopt when that does not settle it and the row is needed.
  // Exact: what is not listed is below the floor, and tokens are only ever lowered without being listed.
  std::optional<int32_t> sample(const TopLogits& top, int64_t position, const TokenFilter& filter = {});
  // What the next sample() should be given. With a filter, Best settles it only if the best token is allowed.
  LogitsNeed need() const noexcept;

  // Whether the next token without a filter is the argmax of the raw logits (lowest id on ties), so that the
  // caller may take it where the logits are. May change from one accept() to the next.
  bool is_plain_greedy() const noexcept;

  uint64_t seed() const noexcept { return seed_; }  // the one given, or the one drawn
  const SamplingParams& params() const noexcept { return params_; }
  int64_t n_accepted() const noexcept { return n_accepted_; }  // tokens of the reply, forced ones included

 private:
  bool end_tokens_banned() const noexcept;
  bool is_banned(int32_t token) const;
  bool edits_nothing(std::span<const RepeatedRun> runs) const noexcept;
  // Nothing changes this token's logit.
  bool leaves_alone(int32_t token) const;
  // Bias, penalties and DRY, in order; the filter comes between them. `logit(token)` points to the token's
  // logit, or is null.
  template <class LogitOf, class Filter>
  void edit_tokens(const LogitOf& logit, const Filter& filter, std::span<const RepeatedRun> runs) const;
  // The logits after bias, penalties, filter and DRY: `logits` itself when none applies, else edited_.
  std::span<const float> edit(std::span<const float> logits, const TokenFilter& eager_filter);
  int32_t last_resort(const TokenFilter& filter) const;
  // Fills candidates_ with the first n tokens of the row that the filter allows. REQUIRES: top_ is the row's.
  void take_allowed(int64_t n, std::span<const float> row, const TokenFilter& filter);
  void gather(std::span<const float> row, const TokenFilter& filter);
  void sort_first(size_t n, const TokenFilter& filter);
  bool edit_top(const TopLogits& top);
  bool gather_top(const TopLogits& top, double unlisted);
  bool cut_top_p_between(double least, double most, bool whole);
  double sum_of_candidates() const;
  void cut_by_mass();
  void cut_typical();
  void cut_top_p(double total);
  void cut_min_p();
  void cut_xtc(int64_t position);
  int32_t choose(int64_t position) const;

  SamplingParams params_;
  int n_vocab_;
  uint64_t seed_;
  std::vector<int32_t> end_tokens_;

  // History; each part is kept only if a parameter looks at it.
  int64_t n_accepted_ = 0;
  TokenCounts reply_counts_;   // presence and frequency penalty
  TokenWindow repeat_window_;  // repetition penalty
  TokenCounts repeat_counts_;  // tokens of repeat_window_
  TokenWindow dry_window_;     // DRY; forced tokens are kForced

  // Scratch of one sample().
  std::vector<float> edited_;
  std::vector<Candidate> candidates_;
  std::vector<double> weights_;
  std::vector<int32_t> places_;  // table of tokens: their indices in candidates_, or -1
  TopTokens top_;
  RunFinder runs_;
};

}  // namespace thermo
