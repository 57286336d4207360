// What an answer may say next: a grammar, a choice of tools, a limit on its reasoning. The sampler asks it
// before every choice, for plain steps and for every node that a verification walk visits.
//
// Tokens are accepted strictly in order and never taken back. One thread at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

namespace thermo {

class TokenConstraint {
 public:
  virtual ~TokenConstraint() = default;

  // Whether allows() may refuse a token at present; false: it need not be asked.
  virtual bool constrains() const = 0;
  // Whether this token may come next. The same answer until the next accept().
  virtual bool allows(int32_t token) = 0;
  // All answers of allows() at once: a bit for each token, the lowest of the first word for token 0; what is
  // beyond is not allowed. Empty: ask for each. Valid until the next accept().
  virtual std::span<const uint64_t> mask() { return {}; }
  // The token that must come next, whatever the logits say; it does not count for penalties.
  virtual std::optional<int32_t> forced() const { return std::nullopt; }
  // What is written instead of a token that was chosen: mostly the token itself. Another one is forced.
  virtual int32_t instead_of(int32_t chosen) { return chosen; }
  // The next token of the answer, chosen or forced. End tokens are not accepted: the answer is over then.
  virtual void accept(int32_t token) = 0;
};

}  // namespace thermo
