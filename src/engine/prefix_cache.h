// Beginnings of texts in main memory: what sequences hold, by their tokens, so that a text that begins like
// an earlier one need not be computed from the start. It serves all sequences, on the processor and on a GPU.
//
//     (root) -- block 0 ----------- block 1 ---------- block 2
//               256 tokens          256 tokens         90 tokens: it grows when the text goes on
//               | point at 212      |                  | points at 530, 602
//               |                    \-- block 1': another text, different from here on
//
// A block has the keys and values of up to kBlockTokens tokens (of the model and of its drafter); texts that
// begin alike share blocks, and their tokens are compared, never a hash. A point is a checkpoint of the rest:
// recurrent state, and what a drafter needs. A model that can be cut anywhere needs no points.
//
// Keys and values are not copied at once. A new block refers to the pages of its sequence, which do not
// change as long as it does; copy() brings a few bytes at a time to main memory, between the steps of others.
// What is asked for earlier is copied then.
//
// Everything counts toward the limit, which is checked before memory is taken. Side requests go first, and
// push out nothing else. Then goes what saves the fewest tokens for its bytes and was not used for long.
//
// One thread.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <queue>
#include <span>
#include <vector>

#include "model/backend.h"

namespace thermo {

struct SavedText;

// What keys and values lack.
struct SequencePoint {
  std::unique_ptr<Checkpoint> memory;  // nullptr: nothing is needed
  std::vector<float> drafter = {};
};

// Keys and values of a sequence as they were when it was made, whatever became of the sequence.
class KvSource {
 public:
  virtual ~KvSource() = default;

  // Those of tokens [begin, end), which are in one block.
  virtual void save_kv(int begin, int end, std::byte* block) = 0;
  // Tokens in whole blocks. Those after them may share a page with what comes next.
  virtual int n_whole() const = 0;
  // Lets go of the others.
  virtual void keep_whole() = 0;
};

// The memory of one sequence, for the cache to copy.
class SequenceAccess {
 public:
  virtual ~SequenceAccess() = default;

  virtual std::unique_ptr<KvSource> pin_kv() = 0;
  // Keys and values of tokens [begin, end), which are in one block.
  virtual bool load_kv(int begin, int end, const std::byte* block) = 0;  // false: it has no room
  // At the sequence's end. `reuse`: see Backend::checkpoint().
  virtual SequencePoint checkpoint(std::unique_ptr<Checkpoint> reuse) = 0;
  // After all of `tokens` were loaded. `point`: nullptr where none is needed. False: it has no room.
  virtual bool restore(std::span<const TokenId> tokens, const SequencePoint* point) = 0;
};

struct PrefixCacheOptions {
  uint64_t limit_bytes = 0;  // 0: nothing is kept
  size_t block_bytes = 0;
  bool needs_points = false;
  std::function<size_t(int n_tokens)> point_bytes = {};
  std::function<std::unique_ptr<HostMemory>(size_t)> make_memory = {};
  // Memory of a point that nobody has written yet; nullptr: there is none.
  std::function<std::unique_ptr<Checkpoint>(int n_tokens)> make_spare_point = {};
  // Before what is in memory is read or written by the processor; a checkpoint as bytes, and back; see
  // Backend.
  std::function<void()> finish_copies = {};
  std::function<std::span<const std::byte>(const Checkpoint&)> bytes_of = {};
  std::function<std::unique_ptr<Checkpoint>(int n, std::span<const std::byte>)> make_point = {};
};

// What it has and did; see TokenServiceState.
struct PrefixCacheState {
  uint64_t limit_bytes = 0, bytes = 0;
  uint64_t n_blocks = 0, n_points = 0, n_tokens = 0;  // now
  uint64_t n_evicted = 0;                             // blocks and points that were pushed out
  uint64_t n_refused = 0;                             // texts that there was no room for
  uint64_t n_uncopied = 0;   // of the tokens, those whose keys and values are still in pages of a sequence
  uint64_t most_copied = 0;  // bytes of keys and values in one call of store() or copy()
  uint64_t spare_bytes = 0;  // of `bytes`, what nothing is in
  uint64_t n_taken = 0;      // blocks and points for which the system was asked for memory
};

class PrefixCache {
 public:
  static constexpr int kBlockTokens = SequenceLayout::kBlockTokens;

  explicit PrefixCache(PrefixCacheOptions options);
  ~PrefixCache();
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  struct Match {
    int n = 0;                        // tokens that need not be computed, at most the limit
    int n_known = 0;                  // tokens that agree with a text it has; a point may be missing there
    std::vector<TokenId> known_next;  // how that text goes on, a few tokens
  };
  Match match(std::span<const TokenId> tokens, int limit) const;

  // Keeps the sequence, which holds exactly `tokens`. False: there is no room. Copies the tokens of its last
  // page, and its point.
  bool store(std::span<const TokenId> tokens, bool side, SequenceAccess& from);
  // Puts the first n tokens into the sequence, which has the first n_same of them. `n`: of a match. False:
  // the sequence has no room, and what it holds is of no use.
  bool load(std::span<const TokenId> tokens, int n, int n_same, bool side, SequenceAccess& to);

  // Takes memory for so many texts of up to n_tokens, as far as the limit allows, so that those who store
  // them need not wait for the system. Ends early when it is late.
  void prepare(int n_texts, int n_tokens, const std::function<bool()>& is_late);
  // As if nothing had been stored; the memory stays. REQUIRES: nothing is pinned.
  void clear();

  // Goes on copying what was stored: about so many bytes at most. There is nothing left: no effect.
  void copy(uint64_t max_bytes);
  bool has_uncopied() const { return !uncopied_.empty(); }

  // Called before a text loses its end; may call save(). Not for side requests' texts.
  void on_evict(std::function<void(std::span<const TokenId> text)> told) { on_evict_ = std::move(told); }
  // A copy of a text that it has, with its last points. nullopt: there is no memory to copy it to.
  std::optional<SavedText> save(std::span<const TokenId> text);
  // Keeps a text that was saved. False: there is no room.
  bool put(std::shared_ptr<const SavedText> text);
  // All texts but those of side requests, the one that was used last at the end.
  std::vector<std::vector<TokenId>> texts() const;

  // A text that was stored stays until it is let go.
  struct Block;
  struct Pin {
    Block* block = nullptr;
    int n = 0;
  };
  // nullopt: there is no memory to copy it to.
  std::optional<Pin> pin(std::span<const TokenId> tokens);
  void unpin(const Pin& pin);

  PrefixCacheState state() const;

 private:
  struct Point;
  struct Victim;
  struct Path;
  struct SparePoint {
    std::unique_ptr<Checkpoint> memory;
    uint64_t bytes = 0;
  };

  static std::vector<TokenId> text_of(const Block& block, int n);
  static int n_common(const Block& block, std::span<const TokenId> rest);
  template <class F>
  void visit(const Block& block, std::span<const TokenId> tokens, std::vector<Block*>& path, F&& f) const;
  Path find(std::span<const TokenId> tokens, int n) const;
  Path walk(std::span<const TokenId> tokens);
  void grow(Path& path, std::span<const TokenId> tokens, SequenceAccess& from);
  void take_spare(Block& block);
  SparePoint take_spare_point(uint64_t n_bytes);
  size_t spare_point(uint64_t n_bytes) const;
  void drop_spare_point(size_t but);
  uint64_t spare_bytes() const;
  bool copy_tokens(Block& block, int n);
  bool copy_rest(Block& block) { return copy_tokens(block, kBlockTokens); }
  void give_up(Block* block);
  void take_away_from(Block* block);
  bool make_room(size_t n_blocks, uint64_t point_bytes, bool side);
  bool evict(uint64_t n_bytes, bool side);
  using Victims = std::priority_queue<Victim>;
  double worth(int n_tokens, uint64_t bytes, uint64_t last_used) const;
  void list_victims(Block& block, int before, bool side, Victims& victims) const;
  void list_block(Block& block, bool side, Victims& victims) const;
  void drop(const Victim& victim);
  void prune(Block* block);
  void take_away(Block* block);
  uint64_t point_bytes(int n) const;  // 0: none are needed
  uint64_t bytes_of_block() const;
  uint64_t bytes_of_token() const;  // keys and values

  PrefixCacheOptions options_;
  std::function<void(std::span<const TokenId>)> on_evict_;
  std::unique_ptr<Block> root_;
  uint64_t n_copied_ = 0;  // bytes, in this call
  uint64_t now_ = 0;
  PrefixCacheState state_;
  std::deque<Block*> uncopied_;  // a text's first block first
  // Memory that the next ones take; it counts.
  std::vector<std::unique_ptr<HostMemory>> spare_blocks_;
  std::vector<SparePoint> spare_points_;
};

}  // namespace thermo
