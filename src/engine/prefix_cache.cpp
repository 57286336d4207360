#include <algorithm>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/units.h"
#include "engine/prefix_cache_impl.h"

namespace thermo {
namespace {

constexpr int kShownTokens = 16;         // of a text that went on differently
constexpr double kAgeRequests = 16;      // uses of others after which something is worth half
constexpr double kInnerWorth = 1.0 / 4;  // of a point that later ones of its text follow
constexpr size_t kPointsOfText = 3;      // after the instructions, the prompt and the answer

}  // namespace

// Something that can be pushed out: a point, or (without points) the last block of a text.
struct PrefixCache::Victim {
  bool conversation = false;
  double worth = 0.0;
  Block* block = nullptr;
  int point = -1;  // tokens before it; -1: the block

  bool operator<(const Victim& other) const {  // of two the one that stays longer
    return std::tie(other.conversation, other.worth) < std::tie(conversation, worth);
  }
};

PrefixCache::PrefixCache(PrefixCacheOptions options)
    : options_(std::move(options)), root_(std::make_unique<Block>()) {
  state_.limit_bytes = options_.limit_bytes;
}

PrefixCache::~PrefixCache() = default;

uint64_t PrefixCache::bytes_of_block() const {
  return align_up<uint64_t>(options_.block_bytes, HostBuffer::kPageBytes) + sizeof(Block) +
         kBlockTokens * sizeof(TokenId) + 64;
}

uint64_t PrefixCache::bytes_of_token() const {
  return std::max<uint64_t>(1, options_.block_bytes / kBlockTokens);
}

uint64_t PrefixCache::point_bytes(int n) const {
  if (!options_.needs_points) return 0;
  return align_up<uint64_t>(options_.point_bytes(n), HostBuffer::kPageBytes) + 2 * sizeof(Point);
}

int PrefixCache::n_common(const Block& block, std::span<const TokenId> rest) {
  const auto end = std::mismatch(block.tokens.begin(), block.tokens.end(), rest.begin(), rest.end()).first;
  return static_cast<int>(end - block.tokens.begin());
}

// Calls f(path, n) for every block that agrees with the tokens; n: up to where.
template <class F>
void PrefixCache::visit(const Block& block, std::span<const TokenId> tokens, std::vector<Block*>& path,
                        F&& f) const {
  const std::span<const TokenId> rest = tokens.subspan(static_cast<size_t>(block.end()));
  for (const auto& child : block.children) {
    const int n = n_common(*child, rest);
    if (n == 0) continue;
    path.push_back(child.get());
    f(path, child->begin + n);
    if (n == kBlockTokens) visit(*child, tokens, path, f);
    path.pop_back();
  }
}

PrefixCache::Match PrefixCache::match(std::span<const TokenId> tokens, int limit) const {
  Match match;
  std::vector<Block*> path;
  visit(*root_, tokens, path, [&](const std::vector<Block*>& blocks, int n) {
    const Block& last = *blocks.back();
    if (n > match.n_known) {
      match.n_known = n;
      const auto from = last.tokens.begin() + (n - last.begin);
      match.known_next.assign(from, from + std::min<std::ptrdiff_t>(kShownTokens, last.tokens.end() - from));
    }
    if (!options_.needs_points) match.n = std::max(match.n, std::min(n, limit));
    for (const Point& point : last.points)
      if (point.n <= std::min(n, limit)) match.n = std::max(match.n, point.n);
  });
  return match;
}

// To exactly n tokens, which a match found.
PrefixCache::Path PrefixCache::find(std::span<const TokenId> tokens, int n) const {
  Path found;
  std::vector<Block*> path;
  visit(*root_, tokens, path, [&](const std::vector<Block*>& blocks, int known) {
    if (known < n || !found.blocks.empty()) return;
    Block& last = *blocks.back();
    if (n <= last.begin) return;
    for (Point& point : last.points)
      if (point.n == n) found.point = &point;
    if (found.point != nullptr || !options_.needs_points) found.blocks = blocks;
  });
  return found;
}

// The blocks that a text of these tokens uses or extends; the last one may be shorter than it has to be.
PrefixCache::Path PrefixCache::walk(std::span<const TokenId> tokens) {
  Path path;
  for (Block* at = root_.get(); static_cast<size_t>(at->end()) < tokens.size();) {
    const std::span<const TokenId> rest = tokens.subspan(static_cast<size_t>(at->end()));
    const int wanted = static_cast<int>(std::min<size_t>(rest.size(), kBlockTokens));
    Block* best = nullptr;
    int most = 0;
    for (const auto& child : at->children) {
      const int n = n_common(*child, rest);
      const bool usable = n >= wanted || n == static_cast<int>(child->tokens.size());
      if (usable && n > most) best = child.get(), most = n;
    }
    if (best == nullptr) break;
    path.blocks.push_back(best);
    if (most < kBlockTokens) break;
    at = best;
  }
  if (!path.blocks.empty())
    for (Point& point : path.blocks.back()->points)
      if (point.n == static_cast<int>(tokens.size())) path.point = &point;
  return path;
}

bool PrefixCache::store(std::span<const TokenId> tokens, bool side, SequenceAccess& from) {
  if (tokens.empty() || options_.limit_bytes == 0) return false;
  const int n = static_cast<int>(tokens.size());
  Path path = walk(tokens);
  const auto n_blocks = static_cast<size_t>(ceil_div(n, kBlockTokens));
  const bool wants_point = options_.needs_points && path.point == nullptr;
  // With everything that it needs, the text must fit.
  const bool can_fit = n_blocks * bytes_of_block() + point_bytes(n) <= options_.limit_bytes;
  for (Block* block : path.blocks) ++block->n_pins;
  const bool fits =
      can_fit && make_room(n_blocks - path.blocks.size(), wants_point ? point_bytes(n) : 0, side);
  for (Block* block : path.blocks) --block->n_pins;
  if (!fits) {
    ++state_.n_refused;
    if (!path.blocks.empty()) prune(path.blocks.back());
    return false;
  }
  ++now_;
  n_copied_ = 0;
  grow(path, tokens, from);
  state_.most_copied = std::max(state_.most_copied, n_copied_);
  bool stored = path.blocks.size() == n_blocks && path.blocks.back()->end() >= n;
  if (stored && wants_point) {
    SparePoint spare = take_spare_point(point_bytes(n));
    if (spare.memory == nullptr) ++state_.n_taken;
    Point point{.n = n, .saved = from.checkpoint(std::move(spare.memory)), .bytes = spare.bytes};
    stored = point.saved.memory != nullptr;
    if (stored) {
      state_.bytes += point.bytes;
      ++state_.n_points;
      std::vector<Point>& points = path.blocks.back()->points;
      const auto at = std::find_if(points.begin(), points.end(), [n](const Point& p) { return p.n > n; });
      path.point = &*points.insert(at, std::move(point));
      path.point->side = side;
    }
  }
  for (Block* block : path.blocks) {
    block->last_used = now_;
    block->side = block->side && side;
  }
  if (path.point != nullptr) {
    path.point->last_used = now_;
    path.point->side = path.point->side && side;
  }
  if (!path.blocks.empty()) prune(path.blocks.back());
  return stored;
}

// Adds what a text lacks, and copies what is not in whole blocks. There is room; where the system has no
// memory all the same, it stays shorter.
void PrefixCache::grow(Path& path, std::span<const TokenId> tokens, SequenceAccess& from) {
  const auto n = static_cast<int>(tokens.size());
  const auto extend = [&](Block& block) {
    const int end = std::min(n, block.begin + kBlockTokens);
    if (block.end() >= end) return;
    state_.n_tokens += static_cast<uint64_t>(end - block.end());
    state_.n_uncopied += static_cast<uint64_t>(end - block.end());
    block.tokens.insert(block.tokens.end(), tokens.begin() + block.end(), tokens.begin() + end);
  };
  if (!path.blocks.empty()) extend(*path.blocks.back());
  while (path.blocks.empty() || path.blocks.back()->end() < n) {
    Block* const parent = path.blocks.empty() ? root_.get() : path.blocks.back();
    Block& block = *parent->children.emplace_back(
        std::make_unique<Block>(Block{.parent = parent, .begin = parent->end()}));
    state_.bytes += bytes_of_block();
    take_spare(block);
    block.tokens.reserve(kBlockTokens);
    block.side = true;  // until a conversation has it
    ++state_.n_blocks;
    extend(block);
    path.blocks.push_back(&block);
  }
  if (std::all_of(path.blocks.begin(), path.blocks.end(),
                  [](const Block* b) { return b->n_uncopied() == 0; }))
    return;
  const std::shared_ptr<KvSource> source = from.pin_kv();
  for (size_t i = 0; i < path.blocks.size(); ++i) {
    Block& block = *path.blocks[i];
    if (block.n_uncopied() == 0) continue;
    const bool is_listed = block.source != nullptr, is_whole = block.end() <= source->n_whole();
    if (is_listed && !is_whole) continue;  // the text ends inside of it
    block.source = source;                 // an earlier one may let go of its pages
    if (is_whole && !is_listed) uncopied_.push_back(&block);
    if (is_whole || copy_rest(block)) continue;
    path.blocks.resize(i);
    take_away_from(&block);
  }
  source->keep_whole();
}

void PrefixCache::take_spare(Block& block) {
  if (spare_blocks_.empty()) return;
  block.kv = std::move(spare_blocks_.back());
  spare_blocks_.pop_back();
  state_.bytes -= bytes_of_block();
}

// The smallest one that has so many bytes; their number: there is none.
size_t PrefixCache::spare_point(uint64_t n_bytes) const {
  size_t best = spare_points_.size();
  for (size_t i = 0; i < spare_points_.size(); ++i)
    if (spare_points_[i].bytes >= n_bytes &&
        (best == spare_points_.size() || spare_points_[i].bytes < spare_points_[best].bytes))
      best = i;
  return best;
}

// Without memory: there is none.
PrefixCache::SparePoint PrefixCache::take_spare_point(uint64_t n_bytes) {
  const size_t i = spare_point(n_bytes);
  if (i == spare_points_.size()) return {nullptr, n_bytes};
  SparePoint spare = std::move(spare_points_[i]);
  spare_points_.erase(spare_points_.begin() + static_cast<std::ptrdiff_t>(i));
  state_.bytes -= spare.bytes;
  return spare;
}

// The last one, but not that one.
void PrefixCache::drop_spare_point(size_t but) {
  if (but == spare_points_.size() - 1) std::swap(spare_points_.front(), spare_points_.back());
  state_.bytes -= spare_points_.back().bytes;
  spare_points_.pop_back();
}

uint64_t PrefixCache::spare_bytes() const {
  uint64_t bytes = spare_blocks_.size() * bytes_of_block();
  for (const SparePoint& point : spare_points_) bytes += point.bytes;
  return bytes;
}

PrefixCacheState PrefixCache::state() const {
  PrefixCacheState state = state_;
  state.spare_bytes = spare_bytes();
  return state;
}

void PrefixCache::prepare(int n_texts, int n_tokens, const std::function<bool()>& is_late) {
  const auto n_blocks = static_cast<size_t>(ceil_div(n_tokens, kBlockTokens));
  int largest = n_tokens;  // of the texts that end in the last block, the one with the largest point
  for (int n = std::max(1, n_tokens - kBlockTokens + 1); n < n_tokens; ++n)
    if (point_bytes(n) > point_bytes(largest)) largest = n;
  const uint64_t bytes_of_point = point_bytes(largest);
  std::erase_if(spare_points_, [&](const SparePoint& point) {
    const bool is_small = point.bytes < bytes_of_point;
    if (is_small) state_.bytes -= point.bytes;
    return is_small;
  });
  const auto may_take = [&](uint64_t bytes) {
    return state_.bytes + bytes <= options_.limit_bytes && !is_late();
  };
  for (size_t n = 1; n <= static_cast<size_t>(n_texts); ++n) {
    while (spare_blocks_.size() < n * n_blocks) {
      if (!may_take(bytes_of_block())) return;
      std::unique_ptr<HostMemory> memory = options_.make_memory(options_.block_bytes);
      if (memory == nullptr) return;
      touch_pages(memory->data(), memory->size());
      spare_blocks_.push_back(std::move(memory));
      state_.bytes += bytes_of_block();
    }
    while (options_.needs_points && spare_points_.size() < n * kPointsOfText) {
      if (!may_take(bytes_of_point)) return;
      std::unique_ptr<Checkpoint> memory = options_.make_spare_point(largest);
      if (memory == nullptr) return;
      spare_points_.push_back({std::move(memory), bytes_of_point});
      state_.bytes += bytes_of_point;
    }
  }
}

void PrefixCache::clear() {
  const auto told = std::exchange(on_evict_, nullptr);
  while (!root_->children.empty() && evict(UINT64_MAX, false)) {
  }
  on_evict_ = told;
  state_ = {.limit_bytes = state_.limit_bytes, .bytes = state_.bytes};
  now_ = 0;
}

// Up to n more of its tokens. False: there is no memory for them.
bool PrefixCache::copy_tokens(Block& block, int n) {
  n = std::min(n, block.n_uncopied());
  if (n == 0) return true;
  if (block.kv == nullptr) take_spare(block);
  if (block.kv == nullptr) {
    block.kv = options_.make_memory(options_.block_bytes);
    ++state_.n_taken;
  }
  if (block.kv == nullptr) return false;
  const int begin = block.begin + block.n_copied;
  block.source->save_kv(begin, begin + n, block.kv->data());
  block.n_copied += n;
  state_.n_uncopied -= static_cast<uint64_t>(n);
  n_copied_ += static_cast<uint64_t>(n) * bytes_of_token();
  if (block.n_uncopied() > 0) return true;
  block.source.reset();
  std::erase(uncopied_, &block);
  return true;
}

void PrefixCache::copy(uint64_t max_bytes) {
  n_copied_ = 0;
  while (!uncopied_.empty() && n_copied_ < max_bytes) {
    Block& block = *uncopied_.front();
    const uint64_t n = std::clamp<uint64_t>((max_bytes - n_copied_) / bytes_of_token(), 1, kBlockTokens);
    if (!copy_tokens(block, static_cast<int>(n))) give_up(&block);
  }
  state_.most_copied = std::max(state_.most_copied, n_copied_);
}

bool PrefixCache::load(std::span<const TokenId> tokens, int n, int n_same, bool side, SequenceAccess& to) {
  const Path path = find(tokens, n);
  THERMO_CHECK(!path.blocks.empty(), "a text that the cache does not have");
  ++now_;
  for (Block* block : path.blocks) {
    block->last_used = now_;
    block->side = block->side && side;
    const int begin = std::max(block->begin, n_same), end = std::min(n, block->begin + kBlockTokens);
    if (begin >= end) continue;
    if (!copy_rest(*block)) {
      give_up(block);
      return false;
    }
    if (!to.load_kv(begin, end, block->kv->data())) return false;
  }
  if (path.point != nullptr) {
    path.point->last_used = now_;
    path.point->side = path.point->side && side;
  }
  return to.restore(tokens.first(static_cast<size_t>(n)),
                    path.point == nullptr ? nullptr : &path.point->saved);
}

std::optional<PrefixCache::Pin> PrefixCache::pin(std::span<const TokenId> tokens) {
  const Path path = find(tokens, static_cast<int>(tokens.size()));
  THERMO_CHECK(!path.blocks.empty(), "a text that the cache does not have");
  for (Block* block : path.blocks) {
    if (copy_rest(*block)) continue;
    give_up(block);
    return std::nullopt;
  }
  ++path.blocks.back()->n_pins;
  if (path.point != nullptr) ++path.point->n_pins;
  return Pin{path.blocks.back(), static_cast<int>(tokens.size())};
}

void PrefixCache::unpin(const Pin& pin) {
  --pin.block->n_pins;
  for (Point& point : pin.block->points)
    if (point.n == pin.n) --point.n_pins;
}

// Room for so many blocks and a point of so many bytes (0: none).
bool PrefixCache::make_room(size_t n_blocks, uint64_t point_bytes, bool side) {
  for (;;) {
    const uint64_t new_blocks = n_blocks - std::min(n_blocks, spare_blocks_.size());
    const size_t reused = point_bytes > 0 ? spare_point(point_bytes) : spare_points_.size();
    const bool reuses = reused < spare_points_.size();
    const uint64_t needed =
        state_.bytes + new_blocks * bytes_of_block() + (reuses ? uint64_t{0} : point_bytes);
    if (needed <= options_.limit_bytes) return true;
    // Memory that nothing of this takes.
    if (spare_blocks_.size() > n_blocks) {
      spare_blocks_.pop_back();
      state_.bytes -= bytes_of_block();
      continue;
    }
    if (spare_points_.size() > (reuses ? 1u : 0u)) {
      drop_spare_point(reused);
      continue;
    }
    if (!evict(needed - options_.limit_bytes, side)) return false;
  }
}

// Pushes out at least one thing; so many bytes if it can.
bool PrefixCache::evict(uint64_t n_bytes, bool side) {
  Victims victims;
  for (const auto& child : root_->children) list_victims(*child, 0, side, victims);
  if (victims.empty()) return false;
  const auto in_use = [this] { return state_.bytes - spare_bytes(); };
  for (const uint64_t before = in_use(); !victims.empty() && before - in_use() < n_bytes;) {
    const Victim victim = victims.top();
    victims.pop();
    Block* const parent = victim.block->parent;
    const bool is_end =
        victim.block->children.empty() && (victim.point < 0 || victim.point == victim.block->points.back().n);
    if (on_evict_ && is_end && victim.conversation)
      on_evict_(text_of(*victim.block, victim.point < 0 ? victim.block->end() : victim.point));
    drop(victim);
    if (victim.point < 0 && parent != root_.get()) list_block(*parent, side, victims);
  }
  return true;
}

double PrefixCache::worth(int n_tokens, uint64_t bytes, uint64_t last_used) const {
  const double age = static_cast<double>(now_ - last_used) / kAgeRequests;
  return n_tokens / static_cast<double>(bytes) / (1.0 + age);
}

// `before`: tokens of the last point above this block.
void PrefixCache::list_victims(Block& block, int before, bool side, Victims& victims) const {
  const bool is_leaf = block.children.empty();
  for (const Point& point : block.points) {
    const bool is_last = is_leaf && &point == &block.points.back();
    if (point.n_pins == 0 && (point.side || !side))
      victims.push(
          {.conversation = !point.side,
           .worth = worth(point.n - before, point.bytes, point.last_used) * (is_last ? 1.0 : kInnerWorth),
           .block = &block,
           .point = point.n});
    before = point.n;
  }
  list_block(block, side, victims);
  for (const auto& child : block.children) list_victims(*child, before, side, victims);
}

// The block itself, where it is the end of a text.
void PrefixCache::list_block(Block& block, bool side, Victims& victims) const {
  if (options_.needs_points || !block.children.empty() || block.n_pins > 0 || (side && !block.side)) return;
  victims.push({.conversation = !block.side,
                .worth = worth(static_cast<int>(block.tokens.size()), bytes_of_block(), block.last_used),
                .block = &block});
}

void PrefixCache::drop(const Victim& victim) {
  ++state_.n_evicted;
  Block& block = *victim.block;
  if (victim.point < 0) return take_away(&block);
  const auto point = std::find_if(block.points.begin(), block.points.end(),
                                  [&](const Point& p) { return p.n == victim.point; });
  --state_.n_points;
  spare_points_.push_back({std::move(point->saved.memory), point->bytes});
  block.points.erase(point);
  prune(&block);
}

// Takes away what nothing can come back to: ends of texts without a point.
void PrefixCache::prune(Block* block) {
  if (!options_.needs_points) return;
  while (block != root_.get() && block->children.empty() && block->points.empty() && block->n_pins == 0) {
    Block* const parent = block->parent;
    take_away(block);
    block = parent;
  }
}

// There is no memory to copy it to.
void PrefixCache::give_up(Block* block) {
  Block* const parent = block->parent;
  take_away_from(block);
  prune(parent);
}

// With all that follows. REQUIRES: nothing of it is pinned.
void PrefixCache::take_away_from(Block* block) {
  while (!block->children.empty()) take_away_from(block->children.back().get());
  for (const Point& point : block->points) state_.bytes -= point.bytes;
  state_.n_points -= block->points.size();
  ++state_.n_evicted;
  take_away(block);
}

void PrefixCache::take_away(Block* block) {
  state_.n_tokens -= block->tokens.size();
  state_.n_uncopied -= static_cast<uint64_t>(block->n_uncopied());
  std::erase(uncopied_, block);
  --state_.n_blocks;
  if (block->kv != nullptr)
    spare_blocks_.push_back(std::move(block->kv));
  else
    state_.bytes -= bytes_of_block();
  std::erase_if(block->parent->children, [&](const auto& child) { return child.get() == block; });
}

}  // namespace thermo
