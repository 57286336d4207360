// Beginnings of texts on disk, so that the prefix cache survives a restart. Texts that leave the cache, and
// those in it when the program ends, are written to disk. A text that is needed again is read before its
// request begins.
//
//     FOLDER/MODEL/HASH.kv    one text: its tokens, its keys and values, up to kMaxPoints checkpoints
//
// MODEL stands for everything that the bytes depend on; HASH is the hash of the tokens. A file is written
// under a temporary name and renamed, so a file that exists is complete. When it is read, its tokens are
// compared and its bytes are checked. Above the limit the oldest files are deleted, of whatever model.
//
// One thread of its own reads and writes. Any thread may call.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "model/step.h"

namespace thermo {

// A text as a file has it.
struct SavedText {
  struct Point {
    int n = 0;  // tokens
    std::vector<std::byte> memory = {};
    std::vector<float> drafter = {};
  };
  std::vector<TokenId> tokens = {};
  std::vector<std::byte> blocks = {};  // keys and values, of whole blocks
  std::vector<Point> points = {};      // ascending; none where the model needs none

  uint64_t bytes() const;
};

struct DiskCacheOptions {
  std::string folder;
  std::string model;  // 64 hexadecimal digits
  uint64_t limit_bytes = 0;
  size_t block_bytes = 0;
  bool needs_points = false;
};

struct DiskCacheState {
  uint64_t limit_bytes = 0, bytes = 0;  // of all models
  uint64_t n_texts = 0;                 // of this model
  uint64_t n_read = 0, n_written = 0, n_evicted = 0;
};

class DiskCache {
 public:
  static constexpr size_t kMaxPoints = 4;

  // Looks at what is there. Throws ConfigError when the folder cannot be used.
  explicit DiskCache(DiskCacheOptions options);
  // Writes what it was given first.
  ~DiskCache();
  DiskCache(const DiskCache&) = delete;
  DiskCache& operator=(const DiskCache&) = delete;

  // How many of these tokens, at most `limit`, a text has that could be read.
  int match(std::span<const TokenId> tokens, int limit) const;
  // Reads the text with the longest match. `on_read` is called on the disk's thread; nullptr: it cannot be
  // read.
  void read(std::vector<TokenId> tokens, int limit,
            std::function<void(std::shared_ptr<const SavedText>)> on_read);
  // Whether a text is there, or a longer one that begins with it.
  bool has(std::span<const TokenId> tokens) const;
  // Later. Texts that wait for the disk and are too many are dropped, the oldest first.
  void write(SavedText text);
  // Waits until everything that it was given is written.
  void flush();

  DiskCacheState state() const;

 private:
  struct File {
    std::filesystem::path path;
    uint64_t bytes = 0;
    int64_t used_ns = 0;               // when it was written or read last
    std::vector<TokenId> tokens = {};  // empty: of another model
    std::vector<int> points = {};
  };
  struct Read {
    std::vector<TokenId> tokens;
    int limit = 0;
    std::function<void(std::shared_ptr<const SavedText>)> on_read;
  };

  void list_files();
  std::shared_ptr<const SavedText> waiting(std::span<const TokenId> tokens, int limit) const;
  std::optional<File> look_at(const std::filesystem::path& path) const;
  const File* best(std::span<const TokenId> tokens, int limit) const;
  const File* covers(std::span<const TokenId> tokens) const;
  void work();
  void run(const Read& read);
  void save(const SavedText& text);
  void remove(size_t i);
  bool make_room(uint64_t n_bytes);

  const DiskCacheOptions options_;
  const std::filesystem::path folder_;  // of this model
  mutable std::mutex mutex_;            // for all below
  std::condition_variable wake_, done_;
  std::vector<File> files_;
  DiskCacheState state_;
  std::deque<Read> reads_;
  std::deque<std::shared_ptr<const SavedText>> writes_;  // the newest at the end; they can be read, too
  uint64_t waiting_bytes_ = 0;
  bool writing_ = false;  // the first of them
  bool leaving_ = false;
  std::thread thread_;
};

}  // namespace thermo
