// Turns in the form in which templates expect them, whatever the client sent. The rules keep prompts
// append-only: what a client sends back in its next request begins with the same tokens.
#pragma once

#include <string>
#include <vector>

#include "server/api/generation_request.h"

namespace thermo {

// What an image or a part that is no text becomes.
std::string image_placeholder(const std::string& media_type, size_t n_bytes);

// In place, on turns with the roles system, developer, user, assistant, tool:
// - leading system turns become one, a later one becomes a user turn inside <system-reminder>;
// - a billing header at the beginning of the system text is removed;
// - tool results come in the order of the calls they answer; one without a call becomes a user turn;
// - reasoning inside <think> at the beginning of an assistant's text is taken out of it;
// - without a user turn an empty one is added: at the end, or before the answer that is continued.
// Throws ApiError when there are no turns. REQUIRES: continue_last_turn was read.
void normalise_turns(GenerationRequest& request, const RequestDefaults& defaults);

}  // namespace thermo
