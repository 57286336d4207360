// Texts at which repeated runs end for DRY, as the vocabulary has them.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "sampling/dry_breakers.h"
#include "tokenizer/bpe.h"

namespace thermo {

inline constexpr size_t kMaxDryBreakers = 32, kMaxDryBreakerBytes = 40;

// What llama.cpp and most programs use: the ends of lines, and what begins speech, lists and emphasis.
inline std::vector<std::string> usual_dry_breakers() {
  return {"\n", ":", "\"", "*"};
}

// As llama.cpp reads them: every token that has the text in it, and every token whose end is the beginning
// of the text, followed by the tokens of the rest. Looks at the whole vocabulary, for each text.
std::shared_ptr<const DryBreakers> dry_breakers(const Tokenizer& tokenizer,
                                                std::span<const std::string> texts);

// The same for whoever asks with the same few lists again and again. Any thread.
class DryBreakerCache {
 public:
  std::shared_ptr<const DryBreakers> of(const Tokenizer& tokenizer, const std::vector<std::string>& texts);

 private:
  struct Entry {
    std::vector<std::string> texts;
    std::shared_ptr<const DryBreakers> breakers;
  };
  std::mutex mutex_;
  std::deque<Entry> entries_;  // the newest first
};

}  // namespace thermo
