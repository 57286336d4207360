#include "hub/hub_reference.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <map>

#include "base/error.h"

namespace thermo {
namespace {

constexpr std::string_view kPrefix = "hf:";
// Taken in this order when nothing is said.
constexpr const char* kUsual[] = {"Q4_K_M", "UD-Q4_K_XL", "Q4_K_XL", "Q4_K_S",
                                  "MXFP4",  "IQ4_XS",     "Q5_K_M",  "Q8_0"};

std::string upper(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(), [](unsigned char c) { return std::toupper(c); });
  return out;
}

bool is_name(std::string_view text) {
  return !text.empty() && text.size() <= 96 && text.front() != '.' && text.front() != '-' &&
         text.find("..") == std::string_view::npos &&
         std::all_of(text.begin(), text.end(), [](unsigned char c) {
           return std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.';
         });
}

// "https://hf.co/owner/repo/tree/main" -> "owner/repo"; what is no address of the hub stays.
std::string_view without_address(std::string_view text) {
  std::string_view rest = text;
  for (const std::string_view scheme : {"https://", "http://"})
    if (rest.starts_with(scheme)) rest.remove_prefix(scheme.size());
  for (const std::string_view host : {"huggingface.co/", "hf.co/"})
    if (rest.starts_with(host)) {
      rest.remove_prefix(host.size());
      const size_t owner = rest.find('/');
      return rest.substr(0, owner == std::string_view::npos ? owner : rest.find('/', owner + 1));
    }
  return text;
}

std::string_view file_name(std::string_view path) {
  return path.substr(path.rfind('/') + 1);
}

struct Part {
  std::string_view stem;
  int number = 0;  // 0: a file of its own
  int count = 1;
};

// "x-00002-of-00003.gguf" -> "x", 2, 3.
Part part_of(std::string_view path) {
  path.remove_suffix(5);  // ".gguf"
  const auto digits = [](std::string_view text) {
    return std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
  };
  const size_t n = path.size();
  if (n < 16 || path[n - 15] != '-' || path.substr(n - 9, 4) != "-of-" || !digits(path.substr(n - 14, 5)) ||
      !digits(path.substr(n - 5)))
    return {path};
  return {path.substr(0, n - 15), std::stoi(std::string(path.substr(n - 14, 5))),
          std::stoi(std::string(path.substr(n - 5)))};
}

// The quantisation at the end of a name: "Model-7B-UD-Q4_K_XL" -> "UD-Q4_K_XL".
std::string quant_of(std::string_view stem) {
  const std::string name = upper(file_name(stem));
  constexpr std::string_view kStarts[] = {"IQ", "TQ", "Q", "MXFP4", "NVFP4", "BF16", "F16", "F32", "FP8"};
  for (size_t at = name.find_last_of("-."); at != std::string::npos && at > 0;
       at = name.find_last_of("-.", at - 1)) {
    const std::string_view tail = std::string_view(name).substr(at + 1);
    const bool is_quant = std::any_of(std::begin(kStarts), std::end(kStarts), [&](std::string_view start) {
      return tail.starts_with(start) &&
             (start.size() > 2 || (tail.size() > start.size() &&
                                   std::isdigit(static_cast<unsigned char>(tail[start.size()])) != 0));
    });
    if (!is_quant) continue;
    const std::string_view before = std::string_view(name).substr(0, at);
    return before.ends_with("-UD") || before.ends_with(".UD") ? "UD-" + std::string(tail) : std::string(tail);
  }
  return "";
}

std::string list_of(std::span<const HubModel> models) {
  std::vector<std::string> names;
  for (const HubModel& model : models)
    names.push_back(model.quant.empty() ? std::string(file_name(model.name())) : model.quant);
  const size_t shown = std::min<size_t>(names.size(), 12);
  names.resize(shown);
  return fmt::format("{}{}", fmt::join(names, ", "), shown < models.size() ? ", ..." : "");
}

}  // namespace

std::string HubReference::describe() const {
  return fmt::format("{}{}{}{}", kPrefix, repository(), quant.empty() ? "" : ":", quant);
}

bool is_hub_reference(std::string_view text) {
  return text.starts_with(kPrefix);
}

bool is_hub_address(std::string_view text) {
  return without_address(text) != text;
}

HubReference parse_hub_reference(std::string_view text) {
  const std::string given(text);
  if (is_hub_address(text))
    throw ConfigError(fmt::format("'{}' is an address: write hf:{}", given, without_address(text)));
  if (text.starts_with(kPrefix)) text.remove_prefix(kPrefix.size());
  HubReference reference;
  const size_t colon = text.find(':');
  if (colon != std::string_view::npos) {
    reference.quant = text.substr(colon + 1);
    text = text.substr(0, colon);
    if (reference.quant.empty() || !is_safe_path(reference.quant))
      throw ConfigError(
          fmt::format("'{}': after the colon a quantisation (Q4_K_M) or a file name was expected", given));
  }
  const size_t slash = text.find('/');
  if (slash != std::string_view::npos) {
    reference.owner = text.substr(0, slash);
    reference.repo = text.substr(slash + 1);
  }
  if (!is_name(reference.owner) || !is_name(reference.repo))
    throw ConfigError(
        fmt::format("'{}' names no repository: owner/repo or owner/repo:Q4_K_M was expected", given));
  return reference;
}

bool is_safe_path(std::string_view path) {
  if (path.empty() || path.size() > 1024 || path.front() == '/') return false;
  for (const char c : path)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f || c == '\\' || c == ':') return false;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string_view part = path.substr(begin, end - begin);
    if (part.empty() || part == "." || part == "..") return false;
    begin = end + 1;
  }
  return true;
}

uint64_t HubModel::bytes() const {
  uint64_t sum = 0;
  for (const HubFile& part : parts) sum += part.bytes;
  return sum;
}

std::vector<HubModel> models_of(std::span<const HubFile> files) {
  std::map<std::string, std::map<int, HubFile>> by_stem;
  std::map<std::string, int> counts;
  for (const HubFile& file : files) {
    const std::string name = upper(file_name(file.path));
    if (!name.ends_with(".GGUF") || name.starts_with("MMPROJ") || name.find("IMATRIX") != std::string::npos ||
        !is_safe_path(file.path))
      continue;
    const Part part = part_of(file.path);
    by_stem[std::string(part.stem)][part.number] = file;
    counts[std::string(part.stem)] = part.count;
  }
  std::vector<HubModel> models;
  for (const auto& [stem, parts] : by_stem) {
    HubModel& model = models.emplace_back();
    model.quant = quant_of(stem);
    model.n_parts = static_cast<size_t>(std::max(1, counts[stem]));
    for (const auto& [part, file] : parts) model.parts.push_back(file);
  }
  return models;
}

const HubModel& choose_model(std::span<const HubModel> models, const HubReference& reference) {
  if (models.empty())
    throw ConfigError(fmt::format("{}: this repository has no GGUF file; look for one with GGUF in its name",
                                  reference.repository()));
  const auto with_quant = [&](std::string_view quant) {
    std::vector<const HubModel*> found;
    for (const HubModel& model : models)
      if (model.quant == quant) found.push_back(&model);
    return found;
  };
  if (reference.quant.empty()) {
    if (models.size() == 1) return models[0];
    for (const char* quant : kUsual)
      if (const auto found = with_quant(quant); found.size() == 1) return *found[0];
    throw ConfigError(fmt::format("{}: say which of its models is meant, as in {}:{} (there are {})",
                                  reference.repository(), reference.repository(), models[0].quant,
                                  list_of(models)));
  }
  for (const HubModel& model : models)
    if (model.name() == reference.quant || file_name(model.name()) == reference.quant) return model;
  const auto found = with_quant(upper(reference.quant));
  if (found.size() == 1) return *found[0];
  if (found.size() > 1)
    throw ConfigError(fmt::format("{}: {} of its models are {}; name the file, as in {}:{}",
                                  reference.repository(), found.size(), reference.quant,
                                  reference.repository(), file_name(found[0]->name())));
  throw ConfigError(fmt::format("{}: it has no {} (there are {})", reference.repository(), reference.quant,
                                list_of(models)));
}

}  // namespace thermo
