// Models by name: where they come from and where they are kept, as the options and the environment say.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "cli/options/options.h"
#include "cli/terminal.h"
#include "hub/download.h"
#include "hub/local_models.h"

namespace thermo {

struct HubFlags {
  std::string repo, file;  // -hf, -hff
  std::string token;       // empty: HF_TOKEN, or the file that the Hugging Face tools keep it in
  bool offline = false;
};

// -hft and --offline.
void add_hub_connection_options(OptionSet& set, HubFlags& flags);
// These, -hf and -hff. Before the command runs, each model that begins with hf: becomes
// a path; what is not here yet is downloaded.
void add_hub_options(OptionSet& set, std::string& model);
void add_hub_options(OptionSet& set, std::vector<std::string>& models);

// The endpoint, the token and the cache.
HubOptions hub_options(const HubFlags& flags);
// Where models may be. `models_dir` empty: the folder of this program.
ModelFolders model_folders(const std::string& models_dir);

// Downloads with a progress line. Throws as download_model() does, and an error with the exit code of an
// interrupt.
std::string fetch_model(const HubReference& reference, const HubOptions& options, const Terminal& terminal);

}  // namespace thermo
