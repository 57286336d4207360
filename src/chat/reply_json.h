// The reply object of the OpenAI chat and completion APIs.
#pragma once

#include <string>

#include "chat/answer.h"

namespace thermo {

// What a reply says about who made it.
struct ReplyIdentity {
  std::string model;
  std::string fingerprint;  // changes when the same request may give another answer
};

// One JSON object and a line end. `raw`: a text_completion object instead of a chat.completion.
std::string reply_json(const Answer& answer, const Tokenizer& tokenizer, const ReplyIdentity& identity,
                       bool raw);

}  // namespace thermo
