#include "engine/disk_cache.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/sha256.h"
#include "base/units.h"
#include "model/sequence_layout.h"

namespace thermo {
namespace {

namespace fs = std::filesystem;

constexpr char kMagic[8] = {'T', 'H', 'K', 'V', 'T', 'X', 'T', '1'};
constexpr const char* kSuffix = ".kv";
constexpr uint64_t kMostTokens = uint64_t{1} << 28;
constexpr uint64_t kMostWaiting = uint64_t{1} << 30;  // bytes that wait for the disk

struct Head {
  char magic[8];
  char model[64];
  uint64_t n_tokens, n_points, block_bytes;
  uint64_t hash;  // of everything after the head
};
struct PointHead {
  int64_t n;
  uint64_t memory_bytes, n_floats;
};

class Descriptor {
 public:
  explicit Descriptor(int file) : file_(file) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (file_ >= 0) ::close(file_);
  }
  bool open() const { return file_ >= 0; }

  bool read(void* to, size_t n) const {
    for (auto* at = static_cast<char*>(to); n > 0;) {
      const ssize_t got = ::read(file_, at, n);
      if (got <= 0) return false;
      at += got;
      n -= static_cast<size_t>(got);
    }
    return true;
  }
  bool write(const void* from, size_t n) const {
    for (const auto* at = static_cast<const char*>(from); n > 0;) {
      const ssize_t put = ::write(file_, at, n);
      if (put <= 0) return false;
      at += put;
      n -= static_cast<size_t>(put);
    }
    return true;
  }
  bool sync() const { return fsync(file_) == 0; }
  std::optional<uint64_t> size() const {
    struct stat about {};
    if (fstat(file_, &about) != 0 || !S_ISREG(about.st_mode)) return std::nullopt;
    return static_cast<uint64_t>(about.st_size);
  }

 private:
  int file_;
};

// Against damage, not against forgers: the folder is its owner's.
class Checksum {
 public:
  void add(const void* from, size_t n) {
    const auto* at = static_cast<const char*>(from);
    for (; n > 0; at += std::min<size_t>(n, 8), n -= std::min<size_t>(n, 8)) {
      uint64_t word = 0;
      std::memcpy(&word, at, std::min<size_t>(n, 8));
      value_ = (value_ ^ word) * 0x9e3779b97f4a7c15u;
      value_ ^= value_ >> 29;
    }
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0x243f6a8885a308d3u;
};

template <class T>
void add(Checksum& sum, const std::vector<T>& values) {
  sum.add(values.data(), values.size() * sizeof(T));
}

std::vector<PointHead> point_heads(const SavedText& text) {
  std::vector<PointHead> heads;
  for (const SavedText::Point& point : text.points)
    heads.push_back({point.n, point.memory.size(), point.drafter.size()});
  return heads;
}

uint64_t checksum_of(const SavedText& text) {
  Checksum sum;
  add(sum, text.tokens);
  add(sum, point_heads(text));
  add(sum, text.blocks);
  for (const SavedText::Point& point : text.points) {
    add(sum, point.memory);
    add(sum, point.drafter);
  }
  return sum.value();
}

// The head, the tokens and the lengths of a file, if they make sense together.
struct Contents {
  Head head{};
  std::vector<TokenId> tokens;
  std::vector<PointHead> points;
};
std::optional<Contents> read_contents(const Descriptor& file, const DiskCacheOptions& options) {
  const std::optional<uint64_t> size = file.size();
  Contents c;
  if (!size || !file.read(&c.head, sizeof(c.head)) || std::memcmp(c.head.magic, kMagic, sizeof(kMagic)) != 0)
    return std::nullopt;
  if (std::string_view(c.head.model, sizeof(c.head.model)) != options.model) return std::nullopt;
  const uint64_t n = c.head.n_tokens;
  if (n == 0 || n > kMostTokens || c.head.n_points > DiskCache::kMaxPoints ||
      c.head.block_bytes != options.block_bytes)
    return std::nullopt;
  const uint64_t n_blocks = ceil_div<uint64_t>(n, SequenceLayout::kBlockTokens);
  if (options.block_bytes > 0 && n_blocks > *size / options.block_bytes) return std::nullopt;
  uint64_t expected = sizeof(Head) + n * sizeof(TokenId) + c.head.n_points * sizeof(PointHead) +
                      n_blocks * options.block_bytes;
  if (expected > *size) return std::nullopt;
  c.tokens.resize(static_cast<size_t>(n));
  c.points.resize(static_cast<size_t>(c.head.n_points));
  if (!file.read(c.tokens.data(), c.tokens.size() * sizeof(TokenId)) ||
      !file.read(c.points.data(), c.points.size() * sizeof(PointHead)))
    return std::nullopt;
  int64_t before = 0;
  for (const PointHead& point : c.points) {
    const bool good = point.n > before && point.n <= static_cast<int64_t>(n) && point.memory_bytes <= *size &&
                      point.n_floats <= *size / sizeof(float);
    if (!good) return std::nullopt;
    before = point.n;
    expected += point.memory_bytes + point.n_floats * sizeof(float);
  }
  if (expected != *size) return std::nullopt;
  return c;
}

std::unique_ptr<SavedText> load_text(const fs::path& path, const DiskCacheOptions& options) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::optional<Contents> contents = file.open() ? read_contents(file, options) : std::nullopt;
  if (!contents) return nullptr;
  auto text = std::make_unique<SavedText>();
  text->tokens = std::move(contents->tokens);
  text->blocks.resize(ceil_div<size_t>(text->tokens.size(), SequenceLayout::kBlockTokens) *
                      options.block_bytes);
  bool good = file.read(text->blocks.data(), text->blocks.size());
  for (const PointHead& head : contents->points) {
    SavedText::Point& point = text->points.emplace_back();
    point.n = static_cast<int>(head.n);
    point.memory.resize(head.memory_bytes);
    point.drafter.resize(head.n_floats);
    good = good && file.read(point.memory.data(), point.memory.size()) &&
           file.read(point.drafter.data(), point.drafter.size() * sizeof(float));
  }
  return good && checksum_of(*text) == contents->head.hash ? std::move(text) : nullptr;
}

bool write_text(const Descriptor& file, const SavedText& text, const DiskCacheOptions& options) {
  Head head{};
  std::memcpy(head.magic, kMagic, sizeof(kMagic));
  std::memcpy(head.model, options.model.data(), sizeof(head.model));
  head.n_tokens = text.tokens.size();
  head.n_points = text.points.size();
  head.block_bytes = options.block_bytes;
  head.hash = checksum_of(text);
  const std::vector<PointHead> heads = point_heads(text);
  bool good = file.write(&head, sizeof(head)) &&
              file.write(text.tokens.data(), text.tokens.size() * sizeof(TokenId)) &&
              file.write(heads.data(), heads.size() * sizeof(PointHead)) &&
              file.write(text.blocks.data(), text.blocks.size());
  for (const SavedText::Point& point : text.points)
    good = good && file.write(point.memory.data(), point.memory.size()) &&
           file.write(point.drafter.data(), point.drafter.size() * sizeof(float));
  return good && file.sync();
}

int64_t now_of_files() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// How many of the wanted tokens, at most `limit`, a text has; `points`: where it can be cut, if not anywhere.
int n_match(const std::vector<TokenId>& text, const std::vector<int>* points, std::span<const TokenId> wanted,
            int limit) {
  const auto same = static_cast<int>(
      std::mismatch(text.begin(), text.end(), wanted.begin(), wanted.end()).first - text.begin());
  const int most = std::min(same, limit);
  if (points == nullptr) return most;
  const auto after = std::upper_bound(points->begin(), points->end(), most);
  return after == points->begin() ? 0 : *std::prev(after);
}

std::vector<int> lengths(const std::vector<SavedText::Point>& points) {
  std::vector<int> all;
  for (const SavedText::Point& point : points) all.push_back(point.n);
  return all;
}

bool begins_with(std::span<const TokenId> text, std::span<const TokenId> beginning) {
  return text.size() >= beginning.size() && std::equal(beginning.begin(), beginning.end(), text.begin());
}

}  // namespace

uint64_t SavedText::bytes() const {
  uint64_t n = sizeof(Head) + tokens.size() * sizeof(TokenId) + blocks.size();
  for (const Point& point : points)
    n += sizeof(PointHead) + point.memory.size() + point.drafter.size() * sizeof(float);
  return n;
}

DiskCache::DiskCache(DiskCacheOptions options)
    : options_(std::move(options)), folder_(fs::path(options_.folder) / options_.model.substr(0, 16)) {
  std::error_code error;
  fs::create_directories(folder_, error);
  if (error || ::access(folder_.c_str(), W_OK | X_OK) != 0)
    throw ConfigError(fmt::format("{} cannot be used for texts on disk: {}", folder_.string(),
                                  error ? error.message() : "it cannot be written to"));
  fs::permissions(folder_, fs::perms::owner_all, error);  // conversations are nobody else's
  state_.limit_bytes = options_.limit_bytes;
  list_files();
  make_room(0);
  thread_ = std::thread([this] { work(); });
}

DiskCache::~DiskCache() {
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

// Of all models. What an earlier run did not finish goes.
void DiskCache::list_files() {
  std::error_code error;
  for (fs::recursive_directory_iterator it(options_.folder, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code ignored;
    if (!it->is_regular_file(ignored)) continue;
    const fs::path& path = it->path();
    if (path.extension() == ".tmp" && path.stem().extension() == kSuffix) fs::remove(path, ignored);
    if (path.extension() != kSuffix) continue;
    std::optional<File> file = look_at(path);
    if (!file) continue;
    state_.bytes += file->bytes;
    state_.n_texts += file->tokens.empty() ? 0 : 1;
    files_.push_back(std::move(*file));
  }
}

// nullopt: it is damaged, and gone.
std::optional<DiskCache::File> DiskCache::look_at(const fs::path& path) const {
  std::error_code error;
  File found{.path = path, .bytes = fs::file_size(path, error)};
  struct stat about {};
  if (error || ::stat(path.c_str(), &about) != 0) return std::nullopt;
  found.used_ns = int64_t{about.st_mtim.tv_sec} * 1'000'000'000 + about.st_mtim.tv_nsec;
  if (path.parent_path() != folder_) return found;
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::optional<Contents> contents = file.open() ? read_contents(file, options_) : std::nullopt;
  if (!contents) {
    log_warning("cache", "{} cannot be read and is deleted", path.string());
    fs::remove(path, error);
    return std::nullopt;
  }
  found.tokens = std::move(contents->tokens);
  for (const PointHead& point : contents->points) found.points.push_back(static_cast<int>(point.n));
  return found;
}

const DiskCache::File* DiskCache::best(std::span<const TokenId> tokens, int limit) const {
  const File* longest = nullptr;
  int most = 0;
  for (const File& file : files_) {
    const int n = n_match(file.tokens, options_.needs_points ? &file.points : nullptr, tokens, limit);
    if (n > most) longest = &file, most = n;
  }
  return longest;
}

// One that is not written yet and is as good as any file.
std::shared_ptr<const SavedText> DiskCache::waiting(std::span<const TokenId> tokens, int limit) const {
  std::shared_ptr<const SavedText> longest;
  const File* const file = best(tokens, limit);
  int most = file == nullptr
                 ? 1
                 : n_match(file->tokens, options_.needs_points ? &file->points : nullptr, tokens, limit);
  for (const auto& text : writes_) {
    const std::vector<int> points = lengths(text->points);
    const int n = n_match(text->tokens, options_.needs_points ? &points : nullptr, tokens, limit);
    if (n >= most) longest = text, most = n;
  }
  return longest;
}

int DiskCache::match(std::span<const TokenId> tokens, int limit) const {
  const std::lock_guard lock(mutex_);
  if (const auto text = waiting(tokens, limit)) {
    const std::vector<int> points = lengths(text->points);
    return n_match(text->tokens, options_.needs_points ? &points : nullptr, tokens, limit);
  }
  const File* const file = best(tokens, limit);
  return file == nullptr
             ? 0
             : n_match(file->tokens, options_.needs_points ? &file->points : nullptr, tokens, limit);
}

const DiskCache::File* DiskCache::covers(std::span<const TokenId> tokens) const {
  const auto n = static_cast<int>(tokens.size());
  for (const File& file : files_)
    if (n_match(file.tokens, options_.needs_points ? &file.points : nullptr, tokens, n) == n) return &file;
  return nullptr;
}

bool DiskCache::has(std::span<const TokenId> tokens) const {
  const std::lock_guard lock(mutex_);
  if (covers(tokens) != nullptr) return true;
  return std::any_of(writes_.begin(), writes_.end(),
                     [&](const auto& text) { return begins_with(text->tokens, tokens); });
}

void DiskCache::read(std::vector<TokenId> tokens, int limit,
                     std::function<void(std::shared_ptr<const SavedText>)> on_read) {
  {
    const std::lock_guard lock(mutex_);
    reads_.push_back({std::move(tokens), limit, std::move(on_read)});
  }
  wake_.notify_one();
}

void DiskCache::write(SavedText text) {
  {
    const std::lock_guard lock(mutex_);
    waiting_bytes_ += text.bytes();
    writes_.push_back(std::make_shared<const SavedText>(std::move(text)));
    const size_t first = writing_ ? 1 : 0;
    while (writes_.size() > first + 1 && waiting_bytes_ > kMostWaiting) {
      waiting_bytes_ -= writes_[first]->bytes();
      writes_.erase(writes_.begin() + static_cast<std::ptrdiff_t>(first));
    }
  }
  wake_.notify_one();
}

void DiskCache::flush() {
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return writes_.empty(); });
}

DiskCacheState DiskCache::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

void DiskCache::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return leaving_ || !reads_.empty() || !writes_.empty(); });
    if (!reads_.empty()) {
      const Read next = std::move(reads_.front());
      reads_.pop_front();
      lock.unlock();
      run(next);
      lock.lock();
    } else if (!writes_.empty()) {
      const std::shared_ptr<const SavedText> next = writes_.front();
      writing_ = true;
      lock.unlock();
      save(*next);
      lock.lock();
      writing_ = false;
      writes_.pop_front();
      waiting_bytes_ -= next->bytes();
    } else {
      return;  // leaving
    }
    done_.notify_all();
  }
}

void DiskCache::run(const Read& read) {
  fs::path path;
  std::shared_ptr<const SavedText> text;
  {
    const std::lock_guard lock(mutex_);
    text = waiting(read.tokens, read.limit);
    const File* const file = best(read.tokens, read.limit);
    if (text == nullptr && file != nullptr && !leaving_) path = file->path;
  }
  if (!path.empty()) text = load_text(path, options_);
  {
    const std::lock_guard lock(mutex_);
    state_.n_read += text != nullptr ? 1 : 0;
    for (size_t i = 0; i < files_.size(); ++i) {
      if (files_[i].path != path) continue;
      files_[i].used_ns = now_of_files();
      if (text == nullptr) {
        log_warning("cache", "{} is damaged and is deleted", path.string());
        remove(i);
      }
      break;
    }
  }
  if (!path.empty() && text != nullptr) {
    std::error_code ignored;
    fs::last_write_time(path, fs::file_time_type::clock::now(), ignored);  // the oldest go first
  }
  read.on_read(std::move(text));
}

// Under the lock.
void DiskCache::remove(size_t i) {
  std::error_code ignored;
  fs::remove(files_[i].path, ignored);
  state_.bytes -= files_[i].bytes;
  state_.n_texts -= files_[i].tokens.empty() ? 0 : 1;
  files_.erase(files_.begin() + static_cast<std::ptrdiff_t>(i));
}

// Under the lock, or before the thread begins. False: it can never have so much.
bool DiskCache::make_room(uint64_t n_bytes) {
  if (n_bytes > options_.limit_bytes) return false;
  while (state_.bytes + n_bytes > options_.limit_bytes) {
    const auto oldest = std::min_element(files_.begin(), files_.end(),
                                         [](const File& a, const File& b) { return a.used_ns < b.used_ns; });
    ++state_.n_evicted;
    remove(static_cast<size_t>(oldest - files_.begin()));
  }
  return true;
}

void DiskCache::save(const SavedText& text) {
  const std::string hash = sha256_hex(std::as_bytes(std::span(text.tokens)));
  File file{.path = folder_ / (hash.substr(0, 32) + kSuffix),
            .bytes = text.bytes(),
            .used_ns = now_of_files(),
            .tokens = text.tokens,
            .points = lengths(text.points)};
  {
    const std::lock_guard lock(mutex_);
    if (covers(text.tokens) != nullptr || !make_room(file.bytes)) return;
    state_.bytes += file.bytes;  // before it is written: the limit holds at any moment
  }
  const fs::path beside = file.path.string() + ".tmp";
  std::error_code error;
  fs::remove(beside, error);
  bool good = false;
  {
    const Descriptor out(::open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    good = out.open() && write_text(out, text, options_);
    if (!good) error.assign(errno, std::generic_category());
  }
  if (good) {
    fs::rename(beside, file.path, error);
    good = !error;
  }
  std::error_code ignored;
  if (!good) fs::remove(beside, ignored);
  const std::lock_guard lock(mutex_);
  if (!good) {
    state_.bytes -= file.bytes;
    // The folder and not the file, so that a full disk is one line of the log.
    log_warning("cache", "a text cannot be kept in {} ({}); it will be read again when it is needed",
                folder_.string(), error.message());
    return;
  }
  // What it goes on from is part of it.
  for (size_t i = files_.size(); i-- > 0;)
    if (!files_[i].tokens.empty() && begins_with(text.tokens, files_[i].tokens)) {
      if (files_[i].path == file.path) {
        state_.bytes -= files_[i].bytes;  // it was replaced
        --state_.n_texts;
        files_.erase(files_.begin() + static_cast<std::ptrdiff_t>(i));
      } else {
        remove(i);
      }
    }
  ++state_.n_texts;
  ++state_.n_written;
  files_.push_back(std::move(file));
}

}  // namespace thermo
