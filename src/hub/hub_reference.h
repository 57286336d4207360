// "owner/repo:Q4_K_M": which model of which repository, and which of its files that is.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace thermo {

struct HubReference {
  std::string owner, repo;
  std::string quant = {};  // as it stands in file names, or a whole file name; empty: the usual one

  std::string repository() const { return owner + "/" + repo; }
  std::string describe() const;  // "hf:owner/repo:quant"
};

// Whether the text is meant as one: "hf:..."
bool is_hub_reference(std::string_view text);
// Whether it is an address of the hub: "https://huggingface.co/owner/repo", "hf.co/owner/repo:Q4_K_M".
bool is_hub_address(std::string_view text);
// With or without "hf:". Throws ConfigError; of an address, with the way it is written here.
HubReference parse_hub_reference(std::string_view text);

// A file of a repository.
struct HubFile {
  std::string path;  // in the repository
  uint64_t bytes = 0;
  std::string sha256 = {};  // empty: the repository does not say
};

// Model files only: GGUF, no projectors, no importance matrices; parts of a split model are one.
struct HubModel {
  std::string quant;           // "Q4_K_M"; empty where the name has none
  std::vector<HubFile> parts;  // in order
  size_t n_parts = 1;          // that there should be
  uint64_t bytes() const;
  bool is_complete() const { return parts.size() == n_parts; }
  const std::string& name() const { return parts.front().path; }
};
std::vector<HubModel> models_of(std::span<const HubFile> files);

// The one that is meant. Throws ConfigError with what there is.
const HubModel& choose_model(std::span<const HubModel> models, const HubReference& reference);

// Whether a path of a repository may become a path below a folder: no way out, no odd characters.
bool is_safe_path(std::string_view path);

}  // namespace thermo
