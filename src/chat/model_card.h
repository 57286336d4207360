// A model's card: a JSON file that says what its makers recommend. It stands between the options, which win
// over it, and what the model file says.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "base/json.h"
#include "gguf/gguf_file.h"
#include "sampling/sampling_params.h"

namespace thermo {

struct ModelCard {
  std::string path;
  Json values = Json::object();  // as the file has them
  std::optional<int> max_tokens;
  std::optional<int> reply_reserve;                // tokens kept for what follows the reasoning, at most
  std::optional<std::string> thinking_terminator;  // ends reasoning whose budget is used up
  std::map<std::string, int> reasoning_efforts;    // tokens

  // What `sampling` says; the rest stays.
  void apply(SamplingParams& params) const;
};

// Throws ConfigError: what was seen where, and what was expected.
ModelCard read_model_card(const std::string& path);

// The card of a model (as for open_model()), the first of: NAME.card.json beside the file, where NAME is its
// name without .gguf and the number of its part; then, in lower case, NAME.card.json and that of the name
// inside the file in share/thermocline/cards beside the program's folder. nullopt: there is none.
std::optional<ModelCard> find_model_card(const std::string& model, const GgufFile& file);

}  // namespace thermo
