// The reply object of the OpenAI chat and completion APIs, for `run --json`.
#pragma once

#include <string>

#include "cli/generate.h"

namespace thermo {

// `raw`: a text_completion object instead of a chat.completion.
std::string reply_json(const Answer& answer, const Tokenizer& tokenizer, const std::string& model_id,
                       bool raw);

}  // namespace thermo
