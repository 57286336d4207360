// Texts of a prefix cache in the form that a disk stores, and back.
#include <algorithm>
#include <cstring>

#include "engine/disk_cache.h"
#include "engine/prefix_cache_impl.h"

namespace thermo {
namespace {

// A text that came from a disk, in place of a sequence.
class SavedSequence final : public SequenceAccess {
 public:
  SavedSequence(std::shared_ptr<const SavedText> text, const SavedText::Point* point,
                const PrefixCacheOptions& options)
      : text_(std::move(text)), point_(point), options_(options) {}

  std::unique_ptr<KvSource> pin_kv() override { return std::make_unique<Source>(text_, options_); }
  SequencePoint checkpoint(std::unique_ptr<Checkpoint>) override {
    return {options_.make_point(point_->n, point_->memory), point_->drafter};
  }
  // Nothing is loaded into it.
  bool load_kv(int, int, const std::byte*) override { return false; }
  bool restore(std::span<const TokenId>, const SequencePoint*) override { return false; }

 private:
  class Source final : public KvSource {
   public:
    Source(std::shared_ptr<const SavedText> text, const PrefixCacheOptions& options)
        : text_(std::move(text)), options_(options) {}

    // The whole block: its other tokens are the same, or are written later.
    void save_kv(int begin, int, std::byte* block) override {
      const auto index = static_cast<size_t>(begin / PrefixCache::kBlockTokens);
      options_.finish_copies();  // the memory may have been another block's
      std::memcpy(block, text_->blocks.data() + index * options_.block_bytes, options_.block_bytes);
    }
    int n_whole() const override {
      return static_cast<int>(text_->tokens.size()) / PrefixCache::kBlockTokens * PrefixCache::kBlockTokens;
    }
    void keep_whole() override {}

   private:
    std::shared_ptr<const SavedText> text_;
    const PrefixCacheOptions& options_;
  };

  std::shared_ptr<const SavedText> text_;
  const SavedText::Point* point_;
  const PrefixCacheOptions& options_;
};

}  // namespace

std::vector<TokenId> PrefixCache::text_of(const Block& block, int n) {
  std::vector<TokenId> text(static_cast<size_t>(n));
  for (const Block* at = &block; at->parent != nullptr; at = at->parent)
    std::copy_n(at->tokens.begin(), std::min(n, at->end()) - at->begin, text.begin() + at->begin);
  return text;
}

std::optional<SavedText> PrefixCache::save(std::span<const TokenId> tokens) {
  const Path path = find(tokens, static_cast<int>(tokens.size()));
  if (path.blocks.empty()) return std::nullopt;
  SavedText text{.tokens = {tokens.begin(), tokens.end()}};
  text.blocks.reserve(path.blocks.size() * options_.block_bytes);
  for (Block* block : path.blocks)
    if (!copy_rest(*block)) return std::nullopt;
  options_.finish_copies();
  for (const Block* block : path.blocks) {
    text.blocks.insert(text.blocks.end(), block->kv->data(), block->kv->data() + options_.block_bytes);
    for (const Point& point : block->points) {
      if (point.n > static_cast<int>(tokens.size())) break;
      const std::span<const std::byte> memory = options_.bytes_of(*point.saved.memory);
      text.points.push_back({point.n, {memory.begin(), memory.end()}, point.saved.drafter});
      if (text.points.size() > DiskCache::kMaxPoints) text.points.erase(text.points.begin());
    }
  }
  return text;
}

bool PrefixCache::put(std::shared_ptr<const SavedText> text) {
  const std::span<const TokenId> tokens = text->tokens;
  if (!options_.needs_points) {
    SavedSequence from(text, nullptr, options_);
    return store(tokens, false, from);
  }
  bool all = true;
  for (const SavedText::Point& point : text->points) {
    SavedSequence from(text, &point, options_);
    all = store(tokens.first(static_cast<size_t>(point.n)), false, from) && all;
  }
  return all;
}

std::vector<std::vector<TokenId>> PrefixCache::texts() const {
  std::vector<std::pair<uint64_t, std::vector<TokenId>>> found;
  const std::function<void(const Block&)> list = [&](const Block& block) {
    for (const auto& child : block.children) list(*child);
    if (!block.children.empty() || block.side || &block == root_.get()) return;
    const int n = !options_.needs_points ? block.end() : block.points.empty() ? 0 : block.points.back().n;
    if (n > 0) found.emplace_back(block.last_used, text_of(block, n));
  };
  list(*root_);
  std::sort(found.begin(), found.end());
  std::vector<std::vector<TokenId>> texts;
  for (auto& [used, text] : found) texts.push_back(std::move(text));
  return texts;
}

}  // namespace thermo
