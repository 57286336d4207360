// Fuzz target: any bytes as the config.json of a drafter, or as its GGUF file. A refusal (LoadError) is fine.
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>

#include "base/error.h"
#include "gguf/gguf_file.h"
#include "model/drafter_network.h"
#include "model/model_config.h"
#include "safetensors/dflash_checkpoint.h"

namespace {

namespace fs = std::filesystem;

// A folder with the tensors of a drafter, in which config.json is written again and again.
class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("thermocline-fuzz-" + std::to_string(::getpid()))) {
    fs::create_directory(path_);
    const std::string directory = R"({"fc.weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}})";
    const uint64_t n = directory.size();
    std::string file(reinterpret_cast<const char*>(&n), sizeof(n));
    file += directory;
    file.resize(file.size() + 16);
    write("model.safetensors", file);
  }
  ~Folder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }
  void write(const char* name, std::string_view text) const {
    std::ofstream(path_ / name, std::ios::binary)
        .write(text.data(), static_cast<std::streamsize>(text.size()));
  }

 private:
  fs::path path_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const thermo::ModelConfig target =
      thermo::read_model_config(thermo::GgufFile(std::string(THERMO_TEST_DATA) + "/qwen35-f32.gguf"));
  static const Folder folder;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  try {
    if (text.starts_with("GGUF")) {
      thermo::read_dflash_config(thermo::GgufFile(std::as_bytes(std::span(data, size)), "fuzz"), target);
    } else {
      folder.write("config.json", text);
      thermo::read_dflash_config(thermo::open_dflash_checkpoint(folder.path().string()), target);
    }
  } catch (const thermo::LoadError&) {
  }
  return 0;
}
