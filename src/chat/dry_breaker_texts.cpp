#include "chat/dry_breaker_texts.h"

#include <algorithm>

namespace thermo {

std::shared_ptr<const DryBreakers> dry_breakers(const Tokenizer& tokenizer,
                                                std::span<const std::string> texts) {
  auto breakers = std::make_shared<DryBreakers>();
  for (const std::string& text : texts) {
    if (text.empty()) continue;
    std::vector<std::vector<int32_t>> rests(text.size());  // tokens of what follows the first n bytes
    for (size_t n = 1; n < text.size(); ++n)
      rests[n] = tokenizer.encode(std::string_view(text).substr(n), {.parse_special = false});
    for (int32_t id = 0; id < tokenizer.vocab().n_tokens(); ++id) {
      const std::string_view bytes = tokenizer.token_bytes(id);
      if (bytes.find(text) != std::string_view::npos) {
        breakers->add({&id, 1});
        continue;
      }
      for (size_t n = 1; n < std::min(text.size(), bytes.size() + 1); ++n) {
        if (!bytes.ends_with(std::string_view(text).substr(0, n))) continue;
        std::vector<int32_t> sequence = {id};
        sequence.insert(sequence.end(), rests[n].begin(), rests[n].end());
        breakers->add(sequence);
      }
    }
  }
  return breakers;
}

std::shared_ptr<const DryBreakers> DryBreakerCache::of(const Tokenizer& tokenizer,
                                                       const std::vector<std::string>& texts) {
  constexpr size_t kMost = 4;
  {
    const std::lock_guard lock(mutex_);
    for (const Entry& entry : entries_)
      if (entry.texts == texts) return entry.breakers;
  }
  // Without the lock: long lists take a quarter of a second, and others need not wait for them.
  auto breakers = dry_breakers(tokenizer, texts);
  const std::lock_guard lock(mutex_);
  entries_.push_front({texts, breakers});
  if (entries_.size() > kMost) entries_.pop_back();
  return breakers;
}

}  // namespace thermo
