#include "cli/kept_heat.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <span>

#include "base/log.h"
#include "base/sha256.h"
#include "cli/user_folders.h"
#include "experts/heat_file.h"

namespace thermo {

namespace fs = std::filesystem;

namespace {

constexpr size_t kBytesOfARouter = 64 << 10;

void add_text(Sha256& hash, const std::string& text) {
  hash.update(std::as_bytes(std::span(text)));
}

}  // namespace

std::string router_fingerprint(const ModelConfig& config, const GgufFile& file) {
  Sha256 hash;
  add_text(hash, fmt::format("{} {} {} {} {}", config.arch_name, config.n_layer, config.n_embd,
                             config.route.n_expert, config.route.n_expert_used));
  for (int l = 0; l < config.n_layer; ++l) {
    const GgufTensor* router = file.find_tensor(fmt::format("blk.{}.ffn_gate_inp.weight", l));
    if (router == nullptr) continue;  // a dense layer
    add_text(hash, fmt::format(" {} {} ", l, dtype_name(router->dtype)));
    hash.update({router->data, std::min<size_t>(router->n_bytes, kBytesOfARouter)});
  }
  return hash.finish().substr(0, 16);
}

fs::path kept_heat_file(const ModelConfig& config, const GgufFile& file) {
  const fs::path folder = in_state_folder("heat", in_user_cache("thermocline/heat"));
  if (folder.empty()) return {};
  return folder / fmt::format("{}-{}.json", config.arch_name, router_fingerprint(config, file));
}

void keep_heat(const ExpertFlags& flags, const ModelConfig& config, const GgufFile& file,
               EngineOptions& options) {
  if (!flags.keep_heat || !options.heat_file.empty() || !config.is_moe()) return;
  const fs::path path = kept_heat_file(config, file);
  if (path.empty()) return;
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  if (access(path.parent_path().c_str(), W_OK) != 0) {
    log_info("cli", "heat is not kept: {} cannot be written", path.parent_path().string());
    return;
  }
  if (fs::exists(path, error))
    if (const Result<SavedHeat> saved = read_heat(path.string()); !saved) {
      log_warning("cli", "{}: a new one is started", saved.error().message);
      fs::remove(path, error);
    }
  options.heat_file = path.string();
}

}  // namespace thermo
