#include "speculative/lookup_drafter.h"

#include <algorithm>
#include <cmath>

namespace thermo {
namespace {

constexpr int kMaxAgreement = 32;  // tokens compared backwards; more say no more
constexpr int kMaxTries = 16;      // earlier ends of the run that are looked at
constexpr int kMaxOthers = 64;     // and ends of other runs on the way to them

uint64_t mix(uint64_t hash, TokenId token) {
  hash = (hash ^ static_cast<uint32_t>(token)) * 0x9E3779B97F4A7C15u;
  return hash ^ hash >> 29;
}

// How likely a token after a match of this length is the one that followed. The planner corrects it by what
// is accepted.
float probability(int match) {
  return match >= 16 ? 0.97f : match >= 8 ? 0.9f : match >= 5 ? 0.75f : 0.5f;
}

}  // namespace

LookupDrafter::LookupDrafter(int n_sequences, int n_ctx) {
  texts_.reserve(static_cast<size_t>(n_sequences));
  for (int i = 0; i < n_sequences; ++i) texts_.emplace_back(n_ctx);
}

LookupDrafter::Text::Text(int n_ctx)
    : last_end(static_cast<size_t>(kPlacesPerToken) * static_cast<size_t>(n_ctx)) {
  tokens.reserve(static_cast<size_t>(n_ctx));
  previous_end.reserve(static_cast<size_t>(n_ctx) + 1);
}

int32_t& LookupDrafter::Text::last_of_run(size_t end) {
  uint64_t hash = 0;
  for (size_t i = end - kMinMatch; i < end; ++i) hash = mix(hash, tokens[i]);
  return last_end[hash % last_end.size()];
}

void LookupDrafter::Text::push(TokenId token) {
  tokens.push_back(token);
  const size_t n = tokens.size();
  previous_end.resize(n + 1, 0);
  previous_end[n] = 0;
  if (n < kMinMatch) return;
  int32_t& last = last_of_run(n);
  previous_end[n] = last;
  last = static_cast<int32_t>(n);
}

void LookupDrafter::Text::truncate(size_t n) {
  while (tokens.size() > n) {
    const size_t end = tokens.size();
    if (end >= kMinMatch) last_of_run(end) = previous_end[end];
    previous_end.pop_back();
    tokens.pop_back();
  }
}

int LookupDrafter::Text::agreement(size_t end) const {
  int n = 0;
  while (n < kMaxAgreement && static_cast<size_t>(n) < end &&
         tokens[end - 1 - static_cast<size_t>(n)] == tokens[tokens.size() - 1 - static_cast<size_t>(n)])
    ++n;
  return n;
}

size_t LookupDrafter::Text::find(int& length) const {
  length = 0;
  const size_t n = tokens.size();
  if (n <= kMinMatch) return 0;
  size_t best = 0;
  int n_tries = 0, n_others = 0;
  for (auto end = static_cast<size_t>(previous_end[n]);
       end > 0 && n_tries < kMaxTries && n_others < kMaxOthers;
       end = static_cast<size_t>(previous_end[end])) {
    const int agree = agreement(end);
    ++(agree < kMinMatch ? n_others : n_tries);
    if (agree < kMinMatch || agree <= length) continue;  // of equals the latest
    best = end;
    length = agree;
    if (length == kMaxAgreement) break;
  }
  return best;
}

void LookupDrafter::commit(int sequence, std::span<const TokenId> tokens, const StateRows&) {
  Text& text = texts_[static_cast<size_t>(sequence)];
  for (const TokenId token : tokens) text.push(token);
}

void LookupDrafter::truncate(int sequence, int n) {
  texts_[static_cast<size_t>(sequence)].truncate(static_cast<size_t>(n));
}

void LookupDrafter::resume(int sequence, std::span<const TokenId> tokens, std::span<const float>) {
  Text& text = texts_[static_cast<size_t>(sequence)];
  const auto same =
      std::mismatch(tokens.begin(), tokens.end(), text.tokens.begin(), text.tokens.end()).first -
      tokens.begin();
  text.truncate(static_cast<size_t>(same));
  for (const TokenId token : tokens.subspan(static_cast<size_t>(same))) text.push(token);
}

void LookupDrafter::draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) {
  for (size_t r = 0; r < requests.size(); ++r) {
    const DraftRequest& request = requests[r];
    Text& text = texts_[static_cast<size_t>(request.sequence)];
    text.push(request.root);
    int length = 0;
    const size_t end = text.find(length);
    // What follows may run into the present: a repeated pattern goes on.
    const int n = end == 0 ? 0 : request.n_depths;
    drafts[r].reset(n, 1);
    const size_t period = text.tokens.size() - end;
    for (int d = 1; d <= n; ++d) {
      drafts[r].tokens_at(d)[0] = text.tokens[end + static_cast<size_t>(d - 1) % period];
      drafts[r].logprobs_at(d)[0] = std::log(probability(length + d - 1));
    }
    text.truncate(text.tokens.size() - 1);
  }
}

}  // namespace thermo
