// The cache by itself: sequences are vectors of numbers here.
#include "engine/prefix_cache.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>

#include "base/units.h"

namespace thermo {
namespace {

using Text = std::vector<TokenId>;

// Memory in use, as the system would see it.
size_t taken_bytes = 0, most_bytes = 0;

void take(size_t bytes) {
  taken_bytes += bytes;
  most_bytes = std::max(most_bytes, taken_bytes);
}

class CountedMemory final : public HostMemory {
 public:
  explicit CountedMemory(size_t bytes) : memory_(bytes) {
    data_ = memory_.data();
    size_ = memory_.size();
    take(size_);
  }
  ~CountedMemory() override { taken_bytes -= size_; }

 private:
  HostBuffer memory_;
};

class CountedPoint final : public Checkpoint {
 public:
  CountedPoint(int n, Text text, size_t bytes) : Checkpoint(n, false), tokens(std::move(text)), size(bytes) {
    take(size);
  }
  ~CountedPoint() override { taken_bytes -= size; }
  Text tokens;
  size_t size;
};

constexpr size_t kPointBytes = 20'000;
constexpr size_t kTokenBytes = 24;  // of keys and values

// What was saved of a sequence, which may be gone.
class FakeSource final : public KvSource {
 public:
  FakeSource(std::vector<uint64_t> kv, std::shared_ptr<size_t> n_saved)
      : kv_(std::move(kv)), n_saved_(std::move(n_saved)) {
    ++n_sources;
  }
  ~FakeSource() override { --n_sources; }

  void save_kv(int begin, int end, std::byte* block) override {
    EXPECT_EQ(begin / PrefixCache::kBlockTokens, (end - 1) / PrefixCache::kBlockTokens);
    ASSERT_LE(static_cast<size_t>(end), kv_.size()) << "tokens that were let go";
    for (int t = begin; t < end; ++t, ++*n_saved_)
      std::memcpy(block + static_cast<size_t>(t % PrefixCache::kBlockTokens) * kTokenBytes,
                  &kv_[static_cast<size_t>(t)], 8);
  }
  int n_whole() const override {
    return static_cast<int>(kv_.size()) / PrefixCache::kBlockTokens * PrefixCache::kBlockTokens;
  }
  void keep_whole() override { kv_.resize(static_cast<size_t>(n_whole())); }

  static inline int n_sources = 0;

 private:
  std::vector<uint64_t> kv_;
  std::shared_ptr<size_t> n_saved_;
};

// A sequence whose keys and values are a number for each token, which depends on all tokens before it.
class FakeSequence final : public SequenceAccess {
 public:
  Text tokens;
  std::vector<uint64_t> kv;
  std::shared_ptr<size_t> n_saved = std::make_shared<size_t>(0);
  size_t n_loaded = 0;

  explicit FakeSequence(Text text = {}) : tokens(std::move(text)), kv(values(tokens)) {}

  static std::vector<uint64_t> values(std::span<const TokenId> text) {
    std::vector<uint64_t> all;
    uint64_t hash = 1;
    for (const TokenId token : text)
      all.push_back(hash = hash * 6364136223846793005u + static_cast<uint32_t>(token));
    return all;
  }
  std::unique_ptr<KvSource> pin_kv() override { return std::make_unique<FakeSource>(kv, n_saved); }
  bool load_kv(int begin, int end, const std::byte* block) override {
    EXPECT_LE(static_cast<size_t>(begin), kv.size());
    kv.resize(static_cast<size_t>(end));
    for (int t = begin; t < end; ++t, ++n_loaded)
      std::memcpy(&kv[static_cast<size_t>(t)],
                  block + static_cast<size_t>(t % PrefixCache::kBlockTokens) * kTokenBytes, 8);
    return true;
  }
  SequencePoint checkpoint(std::unique_ptr<Checkpoint> reuse) override {
    reuse.reset();
    return {std::make_unique<CountedPoint>(static_cast<int>(tokens.size()), tokens, kPointBytes)};
  }
  bool restore(std::span<const TokenId> restored, const SequencePoint* point) override {
    tokens.assign(restored.begin(), restored.end());
    kv.resize(tokens.size());
    if (point != nullptr) {
      EXPECT_EQ(static_cast<const CountedPoint&>(*point->memory).tokens, tokens);
    }
    EXPECT_EQ(kv, values(tokens));
    return true;
  }
};

PrefixCacheOptions options_for(uint64_t limit, bool needs_points) {
  return {.limit_bytes = limit,
          .block_bytes = PrefixCache::kBlockTokens * kTokenBytes,
          .needs_points = needs_points,
          .point_bytes = [](int) { return kPointBytes; },
          .make_memory = [](size_t bytes) { return std::make_unique<CountedMemory>(bytes); },
          .make_spare_point = [](int n) { return std::make_unique<CountedPoint>(n, Text{}, kPointBytes); }};
}

Text text_of(int seed, int n) {
  std::mt19937 random(static_cast<unsigned>(seed));
  Text text;
  for (int i = 0; i < n; ++i) text.push_back(static_cast<TokenId>(random() % 1000));
  return text;
}

Text with(Text text, int seed, int n) {
  const Text more = text_of(seed, n);
  text.insert(text.end(), more.begin(), more.end());
  return text;
}

bool store(PrefixCache& cache, const Text& text, bool side = false) {
  FakeSequence sequence(text);
  return cache.store(text, side, sequence);
}

int match(const PrefixCache& cache, const Text& text) {
  return cache.match(text, static_cast<int>(text.size())).n;
}

TEST(PrefixCache, FindsTheLongestBeginningThatHasAPoint) {
  PrefixCache cache(options_for(10 * MiB, true));
  const Text system = text_of(1, 300), first = with(system, 2, 500), second = with(first, 3, 90);
  for (const Text& text : {system, first, second}) EXPECT_TRUE(store(cache, text));
  EXPECT_EQ(match(cache, with(second, 4, 40)), 890);
  EXPECT_EQ(match(cache, with(first, 5, 400)), 800);
  EXPECT_EQ(match(cache, with(system, 6, 1000)), 300);
  EXPECT_EQ(match(cache, text_of(7, 100)), 0);
  EXPECT_EQ(cache.match(second, 889).n, 800);
  // Where the text was known, though nothing can come back there.
  Text edited = second;
  edited[700] += 1;
  const PrefixCache::Match found = cache.match(edited, 890);
  EXPECT_EQ(found.n, 300);
  EXPECT_EQ(found.n_known, 700);
  ASSERT_FALSE(found.known_next.empty());
  EXPECT_EQ(found.known_next[0], second[700]);
}

TEST(PrefixCache, MatchesToAnyTokenWhereNoPointIsNeeded) {
  PrefixCache cache(options_for(10 * MiB, false));
  const Text text = text_of(1, 700);
  EXPECT_TRUE(store(cache, text));
  EXPECT_EQ(cache.state().n_points, 0u);
  for (const int n : {1, 255, 256, 257, 600, 700}) {
    Text edited = text;
    edited.resize(static_cast<size_t>(n));
    edited = with(edited, 9, 50);
    const int found = match(cache, edited);
    EXPECT_GE(found, n);
    FakeSequence sequence;
    cache.load(edited, found, 0, false, sequence);
    EXPECT_EQ(sequence.tokens.size(), static_cast<size_t>(found));
  }
}

TEST(PrefixCache, StoresABlockOnceAndExtendsItsLastOne) {
  PrefixCache cache(options_for(10 * MiB, true));
  const Text text = text_of(1, 1000), longer = with(text, 2, 100), other = with(text, 3, 100);
  FakeSequence sequence(text);
  EXPECT_TRUE(cache.store(text, false, sequence));
  cache.copy(UINT64_MAX);
  EXPECT_EQ(*sequence.n_saved, 1000u);
  FakeSequence again(text);
  EXPECT_TRUE(cache.store(text, false, again));
  EXPECT_EQ(*again.n_saved, 0u);
  FakeSequence next(longer);
  EXPECT_TRUE(cache.store(longer, false, next));
  cache.copy(UINT64_MAX);
  EXPECT_EQ(*next.n_saved, 100u);
  EXPECT_EQ(cache.state().n_blocks, 5u);
  // The one that goes on differently has a block of its own from where they part.
  FakeSequence sibling(other);
  EXPECT_TRUE(cache.store(other, false, sibling));
  cache.copy(UINT64_MAX);
  EXPECT_EQ(*sibling.n_saved, 1100u - 768u);
  EXPECT_EQ(cache.state().n_blocks, 7u);
  for (const Text* want : {&text, &longer, &other}) {
    FakeSequence back;
    cache.load(*want, static_cast<int>(want->size()), 0, false, back);
    EXPECT_EQ(back.tokens, *want);
    // What a sequence has already is not copied.
    FakeSequence near(text_of(1, 800));
    cache.load(*want, static_cast<int>(want->size()), 800, false, near);
    EXPECT_EQ(near.n_loaded, want->size() - 800);
  }
}

TEST(PrefixCache, KeepsNothingThatIsLargerThanItself) {
  PrefixCache cache(options_for(100'000, true));
  EXPECT_FALSE(store(cache, text_of(1, 5000)));
  EXPECT_EQ(cache.state().n_blocks, 0u);
  EXPECT_TRUE(store(cache, text_of(1, 500)));
  EXPECT_FALSE(store(cache, text_of(1, 5000)));
  EXPECT_EQ(match(cache, text_of(1, 500)), 500);
  PrefixCache none(options_for(0, true));
  EXPECT_FALSE(store(none, text_of(1, 5)));
}

TEST(PrefixCache, PushesOutWhatIsWorthLeast) {
  PrefixCache cache(options_for(400'000, true));
  const Text kept = text_of(1, 2000);
  EXPECT_TRUE(store(cache, kept));
  for (int i = 0; i < 40; ++i) {
    EXPECT_TRUE(store(cache, text_of(100 + i, 200)));
    EXPECT_TRUE(store(cache, with(text_of(100 + i, 200), 500 + i, 10)));
  }
  EXPECT_GT(cache.state().n_evicted, 0u);
  EXPECT_EQ(match(cache, kept), 2000);  // 2000 tokens are worth more than 200
  EXPECT_EQ(match(cache, text_of(139, 200)), 200);
  EXPECT_EQ(match(cache, text_of(100, 200)), 0);
}

TEST(PrefixCache, LetsNoSideRequestPushOutAConversation) {
  for (const bool needs_points : {false, true}) {
    PrefixCache cache(options_for(400'000, needs_points));
    std::vector<Text> conversations;
    for (int i = 0; i < 4; ++i) {
      conversations.push_back(text_of(i, 600));
      EXPECT_TRUE(store(cache, conversations.back()));
    }
    for (int i = 0; i < 100; ++i) store(cache, text_of(1000 + i, 50 + 40 * i), true);
    for (const Text& text : conversations) EXPECT_EQ(match(cache, text), 600);
    // A conversation pushes out side requests first.
    EXPECT_TRUE(store(cache, text_of(50, 800)));
    for (const Text& text : conversations) EXPECT_EQ(match(cache, text), 600);
  }
}

TEST(PrefixCache, KeepsWhatIsPinned) {
  for (const bool needs_points : {false, true}) {
    PrefixCache cache(options_for(300'000, needs_points));
    const Text pinned = text_of(1, 100);
    EXPECT_TRUE(store(cache, pinned));
    const PrefixCache::Pin pin = cache.pin(pinned).value();
    EXPECT_TRUE(store(cache, with(pinned, 2, 10)));
    for (int i = 0; i < 200; ++i) store(cache, text_of(10 + i, 700));
    EXPECT_EQ(match(cache, pinned), 100);
    cache.unpin(pin);
    for (int i = 0; i < 200; ++i) store(cache, text_of(10 + i, 700));
    EXPECT_EQ(match(cache, pinned), 0);
  }
}

// Conversations that go on, are edited, begin alike or are side requests: what comes back is what was there,
// and memory stays below the limit.
TEST(PrefixCache, NeverExceedsItsLimit) {
  for (const bool needs_points : {false, true}) {
    for (const uint64_t limit : {uint64_t{150'000}, uint64_t{1'000'000}, uint64_t{4'000'000}}) {
      taken_bytes = most_bytes = 0;
      std::mt19937 random(7);
      PrefixCache cache(options_for(limit, needs_points));
      std::vector<Text> conversations;
      std::vector<std::pair<PrefixCache::Pin, Text>> pins;
      int64_t n_reused = 0;
      for (int i = 0; i < 3000; ++i) {
        Text text;
        if (!conversations.empty() && random() % 4 != 0)
          text = conversations[random() % conversations.size()];
        if (!text.empty() && random() % 5 == 0) text.resize(1 + random() % text.size());
        text = with(std::move(text), static_cast<int>(random() % 50), static_cast<int>(1 + random() % 400));
        const bool side = random() % 6 == 0;
        FakeSequence sequence;
        const int n = match(cache, text);
        n_reused += n;
        if (n > 0) cache.load(text, n, 0, side, sequence);
        sequence = FakeSequence(text);
        const bool stored = cache.store(text, side, sequence);
        if (stored && pins.size() < 3 && random() % 20 == 0) pins.emplace_back(cache.pin(text).value(), text);
        if (random() % 3 == 0) cache.copy(random() % 5000);
        for (const auto& [pin, pinned] : pins)
          EXPECT_EQ(match(cache, pinned), static_cast<int>(pinned.size()));
        if (!pins.empty() && random() % 30 == 0) {
          cache.unpin(pins.back().first);
          pins.pop_back();
        }
        if (text.size() < 5000) {
          if (conversations.size() < 12)
            conversations.push_back(text);
          else
            conversations[random() % 12] = text;
        }
        ASSERT_LE(cache.state().bytes, limit);
        ASSERT_LE(taken_bytes, cache.state().bytes);
      }
      EXPECT_LE(most_bytes, limit);
      EXPECT_GT(n_reused, 0);
      EXPECT_GT(cache.state().n_evicted, 0u);
    }
    EXPECT_EQ(taken_bytes, 0u);
    EXPECT_EQ(FakeSource::n_sources, 0);
  }
}

// Whoever stores a first text does not wait for memory.
TEST(PrefixCache, TakesMemoryForTheFirstTexts) {
  for (const bool needs_points : {false, true}) {
    PrefixCache cache(options_for(10 * MiB, needs_points));
    cache.prepare(4, 600, [] { return false; });
    const uint64_t prepared = cache.state().spare_bytes;
    EXPECT_GE(prepared, taken_bytes);
    EXPECT_EQ(cache.state().bytes, prepared);
    EXPECT_EQ(cache.state().n_blocks + cache.state().n_points + cache.state().n_tokens, 0u);
    for (int i = 0; i < 4; ++i)
      for (const int n : {40, 500, 600}) EXPECT_TRUE(store(cache, text_of(i, n)));
    cache.copy(UINT64_MAX);
    EXPECT_EQ(cache.state().n_taken, 0u);
    EXPECT_EQ(cache.state().bytes, prepared);
    EXPECT_EQ(cache.state().spare_bytes, 0u);
    EXPECT_TRUE(store(cache, text_of(5, 10)));
    EXPECT_EQ(cache.state().n_taken, needs_points ? 2u : 1u);

    cache.clear();
    EXPECT_EQ(match(cache, text_of(1, 600)), 0);
    EXPECT_EQ(cache.state().n_blocks + cache.state().n_points + cache.state().n_evicted, 0u);
    EXPECT_EQ(cache.state().spare_bytes, cache.state().bytes);
    EXPECT_GT(cache.state().bytes, prepared);
  }
  EXPECT_EQ(taken_bytes, 0u);
}

TEST(PrefixCache, TakesNoMoreMemoryThanItMayHave) {
  most_bytes = 0;
  PrefixCache cache(options_for(300'000, true));
  cache.prepare(100, 600, [] { return false; });
  EXPECT_LE(cache.state().bytes, 300'000u);
  EXPECT_GT(cache.state().bytes, 250'000u);
  // What is prepared makes room for what is stored, whichever of the two is short.
  for (int i = 0; i < 20; ++i) EXPECT_TRUE(store(cache, text_of(i, i % 2 == 0 ? 30 : 2000)));
  EXPECT_LE(most_bytes, 300'000u);
  PrefixCache late(options_for(300'000, true));
  late.prepare(100, 600, [] { return true; });
  EXPECT_EQ(late.state().bytes, 0u);
}

// Others go on soon: only the tokens of the last page are copied at once, then a few bytes at a time. The
// sequence may be gone by then.
TEST(PrefixCache, CopiesLongTextsInPieces) {
  constexpr size_t kPiece = 100 * kTokenBytes, kBlock = PrefixCache::kBlockTokens * kTokenBytes;
  for (const bool needs_points : {false, true}) {
    PrefixCache cache(options_for(10 * MiB, needs_points));
    const Text text = text_of(1, 1000);
    EXPECT_TRUE(store(cache, text));
    EXPECT_EQ(cache.state().n_uncopied, 768u);
    EXPECT_EQ(cache.state().n_tokens, 1000u);
    EXPECT_EQ(match(cache, text), 1000);
    for (int n = 768; n > 0; n = static_cast<int>(cache.state().n_uncopied)) {
      cache.copy(kPiece);
      EXPECT_LE(cache.state().n_uncopied, static_cast<uint64_t>(n - 56));  // it goes on
    }
    EXPECT_LT(cache.state().most_copied, kBlock);
    EXPECT_FALSE(cache.has_uncopied());
    EXPECT_EQ(FakeSource::n_sources, 0);
    FakeSequence back;
    EXPECT_TRUE(cache.load(text, 1000, 0, false, back));
    EXPECT_EQ(back.tokens, text);
  }
}

// Also what is not copied yet can be had, goes on, differs, and is pushed out.
TEST(PrefixCache, ServesTextsThatAreNotCopiedYet) {
  PrefixCache cache(options_for(10 * MiB, true));
  const Text text = text_of(1, 1000), longer = with(text, 2, 300), other = with(text_of(1, 600), 3, 400);
  for (const Text& stored : {text, longer, other, text_of(1, 700)}) EXPECT_TRUE(store(cache, stored));
  EXPECT_EQ(cache.state().n_uncopied, 768u + 24u + 256u + 256u);
  for (const Text& want : {other, longer, text, text_of(1, 700)}) {
    FakeSequence back;
    EXPECT_TRUE(cache.load(want, static_cast<int>(want.size()), 0, false, back));
    EXPECT_EQ(back.tokens, want);
  }
  EXPECT_EQ(cache.state().n_uncopied, 0u);
  EXPECT_EQ(FakeSource::n_sources, 0);

  PrefixCache small(options_for(300'000, false));
  for (int i = 0; i < 40; ++i) {
    EXPECT_TRUE(store(small, text_of(i, 1500)));
    small.copy(5000);
    EXPECT_LE(small.state().bytes, 300'000u);
  }
  EXPECT_GT(small.state().n_evicted, 0u);
  EXPECT_LE(FakeSource::n_sources, 40);
}

TEST(PrefixCache, ForgetsWhatThereIsNoMemoryToCopyTo) {
  PrefixCacheOptions options = options_for(10 * MiB, true);
  int n_left = 2;
  options.make_memory = [&](size_t bytes) -> std::unique_ptr<HostMemory> {
    if (n_left-- <= 0) return nullptr;
    return std::make_unique<CountedMemory>(bytes);
  };
  PrefixCache cache(options);
  EXPECT_TRUE(store(cache, text_of(1, 256)));
  EXPECT_TRUE(store(cache, text_of(1, 1000)));
  cache.copy(UINT64_MAX);  // the first block, the last one is there already
  EXPECT_EQ(match(cache, text_of(1, 1000)), 256);
  EXPECT_EQ(cache.state().n_blocks, 1u);
  EXPECT_EQ(cache.state().n_points, 1u);
  // Memory of the last one serves another.
  EXPECT_TRUE(store(cache, text_of(2, 100)));
  EXPECT_FALSE(store(cache, text_of(3, 100)));
  EXPECT_EQ(match(cache, text_of(2, 100)), 100);
  EXPECT_LE(taken_bytes, cache.state().bytes);
}

}  // namespace
}  // namespace thermo
