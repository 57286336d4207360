#include "grammar/grammar_cache.h"

#include <span>

#include "base/sha256.h"

namespace thermo {

Result<SchemaGrammar> GrammarCache::get(std::string_view source,
                                        const std::function<Result<SchemaGrammar>()>& compile) {
  const std::string key = sha256_hex(std::as_bytes(std::span(source)));
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = by_key_.find(key); found != by_key_.end()) {
      entries_.splice(entries_.begin(), entries_, found->second);
      ++n_found_;
      return found->second->compiled;
    }
  }
  Result<SchemaGrammar> compiled = compile();
  if (!compiled) return compiled;
  Entry entry{key, *compiled, compiled->grammar->n_bytes()};
  for (const std::string& path : compiled->ignored) entry.n_bytes += path.size();
  const std::lock_guard lock(mutex_);
  if (entry.n_bytes > limit_bytes_ || by_key_.contains(key)) return compiled;
  n_bytes_ += entry.n_bytes;
  entries_.push_front(std::move(entry));
  by_key_[key] = entries_.begin();
  while (n_bytes_ > limit_bytes_) {
    n_bytes_ -= entries_.back().n_bytes;
    by_key_.erase(entries_.back().key);
    entries_.pop_back();
  }
  return compiled;
}

uint64_t GrammarCache::n_found() const {
  const std::lock_guard lock(mutex_);
  return n_found_;
}

}  // namespace thermo
