// The blocks and points of a PrefixCache: prefix_cache.cpp manages them, saved_texts.cpp copies them to and
// from a disk.
#pragma once

#include "engine/prefix_cache.h"

namespace thermo {

struct PrefixCache::Point {
  int n = 0;  // tokens
  SequencePoint saved;
  uint64_t bytes = 0;
  uint64_t last_used = 0;
  bool side = false;
  int n_pins = 0;
};

struct PrefixCache::Block {
  Block* parent = nullptr;
  int begin = 0;  // of its first token
  std::vector<TokenId> tokens = {};
  std::unique_ptr<HostMemory> kv = nullptr;  // nullptr: nothing was copied yet; it counts all the same
  int n_copied = 0;                          // of the tokens
  std::shared_ptr<KvSource> source = {};     // of the others
  std::vector<std::unique_ptr<Block>> children = {};  // only a full block has some
  std::vector<Point> points = {};                     // ascending
  uint64_t last_used = 0;
  bool side = false;
  int n_pins = 0;

  int end() const { return begin + static_cast<int>(tokens.size()); }
  int n_uncopied() const { return static_cast<int>(tokens.size()) - n_copied; }
};

// Blocks from the root on, and the point at the end, if there is one.
struct PrefixCache::Path {
  std::vector<Block*> blocks;
  Point* point = nullptr;
};

}  // namespace thermo
