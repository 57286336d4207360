#include "hub/hub_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>

#include "base/error.h"
#include "hub/http_client.h"

namespace thermo {

namespace fs = std::filesystem;

namespace {

constexpr std::string_view kFolderStart = "models--";

std::string read_ref(const fs::path& folder) {
  std::ifstream in(folder / "refs" / "main");
  std::string commit;
  std::getline(in, commit);
  return commit;
}

// "models--OWNER--REPO"; nullopt for anything else.
std::optional<HubReference> repository_of(const fs::path& folder) {
  std::string name = folder.filename().string();
  if (!name.starts_with(kFolderStart)) return std::nullopt;
  name = name.substr(kFolderStart.size());
  const size_t between = name.find("--");
  if (between == std::string::npos) return std::nullopt;
  return HubReference{.owner = name.substr(0, between), .repo = name.substr(between + 2)};
}

// The snapshots of a repository, that of main first.
std::vector<fs::path> snapshots_of(const fs::path& folder) {
  std::vector<fs::path> found;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder / "snapshots", error))
    found.push_back(entry.path());
  const std::string main = read_ref(folder);
  std::sort(found.begin(), found.end());
  std::stable_partition(found.begin(), found.end(),
                        [&](const fs::path& at) { return at.filename() == main; });
  return found;
}

// Files of a snapshot whose bytes are there.
std::vector<HubFile> files_of(const fs::path& snapshot) {
  std::vector<HubFile> files;
  std::error_code error;
  for (fs::recursive_directory_iterator at(snapshot, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    if (!fs::is_regular_file(at->path(), ignored)) continue;  // follows links
    files.push_back({.path = at->path().lexically_relative(snapshot).generic_string(),
                     .bytes = fs::file_size(at->path(), ignored)});
  }
  std::sort(files.begin(), files.end(), [](const HubFile& a, const HubFile& b) { return a.path < b.path; });
  return files;
}

}  // namespace

fs::path HubCache::folder_of(const HubReference& reference) const {
  return root_ / fmt::format("{}{}--{}", kFolderStart, reference.owner, reference.repo);
}

std::vector<CachedModel> HubCache::models_in(const fs::path& folder) const {
  std::vector<CachedModel> models;
  const std::optional<HubReference> repository = repository_of(folder);
  if (!repository) return models;
  std::set<std::string> seen;
  for (const fs::path& snapshot : snapshots_of(folder)) {
    for (const HubModel& model : models_of(files_of(snapshot))) {
      if (!seen.insert(model.name()).second) continue;
      CachedModel& cached = models.emplace_back();
      cached.reference = *repository;
      cached.reference.quant = model.quant.empty() ? model.name() : model.quant;
      cached.path = snapshot / model.name();
      cached.bytes = model.bytes();
      cached.complete = model.is_complete();
    }
  }
  return models;
}

std::vector<CachedModel> HubCache::list() const {
  std::vector<fs::path> folders;
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(root_, error))
    folders.push_back(entry.path());
  std::sort(folders.begin(), folders.end());
  std::vector<CachedModel> models;
  for (const fs::path& folder : folders)
    for (CachedModel& model : models_in(folder)) models.push_back(std::move(model));
  return models;
}

std::optional<CachedModel> HubCache::find(const HubReference& reference) const {
  for (const fs::path& snapshot : snapshots_of(folder_of(reference))) {
    std::vector<HubModel> models = models_of(files_of(snapshot));
    std::erase_if(models, [](const HubModel& model) { return !model.is_complete(); });
    if (models.empty()) continue;
    try {
      const HubModel& model = choose_model(models, reference);
      return CachedModel{.reference = reference, .path = snapshot / model.name(), .bytes = model.bytes()};
    } catch (const ConfigError&) {
      continue;  // it is not among these
    }
  }
  return std::nullopt;
}

std::vector<CachedModel> HubCache::remove(const HubReference& reference) const {
  const fs::path folder = folder_of(reference);
  std::vector<CachedModel> gone;
  std::error_code error;
  if (reference.quant.empty()) {
    gone = models_in(folder);
    if (gone.empty() && !fs::exists(folder, error))
      throw ConfigError(
          fmt::format("{}: there is nothing of it in {}", reference.repository(), root_.string()));
    fs::remove_all(folder, error);
    if (error) throw LoadError(fmt::format("{} cannot be deleted: {}", folder.string(), error.message()));
    return gone;
  }
  for (const fs::path& snapshot : snapshots_of(folder)) {
    const std::vector<HubModel> models = models_of(files_of(snapshot));
    if (models.empty()) continue;
    const HubModel* model = nullptr;
    try {
      model = &choose_model(models, reference);
    } catch (const ConfigError&) {
      continue;
    }
    gone.push_back({.reference = reference, .path = snapshot / model->name(), .bytes = model->bytes()});
    for (const HubFile& part : model->parts) {
      const fs::path link = snapshot / part.path;
      const fs::path blob = fs::canonical(link, error);
      const bool is_blob = !error && fs::is_symlink(link, error);
      fs::remove(link, error);
      if (!error && is_blob) fs::remove(blob, error);
      if (error) throw LoadError(fmt::format("{} cannot be deleted: {}", link.string(), error.message()));
    }
  }
  if (gone.empty())
    throw ConfigError(fmt::format("{}: there is no such model in {}; see what there is with `list`",
                                  reference.describe(), root_.string()));
  if (models_in(folder).empty()) fs::remove_all(folder, error);
  return gone;
}

void HubCache::make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw DownloadError(fmt::format("{} cannot be made: {}", folder.string(), error.message()));
}

void HubCache::link(const HubReference& reference, const std::string& commit, const HubFile& file,
                    const fs::path& blob) const {
  const fs::path at = folder_of(reference) / "snapshots" / commit / file.path;
  make_folder(at.parent_path());
  std::error_code error;
  fs::remove(at, error);
  fs::create_symlink(blob.lexically_relative(at.parent_path()), at, error);
  if (error) fs::create_hard_link(blob, at, error);  // a file system without links to names
  if (error)
    throw DownloadError(
        fmt::format("{}: {} cannot be linked there: {}", at.string(), blob.string(), error.message()));
}

void HubCache::set_main(const HubReference& reference, const std::string& commit) const {
  const fs::path folder = folder_of(reference) / "refs";
  make_folder(folder);
  const fs::path next = folder / "main.next";
  std::ofstream out(next);
  out << commit;
  out.close();
  std::error_code error;
  if (out) fs::rename(next, folder / "main", error);
  if (!out || error)
    throw DownloadError(fmt::format("{} cannot be written: {}", (folder / "main").string(),
                                    out ? error.message() : std::strerror(errno)));
}

}  // namespace thermo
