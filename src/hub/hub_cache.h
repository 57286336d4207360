// Downloaded models on disk, laid out as the Hugging Face tools lay them out, so that both find the same
// files:
//
//   models--OWNER--REPO/refs/main                      the commit
//                      /blobs/SHA256                   the bytes; SHA256.incomplete while they come
//                      /snapshots/COMMIT/PATH          a link to a blob
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "hub/hub_reference.h"

namespace thermo {

struct CachedModel {
  HubReference reference;
  std::filesystem::path path;  // of the first file
  uint64_t bytes = 0;
  bool complete = true;  // all parts are there
};

class HubCache {
 public:
  explicit HubCache(std::filesystem::path root) : root_(std::move(root)) {}

  const std::filesystem::path& root() const { return root_; }
  std::filesystem::path folder_of(const HubReference& reference) const;

  // A complete model that is meant by the reference; nullopt: there is none here.
  std::optional<CachedModel> find(const HubReference& reference) const;
  std::vector<CachedModel> list() const;
  // Deletes the models that are meant: one, or without a quantisation all of the repository, with what was
  // left of broken downloads. Returns what they were. Throws ConfigError when there is none, LoadError when
  // a file cannot be deleted.
  std::vector<CachedModel> remove(const HubReference& reference) const;

  // These three throw DownloadError when the cache cannot be written.
  static void make_folder(const std::filesystem::path& folder);
  // A finished blob becomes a file of a snapshot.
  void link(const HubReference& reference, const std::string& commit, const HubFile& file,
            const std::filesystem::path& blob) const;
  // `commit` is what main means now.
  void set_main(const HubReference& reference, const std::string& commit) const;

 private:
  std::vector<CachedModel> models_in(const std::filesystem::path& folder) const;

  std::filesystem::path root_;
};

}  // namespace thermo
