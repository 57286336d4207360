#include "hub/download.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/json.h"
#include "base/sha256.h"
#include "base/units.h"

namespace thermo {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMaxListing = 64u << 20;  // bytes
constexpr int kMaxTries = 7;               // without a byte in between

bool is_hex(std::string_view text, size_t n) {
  return text.size() == n && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// Spaces and the like in a path of a URL.
std::string escaped(std::string_view path) {
  std::string out;
  for (const char c : path) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) != 0 || std::strchr("-_.~/", c) != nullptr)
      out += c;
    else
      out += fmt::format("%{:02X}", byte);
  }
  return out;
}

[[noreturn]] void throw_refused(const HubReference& reference, const HubOptions& options, int status) {
  const std::string host = host_of(options.endpoint);
  if (status == 401 || status == 403)
    throw DownloadError(fmt::format(
        "{}: {} refused it ({}); {}", reference.repository(), host, status,
        options.token.empty()
            ? "it is private, gated or does not exist: accept its terms in a browser and give a token"
            : "the token may not read it: accept its terms in a browser, or use another token"));
  if (status == 404)
    throw DownloadError(fmt::format("{}: {} has no such repository or file (404); check the spelling",
                                    reference.repository(), host));
  throw DownloadError(
      fmt::format("{}: {} answered {}; try again later", reference.repository(), host, status));
}

bool may_pass(int status) {
  return status == 0 || status == 200 || status == 206 || status == 408 || status == 429 || status >= 500;
}

// Sleeps; false: cancelled meanwhile.
bool wait(double seconds, const DownloadObserver& observer) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end) {
    if (observer.cancelled && observer.cancelled()) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return true;
}

// A partial file that this process alone may write, with the hash of what it holds.
class PartialFile {
 public:
  // nullopt: cancelled while another process had it.
  static std::optional<PartialFile> open(const fs::path& path, const DownloadObserver& observer) {
    PartialFile file;
    file.path_ = path;
    file.fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (file.fd_ < 0) file.fail("cannot be written");
    while (flock(file.fd_, LOCK_EX | LOCK_NB) != 0)
      if (!wait(0.2, observer)) return std::nullopt;
    return file;
  }
  PartialFile(PartialFile&& other) noexcept
      : path_(std::move(other.path_)),
        fd_(std::exchange(other.fd_, -1)),
        size_(other.size_),
        hash_(other.hash_) {}
  PartialFile& operator=(PartialFile&&) = delete;
  ~PartialFile() {
    if (fd_ >= 0) close(fd_);
  }

  uint64_t size() const { return size_; }

  // Hashes what is there; more than `expected` is thrown away.
  void read_back(uint64_t expected) {
    std::vector<std::byte> buffer(1u << 20);
    clear_hash();
    for (;;) {
      const ssize_t n = pread(fd_, buffer.data(), buffer.size(), static_cast<off_t>(size_));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail("cannot be read");
      if (n == 0) break;
      hash_.update({buffer.data(), static_cast<size_t>(n)});
      size_ += static_cast<uint64_t>(n);
      if (size_ > expected) return restart();
    }
  }
  void restart() {
    if (ftruncate(fd_, 0) != 0) fail("cannot be written");
    clear_hash();
  }
  void append(std::span<const std::byte> bytes) {
    hash_.update(bytes);
    while (!bytes.empty()) {
      const ssize_t n = pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(size_));
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) fail("cannot be written");
      size_ += static_cast<uint64_t>(n);
      bytes = bytes.subspan(static_cast<size_t>(n));
    }
  }
  std::string hash() { return hash_.finish(); }
  // The file is complete and gets its name.
  void become(const fs::path& blob) {
    if (fsync(fd_) != 0) fail("cannot be written");
    if (std::rename(path_.c_str(), blob.c_str()) != 0) fail("cannot be renamed");
  }
  void remove() {
    std::error_code ignored;
    fs::remove(path_, ignored);
  }

 private:
  PartialFile() = default;
  void clear_hash() {
    size_ = 0;
    hash_ = Sha256();
  }
  [[noreturn]] void fail(const char* what) const {
    throw DownloadError(fmt::format("{} {}: {}", path_.string(), what, std::strerror(errno)));
  }

  fs::path path_;
  int fd_ = -1;
  uint64_t size_ = 0;
  Sha256 hash_;
};

// One download: a model's files in turn.
class ModelDownload {
 public:
  ModelDownload(const HubReference& reference, const HubOptions& options, const DownloadObserver& observer)
      : reference_(reference), options_(options), observer_(observer), cache_(options.cache) {}

  std::optional<fs::path> run() {
    const HubListing listing = list_repository(reference_, options_, http_);
    const std::vector<HubModel> models = models_of(listing.files);
    const HubModel& model = choose_model(models, reference_);
    if (!model.is_complete())
      throw DownloadError(fmt::format("{}: {} has {} of its {} parts there; ask its author",
                                      reference_.repository(), model.name(), model.parts.size(),
                                      model.n_parts));
    total_ = model.bytes();
    const fs::path blobs = cache_.folder_of(reference_) / "blobs";
    HubCache::make_folder(blobs);
    check_room(model, blobs);
    for (const HubFile& file : model.parts) {
      const std::optional<fs::path> blob = fetch(file, listing.commit, blobs);
      if (!blob) return std::nullopt;
      cache_.link(reference_, listing.commit, file, *blob);
      before_ += file.bytes;
    }
    cache_.set_main(reference_, listing.commit);
    return cache_.folder_of(reference_) / "snapshots" / listing.commit / model.name();
  }

 private:
  fs::path partial_of(const HubFile& file, const fs::path& blobs) const {
    std::string name = file.sha256;
    if (name.empty()) name = "unnamed-" + sha256_hex(std::as_bytes(std::span(file.path))).substr(0, 32);
    return blobs / (name + ".incomplete");
  }

  void check_room(const HubModel& model, const fs::path& blobs) const {
    uint64_t missing = 0;
    std::error_code error;
    for (const HubFile& file : model.parts) {
      if (!file.sha256.empty() && fs::exists(blobs / file.sha256, error)) continue;
      const uintmax_t there = fs::file_size(partial_of(file, blobs), error);
      missing += file.bytes - std::min<uint64_t>(file.bytes, error ? 0 : there);
    }
    const fs::space_info space = fs::space(blobs, error);
    if (!error && space.available < missing)
      throw DownloadError(fmt::format(
          "{} needs {} more, but {} has {} free; make room, or choose another cache folder",
          reference_.describe(), format_bytes(missing), blobs.string(), format_bytes(space.available)));
  }

  void report(const HubFile& file, uint64_t done) const {
    if (observer_.on_progress) observer_.on_progress(file.path, before_ + done, total_);
  }

  // The blob; nullopt: cancelled.
  std::optional<fs::path> fetch(const HubFile& file, const std::string& commit, const fs::path& blobs) {
    std::error_code error;
    const auto is_there = [&] {
      return !file.sha256.empty() && fs::file_size(blobs / file.sha256, error) == file.bytes && !error;
    };
    if (is_there()) return blobs / file.sha256;
    std::optional<PartialFile> partial = PartialFile::open(partial_of(file, blobs), observer_);
    if (!partial) return std::nullopt;
    if (is_there()) {  // another process was faster
      partial->remove();
      return blobs / file.sha256;
    }
    partial->read_back(file.bytes);
    const std::string url = fmt::format("{}/{}/resolve/{}/{}", options_.endpoint, reference_.repository(),
                                        commit, escaped(file.path));
    double pause = options_.retry_seconds;
    for (int tries = 1; partial->size() < file.bytes; ++tries) {
      const uint64_t before = partial->size();
      const GetReply reply = transfer(url, file, *partial);
      if (observer_.cancelled && observer_.cancelled()) return std::nullopt;
      if (partial->size() == file.bytes) break;
      if (partial->size() > before) {
        tries = 0;
        pause = options_.retry_seconds;
      }
      if (reply.status == 416) {
        partial->restart();  // what is there is no beginning of it
      } else if (!may_pass(reply.status)) {
        throw_refused(reference_, options_, reply.status);
      }
      if (tries >= kMaxTries)
        throw DownloadError(fmt::format(
            "{}: the download stopped at {} of {} ({}); run it again to resume", file.path,
            format_bytes(partial->size()), format_bytes(file.bytes),
            !reply.error.empty() ? reply.error : fmt::format("the server answered {}", reply.status)));
      if (!wait(pause, observer_)) return std::nullopt;
      pause = std::min(30.0, 2 * pause);
    }
    const std::string hash = partial->hash();
    if (!file.sha256.empty() && hash != file.sha256) {
      partial->remove();
      throw DownloadError(
          fmt::format("{}: it was damaged on the way (SHA-256 {}..., {}... was expected); run it again",
                      file.path, hash.substr(0, 12), file.sha256.substr(0, 12)));
    }
    partial->become(blobs / hash);
    return blobs / hash;
  }

  GetReply transfer(const std::string& url, const HubFile& file, PartialFile& partial) {
    std::string lie;
    GetRequest request{.url = url, .token = options_.token, .offset = partial.size()};
    request.cancelled = observer_.cancelled;
    request.on_begin = [&](uint64_t begin, int64_t n_bytes) {
      if (begin != partial.size()) {
        if (begin != 0) return false;
        partial.restart();  // the server sends everything again
      }
      if (n_bytes >= 0 && begin + static_cast<uint64_t>(n_bytes) != file.bytes)
        lie = fmt::format("the server sends {}", format_bytes(begin + static_cast<uint64_t>(n_bytes)));
      return lie.empty();
    };
    request.on_body = [&](std::span<const std::byte> bytes) {
      if (partial.size() + bytes.size() > file.bytes) {
        lie = "the server sends more";
        return false;
      }
      partial.append(bytes);
      report(file, partial.size());
      return true;
    };
    const GetReply reply = http_.get(request);
    if (!lie.empty()) {
      partial.remove();
      throw DownloadError(
          fmt::format("{}: {}, but its repository says {}; try again later, or check the endpoint", file.path,
                      lie, format_bytes(file.bytes)));
    }
    return reply;
  }

  const HubReference& reference_;
  const HubOptions& options_;
  const DownloadObserver& observer_;
  HubCache cache_;
  HttpClient http_;
  uint64_t before_ = 0, total_ = 0;
};

}  // namespace

HubListing list_repository(const HubReference& reference, const HubOptions& options, HttpClient& http) {
  std::string body;
  GetRequest request{.url = fmt::format("{}/api/models/{}/revision/main?blobs=true", options.endpoint,
                                        reference.repository()),
                     .token = options.token};
  request.on_body = [&](std::span<const std::byte> bytes) {
    body.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    return body.size() <= kMaxListing;
  };
  const GetReply reply = http.get(request);
  if (reply.status == 0)
    throw DownloadError(
        fmt::format("{}: {} cannot be reached ({}); check the connection, or use a model that is here",
                    reference.repository(), host_of(options.endpoint), reply.error));
  if (reply.status != 200) throw_refused(reference, options, reply.status);
  const auto damaged = [&](const char* what) {
    return DownloadError(fmt::format("{}: the answer of {} {}; is it a Hugging Face endpoint?",
                                     reference.repository(), host_of(options.endpoint), what));
  };
  if (!reply.is_ok()) throw damaged("broke off");
  const Json info = Json::parse(body, nullptr, false);
  HubListing listing;
  if (!info.is_object() || !info.contains("sha") || !info["sha"].is_string() || !info.contains("siblings") ||
      !info["siblings"].is_array())
    throw damaged("is not a list of files");
  listing.commit = info["sha"].get<std::string>();
  if (!is_hex(listing.commit, 40)) throw damaged("names no commit");
  for (const Json& sibling : info["siblings"]) {
    if (!sibling.is_object() || !sibling.contains("rfilename") || !sibling["rfilename"].is_string()) continue;
    HubFile file{.path = sibling["rfilename"].get<std::string>()};
    if (!is_safe_path(file.path)) continue;
    const Json* size = nullptr;
    if (sibling.contains("size")) size = &sibling["size"];
    if (sibling.contains("lfs") && sibling["lfs"].is_object()) {
      const Json& lfs = sibling["lfs"];
      for (const char* key : {"sha256", "oid"})
        if (file.sha256.empty() && lfs.contains(key) && lfs[key].is_string())
          file.sha256 = lfs[key].get<std::string>();
      if (!is_hex(file.sha256, 64)) throw damaged("has a checksum that is none");
      if (lfs.contains("size")) size = &lfs["size"];
    }
    if (size == nullptr || !size->is_number_unsigned()) continue;  // nothing to check it by
    file.bytes = size->get<uint64_t>();
    listing.files.push_back(std::move(file));
  }
  return listing;
}

std::optional<fs::path> download_model(const HubReference& reference, const HubOptions& options,
                                       const DownloadObserver& observer) {
  return ModelDownload(reference, options, observer).run();
}

}  // namespace thermo
