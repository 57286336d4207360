// The tokens of finished answers, so that a later prompt repeats them as they were. A client sends an answer
// back as text: without its reasoning, with other white space, with its calls' arguments written anew. Made
// into tokens again, that differs from what the model wrote, and everything after the difference would have
// to be computed again. Here it is found by what it says and by the tokens before it.
//
// Any thread. Memory only, of one process; owners (API keys) see only their own.
#pragma once

#include <cstdint>
#include <list>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "chat/message.h"
#include "tokenizer/vocab.h"

namespace thermo {

// Of a beginning of a prompt; tokens are added one after the other.
class PromptHash {
 public:
  void add(std::span<const int32_t> ids) {
    for (const int32_t id : ids) {
      a_ = (a_ ^ static_cast<uint32_t>(id)) * 0x9E3779B97F4A7C15u;
      a_ ^= a_ >> 29;
      b_ = (b_ + static_cast<uint32_t>(id)) * 0xD6E8FEB86659FD93u;
      b_ ^= b_ >> 32;
    }
    n_ += ids.size();
  }
  bool operator==(const PromptHash&) const = default;

 private:
  uint64_t a_ = 1, b_ = 2, n_ = 0;
};

class TurnStore {
 public:
  // 0 bytes: it keeps nothing.
  explicit TurnStore(uint64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // An answer that ended. `ids`: what the model wrote, without the end token.
  void remember(const std::string& owner, std::span<const int32_t> prompt, const Turn& answer,
                std::span<const int32_t> ids, const Vocab& vocab);

  // Whether there is an answer that says this, after whatever prompt, and whether one of them has reasoning.
  struct Known {
    bool has_reasoning = false;
  };
  std::optional<Known> known(const std::string& owner, const Turn& turn) const;

  // The tokens of that answer after a prompt whose tokens up to its last end token are `head`: the rest of
  // that prompt, then what the model wrote.
  struct Found {
    std::vector<int32_t> ids;
    bool has_reasoning = false;
  };
  std::optional<Found> find(const std::string& owner, const Turn& turn, const PromptHash& head);

  uint64_t limit_bytes() const { return limit_bytes_; }
  uint64_t bytes() const;

 private:
  struct Entry {
    std::string name;       // owner and message
    std::string reasoning;  // trimmed
    PromptHash head;
    std::vector<int32_t> ids;
    uint64_t bytes() const;
  };
  using Entries = std::list<Entry>;
  void drop(Entries::iterator entry);

  const uint64_t limit_bytes_;
  mutable std::mutex mutex_;  // for all below
  Entries entries_;           // used last, first
  std::unordered_multimap<size_t, Entries::iterator> by_name_;
  uint64_t bytes_ = 0;
};

}  // namespace thermo
