// What a client is told when the engine refuses or fails a request.
#pragma once

#include <string>

#include "base/result.h"
#include "server/api/api_error.h"
#include "server/server_state.h"

namespace thermo {

// `n_prompt`: tokens of its prompt. `request_id`: what the client may name when it asks what happened.
ApiError engine_error(const Error& error, const ServerState& server, Dialect dialect, size_t n_prompt,
                      const std::string& request_id);

}  // namespace thermo
