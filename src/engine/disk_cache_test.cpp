#include "engine/disk_cache.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <future>
#include <random>

#include "base/error.h"
#include "model/sequence_layout.h"

namespace thermo {
namespace {

namespace fs = std::filesystem;

constexpr size_t kBlockBytes = 1000;

std::vector<TokenId> tokens_of(int seed, size_t n) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<TokenId> tokens(n);
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 1000);
  return tokens;
}

SavedText text_of(std::vector<TokenId> tokens, const std::vector<int>& points) {
  SavedText text;
  const size_t n_blocks = (tokens.size() + SequenceLayout::kBlockTokens - 1) / SequenceLayout::kBlockTokens;
  text.tokens = std::move(tokens);
  text.blocks.resize(n_blocks * kBlockBytes);
  for (size_t i = 0; i < text.blocks.size(); ++i) text.blocks[i] = static_cast<std::byte>(i * 7);
  for (const int n : points)
    text.points.push_back({n, std::vector<std::byte>(77, static_cast<std::byte>(n)), {1.5f, 2.5f}});
  return text;
}

class DiskCacheTest : public testing::Test {
 protected:
  DiskCacheTest() { fs::remove_all(folder_); }
  ~DiskCacheTest() override { fs::remove_all(folder_); }

  std::unique_ptr<DiskCache> open(uint64_t limit = 1 << 20, char model = 'a',
                                  bool needs_points = true) const {
    return std::make_unique<DiskCache>(DiskCacheOptions{.folder = folder_.string(),
                                                        .model = std::string(64, model),
                                                        .limit_bytes = limit,
                                                        .block_bytes = kBlockBytes,
                                                        .needs_points = needs_points});
  }
  static std::shared_ptr<const SavedText> read(DiskCache& disk, const std::vector<TokenId>& tokens) {
    std::promise<std::shared_ptr<const SavedText>> read;
    disk.read(tokens, static_cast<int>(tokens.size()),
              [&read](std::shared_ptr<const SavedText> text) { read.set_value(std::move(text)); });
    return read.get_future().get();
  }
  std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::recursive_directory_iterator(folder_))
      if (entry.is_regular_file()) found.push_back(entry.path());
    return found;
  }

  const fs::path folder_ =
      fs::path(testing::TempDir()) / ("thermo_disk_cache_test." + std::to_string(::getpid()));
};

TEST_F(DiskCacheTest, HasTextsOfEarlierRuns) {
  const std::vector<TokenId> tokens = tokens_of(1, 700);
  {
    const auto disk = open();
    disk->write(text_of(tokens, {300, 650, 700}));
  }
  const auto disk = open();
  EXPECT_EQ(disk->state().n_texts, 1u);
  std::vector<TokenId> longer = tokens, other = tokens;
  longer.push_back(5);
  other[660] += 1;
  EXPECT_EQ(disk->match(longer, 701), 700);
  EXPECT_EQ(disk->match(longer, 699), 650);
  EXPECT_EQ(disk->match(other, 700), 650);
  EXPECT_EQ(disk->match(tokens_of(2, 700), 700), 0);
  EXPECT_TRUE(disk->has(tokens));
  EXPECT_FALSE(disk->has(longer));
  const auto text = read(*disk, longer);
  ASSERT_NE(text, nullptr);
  const SavedText want = text_of(tokens, {300, 650, 700});
  EXPECT_EQ(text->tokens, want.tokens);
  EXPECT_EQ(text->blocks, want.blocks);
  ASSERT_EQ(text->points.size(), 3u);
  EXPECT_EQ(text->points[1].memory, want.points[1].memory);
  EXPECT_EQ(text->points[1].drafter, want.points[1].drafter);
  // Another model has its own, and nobody else may look into them.
  EXPECT_EQ(open(1 << 20, 'b')->match(tokens, 700), 0);
  EXPECT_EQ(open(1 << 20, 'a', false)->match(other, 700), 660);
  for (const fs::path& path : files())
    EXPECT_EQ(fs::status(path).permissions() & (fs::perms::group_all | fs::perms::others_all),
              fs::perms::none);
}

TEST_F(DiskCacheTest, ReplacesTheBeginningOfALongerText) {
  const std::vector<TokenId> tokens = tokens_of(1, 900);
  const auto disk = open();
  disk->write(text_of({tokens.begin(), tokens.begin() + 500}, {500}));
  EXPECT_EQ(disk->match(tokens, 900), 500);  // whether it is written or not
  disk->flush();
  disk->write(text_of(tokens, {500, 900}));
  disk->write(text_of({tokens.begin(), tokens.begin() + 500}, {500}));  // it is there
  disk->flush();
  EXPECT_EQ(files().size(), 1u);
  EXPECT_EQ(disk->state().n_texts, 1u);
  EXPECT_EQ(disk->state().bytes, fs::file_size(files()[0]));
}

TEST_F(DiskCacheTest, KeepsToItsLimitAndForgetsTheOldest) {
  const uint64_t one = text_of(tokens_of(1, 400), {400}).bytes(), limit = 3 * one + 10;
  const auto disk = open(limit);
  for (int i = 1; i <= 3; ++i) {
    disk->write(text_of(tokens_of(i, 400), {400}));
    disk->flush();
  }
  EXPECT_NE(read(*disk, tokens_of(1, 400)), nullptr);  // used now
  disk->write(text_of(tokens_of(4, 400), {400}));
  disk->flush();
  EXPECT_EQ(disk->match(tokens_of(2, 400), 400), 0);
  for (const int i : {1, 3, 4}) EXPECT_EQ(disk->match(tokens_of(i, 400), 400), 400) << i;
  EXPECT_LE(disk->state().bytes, limit);
  EXPECT_EQ(disk->state().n_evicted, 1u);
  disk->write(text_of(tokens_of(5, 4000), {4000}));  // larger than all
  disk->flush();
  EXPECT_EQ(disk->state().n_texts, 3u);
  // Those of other models count, and so does a smaller limit of the next run.
  EXPECT_EQ(open(one, 'b')->state().bytes, one);
  EXPECT_EQ(files().size(), 1u);
}

TEST_F(DiskCacheTest, DeletesWhatIsDamaged) {
  const std::vector<TokenId> tokens = tokens_of(1, 300);
  open()->write(text_of(tokens, {300}));
  const fs::path path = files().at(0);
  const auto content = [&path] {
    std::ifstream in(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  const auto put = [&path](const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; };
  const std::string good = content();
  std::mt19937 random(1);
  const auto spoil = [&random](char& c) { c = static_cast<char>(c ^ static_cast<char>(1 + random() % 255)); };
  for (int i = 0; i < 200; ++i) {
    std::string bad = good;
    if (i % 4 == 0)
      bad.resize(random() % bad.size());
    else
      spoil(bad[i < 100 ? static_cast<size_t>(i) : random() % bad.size()]);
    put(bad);
    const auto disk = open();
    if (disk->match(tokens, 300) == 0) continue;  // seen at once
    EXPECT_EQ(read(*disk, tokens), nullptr) << i;
    EXPECT_EQ(disk->state().n_texts, 0u);
    EXPECT_FALSE(fs::exists(path));
  }
  // A file that was not finished.
  put(good);
  fs::rename(path, path.string() + ".tmp");
  EXPECT_EQ(open()->match(tokens, 300), 0);
  EXPECT_TRUE(files().empty());
}

// It said that the text stays in memory, which it was leaving, and not why.
TEST_F(DiskCacheTest, SaysWhyATextIsNotKept) {
  auto disk = open();
  fs::remove_all(folder_);
  testing::internal::CaptureStderr();
  disk->write(text_of(tokens_of(1, 300), {300}));
  disk.reset();
  const std::string log = testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("No such file or directory"), std::string::npos) << log;
}

TEST_F(DiskCacheTest, RefusesAFolderThatIsNone) {
  std::ofstream(folder_.string()) << "x";
  EXPECT_THROW(open(), ConfigError);
}

}  // namespace
}  // namespace thermo
