#include "hub/local_models.h"

#include <algorithm>
#include <fstream>

#include "base/json.h"
#include "hub/hub_cache.h"

namespace thermo {

namespace fs = std::filesystem;

namespace {

constexpr int kMaxDepth = 4;                  // of folders below a models folder
constexpr uintmax_t kMaxManifest = 1u << 20;  // bytes

// GGUF files below a folder, by their path in it.
std::vector<HubFile> gguf_files(const fs::path& folder) {
  std::vector<HubFile> files;
  std::error_code error;
  fs::recursive_directory_iterator at(folder, fs::directory_options::skip_permission_denied, error), end;
  for (; !error && at != end; at.increment(error)) {
    if (at.depth() >= kMaxDepth) at.disable_recursion_pending();
    std::error_code ignored;
    if (at->path().extension() == ".gguf" && fs::is_regular_file(at->path(), ignored))
      files.push_back({.path = at->path().lexically_relative(folder).generic_string(),
                       .bytes = fs::file_size(at->path(), ignored)});
  }
  return files;
}

void add_folder(const fs::path& folder, const char* source, std::vector<LocalModel>& models) {
  for (const HubModel& model : models_of(gguf_files(folder)))
    models.push_back({.name = model.name(),
                      .source = source,
                      .path = folder / model.name(),
                      .bytes = model.bytes(),
                      .complete = model.is_complete()});
}

// manifests/HOST/NAMESPACE/NAME/TAG -> "name:tag", for the usual host and namespace without them.
std::string ollama_name(const fs::path& manifest) {
  std::vector<std::string> parts;
  for (const fs::path& part : manifest) parts.push_back(part.string());
  if (parts.size() < 2) return manifest.generic_string();
  const std::string tag = parts.back();
  parts.pop_back();
  if (parts.size() > 1 && parts.front() == "registry.ollama.ai") parts.erase(parts.begin());
  if (parts.size() > 1 && parts.front() == "library") parts.erase(parts.begin());
  std::string name;
  for (const std::string& part : parts) name += (name.empty() ? "" : "/") + part;
  return name + ":" + tag;
}

void add_ollama(const fs::path& folder, std::vector<LocalModel>& models) {
  const fs::path manifests = folder / "manifests";
  std::error_code error;
  fs::recursive_directory_iterator at(manifests, fs::directory_options::skip_permission_denied, error), end;
  for (; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    if (!fs::is_regular_file(at->path(), ignored) || fs::file_size(at->path(), ignored) > kMaxManifest)
      continue;
    std::ifstream in(at->path());
    const Json manifest = Json::parse(in, nullptr, false);
    if (!manifest.is_object() || !manifest.contains("layers") || !manifest["layers"].is_array()) continue;
    for (const Json& layer : manifest["layers"]) {
      if (!layer.is_object() || layer.value("mediaType", Json()) != "application/vnd.ollama.image.model")
        continue;
      const Json digest = layer.value("digest", Json());
      if (!digest.is_string()) continue;
      std::string blob = digest.get<std::string>();
      std::replace(blob.begin(), blob.end(), ':', '-');
      if (!is_safe_path(blob)) continue;
      const fs::path path = folder / "blobs" / blob;
      if (!fs::is_regular_file(path, ignored)) continue;
      models.push_back({.name = ollama_name(at->path().lexically_relative(manifests)),
                        .source = "ollama",
                        .path = path,
                        .bytes = fs::file_size(path, ignored)});
    }
  }
}

}  // namespace

std::vector<LocalModel> find_local_models(const ModelFolders& folders) {
  std::vector<LocalModel> models;
  if (!folders.hub_cache.empty())
    for (const CachedModel& cached : HubCache(folders.hub_cache).list())
      models.push_back({.name = cached.reference.describe(),
                        .source = "hugging face",
                        .path = cached.path,
                        .bytes = cached.bytes,
                        .complete = cached.complete});
  for (const fs::path& folder : folders.lm_studio) add_folder(folder, "lm studio", models);
  for (const fs::path& folder : folders.ollama) add_ollama(folder, models);
  for (const fs::path& folder : folders.plain) add_folder(folder, "folder", models);
  std::stable_sort(models.begin(), models.end(), [](const LocalModel& a, const LocalModel& b) {
    return std::pair(a.source, a.name) < std::pair(b.source, b.name);
  });
  return models;
}

}  // namespace thermo
