#include "speculative/oracle_drafter.h"

#include <algorithm>
#include <cmath>

namespace thermo {
namespace {

constexpr float kLeast = 1e-3f;  // said of what is never right, so that it is drafted all the same

// splitmix64.
uint64_t hash_of(uint64_t seed, uint64_t position) {
  uint64_t z = seed * 0x9E3779B97F4A7C15u + position * 0xD6E8FEB86659FD93u;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}

}  // namespace

OracleDrafter::OracleDrafter(std::unique_ptr<Drafter> drafter, OracleOptions options, int n_vocab,
                             int n_sequences)
    : drafter_(std::move(drafter)),
      options_(std::move(options)),
      n_vocab_(static_cast<uint64_t>(n_vocab)),
      n_tokens_(static_cast<size_t>(n_sequences)) {}

void OracleDrafter::commit(int sequence, std::span<const TokenId> tokens, const StateRows& states) {
  drafter_->commit(sequence, tokens, states);
  n_tokens_[static_cast<size_t>(sequence)] += tokens.size();
}

void OracleDrafter::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  drafter_->draft(requests, drafts);
  const auto n_ranks = static_cast<int>(options_.probabilities.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    const size_t first = n_tokens_[static_cast<size_t>(requests[i].sequence)] + 1;
    const size_t n_known = options_.text.size() - std::min(options_.text.size(), first);
    const int n = static_cast<int>(std::min(static_cast<size_t>(requests[i].n_depths), n_known));
    drafts[i].reset(n, n_ranks);
    for (int depth = 1; depth <= n; ++depth) {
      const size_t position = first + static_cast<size_t>(depth) - 1;
      const auto right = static_cast<uint64_t>(options_.text[position]);
      const uint64_t hash = hash_of(options_.seed, position);
      float draw = static_cast<float>(hash >> 40) * 0x1p-24f;
      bool found = false;
      for (size_t k = 0; k < options_.probabilities.size(); ++k) {
        const float p = options_.probabilities[k];
        const bool is_right = !found && draw < p;
        found = found || is_right;
        draw -= p;
        // Any other token: a different one at each rank.
        const uint64_t other = 1 + (hash + k) % (n_vocab_ - 1);
        drafts[i].tokens_at(depth)[k] = static_cast<int32_t>(is_right ? right : (right + other) % n_vocab_);
        drafts[i].logprobs_at(depth)[k] = std::log(std::max(p, kLeast));
      }
    }
  }
}

void OracleDrafter::truncate(int sequence, int n) {
  drafter_->truncate(sequence, n);
  size_t& n_tokens = n_tokens_[static_cast<size_t>(sequence)];
  n_tokens = std::min(n_tokens, static_cast<size_t>(n));
}

void OracleDrafter::resume(int sequence, std::span<const TokenId> tokens, std::span<const float> snapshot) {
  drafter_->resume(sequence, tokens, snapshot);
  n_tokens_[static_cast<size_t>(sequence)] = tokens.size();
}

void OracleDrafter::restore(int sequence, int n, std::span<const float> snapshot) {
  drafter_->restore(sequence, n, snapshot);
  n_tokens_[static_cast<size_t>(sequence)] = static_cast<size_t>(n);
}

}  // namespace thermo
