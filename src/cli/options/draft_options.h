// Options that say who drafts; see docs/speculative.md.
#pragma once

#include <optional>
#include <string>

#include "cli/options/options.h"
#include "engine/engine.h"
#include "gguf/gguf_file.h"

namespace thermo {

struct DraftFlags {
  std::optional<std::string> draft;  // a file, mtp, lookup, none or auto
  std::string budget = "auto";       // tokens of a round
  std::string types, file;           // llama.cpp's names for the same
  bool standard = false;
  int n_max = 0, n_min = 0;
  float p_min = 0.0f;
  std::string k_type = "auto", v_type = "auto";

  bool asks_for_drafts() const {
    if (draft) return *draft != "none";
    return types.empty() ? !file.empty() || standard : types != "none";
  }
};

// --draft --draft-budget, and llama.cpp's: -md --spec-type --spec-draft-n-max --spec-draft-n-min
// --spec-draft-p-min -ctkd -ctvd --spec-default.
void add_draft_options(OptionSet& set, DraftFlags& flags);

// Of these only the names for --draft: -md and --spec-type.
void add_drafter_names(OptionSet& set, DraftFlags& flags, bool from_environment = true);

// A GGUF file, or a published checkpoint: its folder or its .safetensors file. Throws LoadError.
GgufFile open_drafter(const std::string& path);

// Puts the flags into the options. `file` gets the drafter and must outlive the engine. `model`: as for
// open_model(), and what it is; the embedded one has its drafter with it. Throws ConfigError (flags that make
// no sense) and LoadError (a file that cannot be read).
void set_draft_options(const DraftFlags& flags, const std::string& model, const ModelConfig& config,
                       std::optional<GgufFile>& file, EngineOptions& options);

// "draft dflash: 5.31 tokens a step, 212 of 480 accepted in 49 rounds (by depth 93 81 ... %), time: draft 12
// %, verify 85 %, plain steps 3 %"; empty without a drafter.
std::string describe(const DraftTelemetry& telemetry);

}  // namespace thermo
