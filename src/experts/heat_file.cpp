#include "experts/heat_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>

#include "base/check.h"
#include "base/json.h"

namespace thermo {
namespace {

constexpr const char* kFormat = "thermocline-heat";
constexpr int kVersion = 1;
// A model of 200 layers with 1000 experts takes 2 MB; a file near this size is not a heat file.
constexpr size_t kMostBytes = 64u << 20;
constexpr size_t kMostLayers = 10000;

Error refuse(const std::string& path, const std::string& sentence) {
  return {ErrorCode::InvalidArgument, fmt::format("{}: {}", path, sentence)};
}

Error damaged(const std::string& path, const std::string& what) {
  return refuse(path, what + "; delete the file or give another one");
}

std::string text_of(const HeatFileInfo& info, const HeatMap& heat) {
  const Json name = info.name, architecture = info.architecture;
  std::string text = fmt::format(
      "{{\"format\": \"{}\", \"version\": {},\n \"architecture\": {}, \"name\": {},\n"
      " \"n_layers\": {}, \"n_active\": {}, \"n_embd\": {}, \"n_tokens\": {},\n \"heat\": [",
      kFormat, kVersion, architecture.dump(-1, ' ', false, Json::error_handler_t::replace),
      name.dump(-1, ' ', false, Json::error_handler_t::replace), info.n_expert.size(), info.n_active,
      info.n_embd, heat.n_tokens());
  const std::vector<float> values = heat.values();
  size_t at = 0;
  for (size_t layer = 0; layer < info.n_expert.size(); ++layer) {
    text += layer == 0 ? "\n  [" : ",\n  [";
    for (int e = 0; e < info.n_expert[layer]; ++e)
      text += fmt::format("{}{}", e == 0 ? "" : ", ",
                          values[at++]);  // the shortest text that reads back the same
    text += "]";
  }
  return text + "\n ]}\n";
}

// Reads a whole number from 0 to `most`, or nothing.
std::optional<uint64_t> whole(const Json& object, const char* key, uint64_t most) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number_integer()) return std::nullopt;
  if (found->is_number_unsigned() ? found->get<uint64_t>() > most : found->get<int64_t>() < 0)
    return std::nullopt;
  return found->get<uint64_t>();
}

// The values of one layer; empty text: fine, else what is wrong.
std::string read_layer(const Json& layer, size_t index, SavedHeat& saved) {
  if (!layer.is_array()) return fmt::format("layer {} is not a list of numbers", index);
  for (size_t e = 0; e < layer.size(); ++e) {
    const Json& value = layer[e];
    const float heat = value.is_number() ? static_cast<float>(value.get<double>()) : -1.0f;
    if (!std::isfinite(heat) || heat < 0.0f)
      return fmt::format("expert {} of layer {} has heat {}, expected a number, 0 or more", e, index,
                         value.dump().substr(0, 40));
    saved.values.push_back(heat);
  }
  saved.info.n_expert.push_back(static_cast<int>(layer.size()));
  return "";
}

}  // namespace

HeatFileInfo HeatFileInfo::of(const ExpertCatalog& catalog, std::string architecture, std::string name) {
  HeatFileInfo info;
  info.architecture = std::move(architecture);
  info.name = std::move(name);
  info.n_active = catalog.n_active;
  info.n_embd = catalog.n_embd;
  for (const ExpertLayer& layer : catalog.layers) info.n_expert.push_back(layer.n_expert());
  return info;
}

bool HeatFileInfo::same_model(const HeatFileInfo& other) const {
  return architecture == other.architecture && n_active == other.n_active && n_embd == other.n_embd &&
         n_expert == other.n_expert;
}

std::string HeatFileInfo::describe() const {
  const int most = n_expert.empty() ? 0 : *std::max_element(n_expert.begin(), n_expert.end());
  return fmt::format("{}{} ({} layers of {} experts, {} active, {} wide)", architecture,
                     name.empty() ? "" : fmt::format(" '{}'", name), n_expert.size(), most, n_active, n_embd);
}

Status save_heat(const std::string& path, const HeatFileInfo& info, const HeatMap& heat) {
  THERMO_CHECK(heat.n_layers() == static_cast<int>(info.n_expert.size()), "the heat of this model");
  const std::string text = text_of(info, heat);
  const std::string beside = fmt::format("{}.{}.tmp", path, getpid());
  std::FILE* file = std::fopen(beside.c_str(), "wb");
  bool ok = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  int error = errno;
  if (file != nullptr && std::fclose(file) != 0) {
    ok = false;
    error = errno;
  }
  if (ok && std::rename(beside.c_str(), path.c_str()) != 0) {
    ok = false;
    error = errno;
  }
  if (ok) return {};
  if (file != nullptr) std::remove(beside.c_str());
  return refuse(path,
                fmt::format("the heat file cannot be written ({}); give a path in a folder you may write to",
                            std::strerror(error)));
}

namespace {

// Programs that share a file read and write it one after the other. The lock is on its folder: nothing is
// left lying about.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path) {
    const size_t slash = path.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
    fd_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd_ >= 0) ::flock(fd_, LOCK_EX);  // where it cannot be had, the file is still replaced in one step
  }
  ~FolderLock() {
    if (fd_ >= 0) ::close(fd_);
  }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_;
};

// `heat` after so many more tokens that used nothing.
std::vector<float> faded(HeatMap heat, uint64_t n_tokens) {
  constexpr uint64_t kStep = 1 << 20;
  for (; n_tokens > 0; n_tokens -= std::min(n_tokens, kStep))
    heat.advance(static_cast<int>(std::min(n_tokens, kStep)));
  return heat.values();
}

}  // namespace

Status add_heat(const std::string& path, const HeatFileInfo& info, const HeatMap& heat, HeatBase& base) {
  const auto same = [](const HeatMap& a, const HeatMap& b) {
    return a.n_tokens() == b.n_tokens() && a.values() == b.values();
  };
  const FolderLock lock(path);
  HeatMap now = base.file;
  const bool exists = ::access(path.c_str(), F_OK) == 0;
  if (exists)
    if (const Status status = load_heat(path, info, now); !status) return status;
  HeatMap sum = heat;
  if (exists && !(same(now, base.file) && same(base.file, base.ours))) {
    const uint64_t n_counted = heat.n_tokens() - std::min(heat.n_tokens(), base.ours.n_tokens());
    const std::vector<float> ours = heat.values(), before = faded(base.ours, n_counted);
    std::vector<float> values = faded(now, n_counted);
    for (size_t i = 0; i < values.size(); ++i) values[i] += std::max(0.0f, ours[i] - before[i]);
    sum.set(values, now.n_tokens() + n_counted);
  }
  if (const Status status = save_heat(path, info, sum); !status) return status;
  base = {.ours = heat, .file = std::move(sum)};
  return {};
}

Result<SavedHeat> parse_heat(const std::string& path, const std::string& text) {
  const Json root = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (root.is_discarded() || !root.is_object())
    return damaged(path, "this is not a heat file, or only the beginning of one");
  if (root.value("format", Json()) != Json(kFormat))
    return damaged(path, fmt::format("this is not a heat file: \"format\": \"{}\" was expected", kFormat));
  const std::optional<uint64_t> version = whole(root, "version", 1000000);
  if (version != kVersion)
    return refuse(path,
                  fmt::format("heat file version {} is not known, {} was expected; it was written by a newer "
                              "thermocline",
                              version ? fmt::format("{}", *version) : std::string("?"), kVersion));

  SavedHeat saved;
  const auto architecture = root.find("architecture"), name = root.find("name"), heat = root.find("heat");
  if (architecture == root.end() || !architecture->is_string() || name == root.end() || !name->is_string())
    return damaged(path, "the heat file does not say which model it is for");
  saved.info.architecture = architecture->get<std::string>();
  saved.info.name = name->get<std::string>();
  const auto n_layers = whole(root, "n_layers", kMostLayers), n_active = whole(root, "n_active", 1000000),
             n_embd = whole(root, "n_embd", 100000000), n_tokens = whole(root, "n_tokens", UINT64_MAX / 2);
  if (!n_layers || !n_active || !n_embd || !n_tokens)
    return damaged(path,
                   "n_layers, n_active, n_embd or n_tokens of the heat file is missing or not a whole "
                   "number");
  saved.info.n_active = static_cast<int>(*n_active);
  saved.info.n_embd = static_cast<int>(*n_embd);
  saved.n_tokens = *n_tokens;
  if (heat == root.end() || !heat->is_array() || heat->size() != *n_layers)
    return damaged(path, fmt::format("the heat file says {} layers but has heat for {}", *n_layers,
                                     heat != root.end() && heat->is_array() ? heat->size() : 0));
  for (size_t l = 0; l < heat->size(); ++l) {
    if (const std::string wrong = read_layer((*heat)[l], l, saved); !wrong.empty())
      return damaged(path, wrong);
  }
  return saved;
}

Result<SavedHeat> read_heat(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  std::string text;
  int error = file != nullptr ? 0 : errno;
  if (file != nullptr) {
    char chunk[65536];
    while (const size_t n = std::fread(chunk, 1, sizeof(chunk), file)) {
      text.append(chunk, n);
      if (text.size() > kMostBytes) break;
    }
    if (std::ferror(file) != 0) error = errno;
    std::fclose(file);
  }
  if (error != 0)
    return refuse(path,
                  fmt::format("the heat file cannot be read ({}); check the path", std::strerror(error)));
  if (text.size() > kMostBytes) return damaged(path, "this is far too large for a heat file");
  return parse_heat(path, text);
}

Status load_heat(const std::string& path, const HeatFileInfo& info, HeatMap& heat) {
  THERMO_CHECK(heat.n_layers() == static_cast<int>(info.n_expert.size()), "the heat of this model");
  Result<SavedHeat> saved = read_heat(path);
  if (!saved) return saved.error();
  if (!saved->info.same_model(info))
    return refuse(path,
                  fmt::format("the heat file is for another model: it is for {}, this is {}; give each model "
                              "its own file",
                              saved->info.describe(), info.describe()));
  heat.set(saved->values, saved->n_tokens);
  return {};
}

}  // namespace thermo
