// A DFlash drafter as its authors publish it: config.json and model.safetensors, or several with an index. It
// is handed out as the GGUF file that a converter would make of it, with the tensors where they are.
#pragma once

#include <string>

#include "gguf/gguf_file.h"

namespace thermo {

// Whether the path means a checkpoint: a folder with a config.json, or a .safetensors file.
bool is_checkpoint(const std::string& path);

// Throws LoadError: something is missing, damaged, or no DFlash drafter.
GgufFile open_dflash_checkpoint(const std::string& path);

}  // namespace thermo
