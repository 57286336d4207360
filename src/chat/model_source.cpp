#include "chat/model_source.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <vector>

#include "base/error.h"
#include "embedded/embedded_model.h"

namespace thermo {
namespace {

namespace fs = std::filesystem;

constexpr const char* kEmbeddedName = "the embedded model";

// "NAME-00002-of-00003.gguf": the number, or 0 for a file that is no part of a split model.
int part_number(const std::string& file_name) {
  size_t of = file_name.rfind("-of-");
  if (of == std::string::npos || of < 6 || file_name[of - 6] != '-') return 0;
  std::string digits = file_name.substr(of - 5, 5);
  if (!std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; })) return 0;
  return std::stoi(digits);
}

// Projectors of images and importance matrices often lie beside the model they belong to.
bool belongs_to_a_model(std::string file_name) {
  for (char& c : file_name) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c | 0x20) : c;
  return file_name.find("mmproj") != std::string::npos || file_name.find("imatrix") != std::string::npos;
}

std::string only_model_in(const fs::path& folder) {
  std::vector<std::string> models;
  std::error_code error;
  fs::directory_iterator entries(folder, error);
  for (; !error && entries != fs::directory_iterator(); entries.increment(error)) {
    const fs::directory_entry& entry = *entries;
    if (entry.path().extension() != ".gguf") continue;
    const std::string name = entry.path().filename().string();
    if (part_number(name) <= 1 && !belongs_to_a_model(name)) models.push_back(entry.path().string());
  }
  if (error)
    throw LoadError(fmt::format("{}: this folder cannot be read: {}; check its permissions", folder.string(),
                                error.message()));
  std::sort(models.begin(), models.end());
  if (models.size() == 1) return models[0];
  if (models.empty())
    throw LoadError(
        fmt::format("{}: there is no .gguf file in this folder; name a model file", folder.string()));
  for (std::string& model : models) model = fs::path(model).filename().string();
  size_t shown = std::min<size_t>(models.size(), 5);
  throw LoadError(fmt::format("{}: there are {} models in this folder ({}{}); name one of them",
                              folder.string(), models.size(),
                              fmt::join(models.begin(), models.begin() + static_cast<long>(shown), ", "),
                              shown < models.size() ? ", ..." : ""));
}

}  // namespace

std::string resolve_model_path(const std::string& model) {
  if (model.empty()) return "";
  if (model.starts_with("hf:") || model.starts_with("http://") || model.starts_with("https://"))
    throw ConfigError(fmt::format(
        "{}: an address is not opened; give a file, or hf:owner/repo[:quant] on the command line", model));
  std::error_code error;
  if (fs::is_directory(model, error)) return only_model_in(model);
  int part = part_number(fs::path(model).filename().string());
  if (part > 1)
    throw LoadError(fmt::format("{}: this is part {} of a split model; name its first part", model, part));
  return model;
}

GgufFile open_model(const std::string& model) {
  if (model.empty()) return GgufFile(embedded_model(), kEmbeddedName);
  return GgufFile(resolve_model_path(model));
}

std::string model_display_name(const std::string& model) {
  if (model.empty()) return "plankton";
  std::string name = fs::path(resolve_model_path(model)).filename().string();
  if (name.ends_with(".gguf")) name.resize(name.size() - 5);
  return name;
}

}  // namespace thermo
