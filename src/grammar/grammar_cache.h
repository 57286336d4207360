// Compiled grammars by what they were made of: requests with the same tools or schemas share them. The least
// recently used go first.
#pragma once

#include <functional>
#include <list>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "grammar/json_schema.h"

namespace thermo {

// Any thread.
class GrammarCache {
 public:
  explicit GrammarCache(size_t limit_bytes = size_t{32} << 20) : limit_bytes_(limit_bytes) {}

  // `source` says all that the grammar is made of. It is compiled where it is not known, by several threads
  // at once if they ask at once; errors are not kept.
  Result<SchemaGrammar> get(std::string_view source, const std::function<Result<SchemaGrammar>()>& compile);
  uint64_t n_found() const;  // of those asked for

 private:
  struct Entry {
    std::string key;
    SchemaGrammar compiled;
    size_t n_bytes;
  };

  const size_t limit_bytes_;
  mutable std::mutex mutex_;
  std::list<Entry> entries_;  // the last used first
  std::unordered_map<std::string, std::list<Entry>::iterator> by_key_;
  size_t n_bytes_ = 0;
  uint64_t n_found_ = 0;
};

}  // namespace thermo
