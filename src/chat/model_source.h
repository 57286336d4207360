// From what the user typed to an open model file.
#pragma once

#include <string>

#include "gguf/gguf_file.h"

namespace thermo {

// `model` is a path, the first file of a split model, or a folder with exactly one model in it; empty is the
// embedded model. Throws LoadError, or ConfigError for forms that are not supported (`hf:user/repo`).
GgufFile open_model(const std::string& model);

// The path open_model() would open; empty for the embedded model.
std::string resolve_model_path(const std::string& model);

// "plankton" for the embedded model, else the file name without .gguf: the model id of replies.
std::string model_display_name(const std::string& model);

}  // namespace thermo
