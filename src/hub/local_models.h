// Models that are on this machine already, in the folders of other programs too.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace thermo {

// Where to look; an empty path is left out.
struct ModelFolders {
  std::filesystem::path hub_cache;               // Hugging Face
  std::vector<std::filesystem::path> lm_studio;  // OWNER/REPO/FILE.gguf
  std::vector<std::filesystem::path> ollama;     // manifests and blobs
  std::vector<std::filesystem::path> plain;      // GGUF files, in folders or not
};

struct LocalModel {
  std::string name;            // as people call it: "hf:owner/repo:Q4_K_M", "llama3:latest", "file.gguf"
  std::string source;          // "hugging face", "lm studio", "ollama", "folder"
  std::filesystem::path path;  // of the first file
  uint64_t bytes = 0;
  bool complete = true;
};

// Sorted by source and name. What cannot be read is left out: these folders belong to others.
std::vector<LocalModel> find_local_models(const ModelFolders& folders);

}  // namespace thermo
