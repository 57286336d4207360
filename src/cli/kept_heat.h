// Heat that is kept without being asked for: one file for each model in the user's cache folder, found by
// what the model is and not by where its file lies.
#pragma once

#include <filesystem>
#include <string>

#include "cli/options/expert_options.h"
#include "gguf/gguf_file.h"
#include "model/model_config.h"

namespace thermo {

// Sixteen hexadecimal digits of the model's shape and its routers, which decide what is used. Quantisations
// of one model mostly keep the routers as they are, and so share it.
std::string router_fingerprint(const ModelConfig& config, const GgufFile& file);

// thermocline/heat/ARCHITECTURE-FINGERPRINT.json in the user's cache folder; empty: there is no such folder.
std::filesystem::path kept_heat_file(const ModelConfig& config, const GgufFile& file);

// Makes that the heat file of `options`, unless another one or none was asked for, or the model has no
// experts. A folder that cannot be written is worth a line of the log; a damaged file is begun anew.
void keep_heat(const ExpertFlags& flags, const ModelConfig& config, const GgufFile& file,
               EngineOptions& options);

}  // namespace thermo
