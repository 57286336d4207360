// Fetches a model from a hub into the cache: the files it needs, each checked by size and SHA-256. What was
// broken off is continued the next time, by any process; two processes never write one file.
#pragma once

#include <filesystem>
#include <functional>
#include <optional>
#include <string>

#include "hub/http_client.h"
#include "hub/hub_cache.h"

namespace thermo {

struct HubOptions {
  std::string endpoint = "https://huggingface.co";
  std::string token;  // for private and gated repositories
  std::filesystem::path cache;
  double retry_seconds = 0.25;  // before the second try; doubled each time
};

struct DownloadObserver {
  // `file`: what is fetched now; bytes of the whole model.
  std::function<void(const std::string& file, uint64_t done, uint64_t total)> on_progress;
  std::function<bool()> cancelled;
};

// What a repository has. Throws DownloadError.
struct HubListing {
  std::string commit;
  std::vector<HubFile> files;
};
HubListing list_repository(const HubReference& reference, const HubOptions& options, HttpClient& http);

// The path of the model's first file; nullopt: cancelled. Throws DownloadError (no connection, refused,
// damaged on the way, no room on the disk) and ConfigError (the repository has no such model).
std::optional<std::filesystem::path> download_model(const HubReference& reference, const HubOptions& options,
                                                    const DownloadObserver& observer);

}  // namespace thermo
